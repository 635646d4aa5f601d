"""One image file to one uint8 tensor: every bit depth, palette, alpha, orientation; broken files are named."""

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from tokenmix.errors import UserError

Box = tuple[float, float, float, float]

# Only formats that are recognised by their content: a text file must not pass for an image, and none of these runs a
# helper program, as EPS would.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000")
TRANSPARENT = ("RGBA", "RGBa", "LA", "La", "PA")
# Above this, one decoded image fills more than 2 GB.
MAX_PIXELS = 500_000_000
# Larger ones are decoded one at a time, however many threads read images.
LARGE_PIXELS = 1 << 24
# What is converted at a time.
PART_PIXELS = 1 << 20
_pillow_limit, _one_large = threading.Lock(), threading.Lock()


class UnreadableImage(Exception):
    """Why a file is not a usable image, in a few words."""


def size_of(img_size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of an `img_size`; `UserError` unless both are positive."""
    size = (img_size, img_size) if isinstance(img_size, int) else (int(img_size[0]), int(img_size[1]))
    if min(size) < 1:
        raise UserError(f"img_size must be at least 1, got {img_size}")
    return size


def read_image(path: str | Path, channels: int, img_size: int | tuple[int, int], *, crop_pct: float = 1.0) -> Tensor:
    """The image of a file as a model takes it, uint8 (channels, height, width).

    It is turned by its EXIF orientation, laid on white where it is transparent, resized (antialiased) until it covers
    `img_size` / `crop_pct` and cropped about its centre.

    Raises:
        UserError: the file is missing, empty, truncated, no image, too large, or holds NaN; the message names it.
    """
    try:
        return decode(path, channels, size_of(img_size), crop_pct=crop_pct)
    except UnreadableImage as reason:
        raise UserError(f"{path} {reason}; give a readable PNG, JPEG, WebP, BMP, GIF or TIFF image") from None


def decode(source: str | Path | bytes, channels: int, size: tuple[int, int], *, crop_pct: float = 1.0) -> Tensor:
    """`read_image` of a file or of a file's bytes that raises `UnreadableImage`."""
    with _opened(source) as image:
        # A JPEG can be decoded at an eighth of its size; twice the target keeps the quality of the resizing.
        image.draft(None, (round(2 * size[1] / crop_pct), round(2 * size[0] / crop_pct)))
        image = _plain(ImageOps.exif_transpose(image), channels)
        box = _cover(image.size, size, crop_pct)
        return _tensor(image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box, reducing_gap=3), channels)


def decode_part(
    source: str | Path | bytes,
    channels: int,
    size: tuple[int, int],
    choose: Callable[[Image.Image], tuple[Box, Image.Resampling]],
) -> Tensor:
    """The part of an image that `choose` picks, resized to `size`; raises `UnreadableImage`."""
    with _opened(source) as image:
        image = _plain(ImageOps.exif_transpose(image), channels)
        box, resampling = choose(image)
        return _tensor(image.crop(box).resize((size[1], size[0]), resampling), channels)  # type: ignore[arg-type]


def decode_stored(source: str | Path | bytes) -> Tensor:
    """An image as it is stored, uint8 (3, H, W), not turned by EXIF: masks and boxes count pixels so."""
    with _opened(source) as image:
        return _tensor(_plain(image, 3), 3)


def decode_numbers(source: str | Path | bytes) -> Tensor:
    """The values of an image's pixels (H, W), uint8 or of more bits int64: palette indices, or grey levels."""
    with _opened(source) as image:
        if image.mode not in ("P", "L", "1") and not image.mode.startswith("I"):
            raise UnreadableImage(
                f"is a picture of mode {image.mode}, with no class numbers in it; give a palette or grey"
            )
        values = np.array(image)
        return torch.from_numpy(values.astype(np.int64 if values.itemsize > 1 else np.uint8, copy=False))


def _plain(image: Image.Image, channels: int) -> Image.Image:
    """The image in 8 bits on white: grey for one channel, or if it is; else RGB.

    A part after the other, since levels as floats and layers of transparency take many times what is kept.
    """
    if channels not in (1, 3):
        raise UserError(f"images have 1 or 3 channels here, not {channels}")
    clear = image.mode in TRANSPARENT or "transparency" in image.info
    grey = channels == 1 or image.mode in ("1", "L", "F") or image.mode.startswith("I")
    mode = "L" if grey and (channels == 1 or not clear) else "RGB"
    if image.mode == mode and not clear:
        return image
    high: Any = image.getextrema()[1] if image.mode == "F" else 0
    whole, rows = Image.new(mode, image.size), max(1, PART_PIXELS // image.width)
    for top in range(0, image.height, rows):
        part = image.crop((0, top, image.width, min(top + rows, image.height)))
        whole.paste(_opaque(_eight_bit(part, high)).convert(mode), (0, top))
    return whole


def _tensor(image: Image.Image, channels: int) -> Tensor:
    array = np.array(image if channels == 1 else image.convert("RGB"), dtype=np.uint8)
    return torch.from_numpy(array.reshape(image.height, image.width, channels)).permute(2, 0, 1).contiguous()


def probe(path: str | Path) -> None:
    """Raise `UnreadableImage` if the head of the file shows that it cannot be decoded; the pixels are not read."""
    with _opened(path):
        pass


@contextlib.contextmanager
def _opened(source: str | Path | bytes) -> Iterator[Image.Image]:
    try:
        if not isinstance(source, bytes) and os.path.isdir(source):
            raise UnreadableImage("is a folder")
        if (len(source) if isinstance(source, bytes) else os.path.getsize(source)) == 0:
            raise UnreadableImage("is empty (0 bytes)")
        with _open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if image.width * image.height > MAX_PIXELS:
                raise UnreadableImage(f"has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
            with _one_large if image.width * image.height > LARGE_PIXELS else contextlib.nullcontext():
                yield image
    except UnreadableImage:
        raise
    except FileNotFoundError:
        raise UnreadableImage("does not exist") from None
    except PermissionError:
        raise UnreadableImage("may not be read by this user") from None
    except Image.UnidentifiedImageError:
        raise UnreadableImage("is not an image of a known format") from None
    # Decoders meet damaged data with any exception: OSError, SyntaxError, struct.error, ValueError, zlib.error, ...
    except Exception as error:
        raise UnreadableImage(_reason(error)) from None


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"is truncated ({text})" if "truncated" in text.lower() else f"cannot be decoded ({text})"


def _open(source: str | Path | io.BytesIO) -> Image.Image:
    """Open without Pillow's own limit, which is a setting of the whole process and warns at 89 million pixels."""
    Image.init()
    with _pillow_limit:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(source, formats=[name for name in FORMATS if name in Image.OPEN])
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _eight_bit(image: Image.Image, high: float) -> Image.Image:
    """Grey images of 16 or 32 bits or floats up to `high` as 8-bit grey; others as they are."""
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.float64) / 257
    elif image.mode == "F":
        levels = np.asarray(image, dtype=np.float64)
        if not np.isfinite(levels).all():
            raise UnreadableImage("holds NaN or infinite values")
        if (low := levels.min()) < 0 or high > 255:
            raise UnreadableImage(f"holds values from {low:g} to {high:g}, outside of 0..1 and of 0..255")
        levels = levels * 255 if high <= 1 else levels
    else:
        return image
    return Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))


def _opaque(image: Image.Image) -> Image.Image:
    if image.mode not in TRANSPARENT and "transparency" not in image.info:
        return image
    if image.mode in ("RGBa", "La"):
        image = image.convert({"RGBa": "RGBA", "La": "LA"}[image.mode])
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


def _cover(size: tuple[int, int], target: tuple[int, int], share: float) -> Box:
    """The centred box of the target's shape that fills `share` of an image of (width, height) `size`."""
    width, height = size
    scale = share * min(width / target[1], height / target[0])
    box_width, box_height = scale * target[1], scale * target[0]
    left, top = (width - box_width) / 2, (height - box_height) / 2
    return left, top, min(left + box_width, width), min(top + box_height, height)
