"""One image file to one uint8 tensor, for every bit depth, palette, alpha and orientation; errors name broken files.

Memory: the result, and Pillow's decoded file of at most 4 bytes per pixel with copies of it: 10 bytes per pixel for RGB
kept whole, 16 with transparency and for WebP, 10 for AVIF, and 20 to 25 for JPEG 2000.
"""

import contextlib
import io
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile, features
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from tokenmix.errors import UserError
from tokenmix.files import open_regular
from tokenmix.lab.data.reading import UnreadableImage

Box = tuple[float, float, float, float]

# Only formats recognised by their content: a text file must not pass for an image. None runs a helper program, as EPS
# would.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000")
# Their file endings, as Pillow knows them once it has imported all of its readers; those that not every Pillow has.
ENDINGS = {
    *(".apng", ".bmp", ".gif", ".j2c", ".j2k", ".jfif", ".jp2", ".jpc", ".jpe", ".jpeg", ".jpf", ".jpg", ".jpx"),
    *(".pbm", ".pfm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff"),
}
OPTIONAL = {".avif": "avif", ".avifs": "avif", ".webp": "webp"}
GIVE = "give a readable PNG, JPEG, WebP, BMP, GIF or TIFF image"
TRANSPARENT = ("RGBA", "RGBa", "LA", "La", "PA")
# A larger decoded image fills more than 2 GB.
MAX_PIXELS = 500_000_000
# Decoders of whole images need a multiple of that memory.
WHOLE = {"AVIF": 3, "JPEG2000": 6, "WEBP": 4}
# Each pixel of a result is resampled from at least this many pixels per side; further ones are averaged before.
REDUCING_GAP = 3
# Smallest side of a random part (8 % of the area), as a share of the image's side.
SMALLEST_PART = 0.25
# Larger JPEGs are decoded at a part of their size for a random part, and larger images one at a time.
LARGE_PIXELS = 1 << 24
PNG = b"\x89PNG\r\n\x1a\n"
# Keys: orientation number in EXIF.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (TURNS[5], TURNS[6], TURNS[7], TURNS[8])
# PNG chunks that pixels and orientation need; below, texts that may hold the orientation.
PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"eXIf")
ORIENTED_TEXTS = (b"XML:com.adobe.xmp\0\0", b"Raw profile type exif\0")
LONGEST_TEXT = 1 << 16
# Key in an image's info, which its turned copy keeps.
SIGNED = "of unknown range"
_pillow_limit = threading.Lock()


def size_of(img_size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of an `img_size`; `UserError` unless both are positive."""
    size = (img_size, img_size) if isinstance(img_size, int) else (int(img_size[0]), int(img_size[1]))
    if min(size) < 1:
        raise UserError(f"img_size must be at least 1, got {img_size}")
    return size


def read_image(path: str | Path, channels: int, img_size: int | tuple[int, int], *, crop_pct: float = 1.0) -> Tensor:
    """Read an image file as uint8 (channels, height, width).

    The image is turned by its EXIF orientation, put on white where transparent, resized (antialiased) to cover
    `img_size` / `crop_pct` and centre-cropped.

    Raises:
        UserError: the file is missing, empty, truncated, no image, too large, or holds NaN; the message names it.
    """
    try:
        return decode(path, channels, size_of(img_size), crop_pct=crop_pct)
    except UnreadableImage as reason:
        raise UserError(f"{path} {reason}; {GIVE}") from None


def read_stored(path: str | Path, *, upright: bool = False) -> Tensor:
    """`decode_stored` of a file; `UserError` names an unreadable file."""
    try:
        return decode_stored(path, upright=upright)
    except UnreadableImage as reason:
        raise UserError(f"{path} {reason}; {GIVE}") from None


def decode(source: str | Path | bytes, channels: int, size: tuple[int, int], *, crop_pct: float = 1.0) -> Tensor:
    """`read_image` of a file or its bytes, with `UnreadableImage` instead."""
    with _opened(source) as image:
        turn = _turn(image)
        height, width = size[::-1] if turn in SIDEWAYS else size
        # A JPEG can be decoded at down to an eighth of its size; twice the target keeps the quality of the resizing.
        image.draft(None, (round(2 * width / crop_pct), round(2 * height / crop_pct)))
        box = _cover(image.size, (height, width), crop_pct)
        small = _plain(image, channels).resize((width, height), Image.Resampling.BICUBIC, box, REDUCING_GAP)
        return _tensor(small if turn is None else small.transpose(turn), channels)


def decode_part(
    source: str | Path | bytes,
    channels: int,
    size: tuple[int, int],
    choose: Callable[[tuple[int, int]], tuple[Box, Image.Resampling]],
) -> Tensor:
    """The part that `choose` picks of an image of this (width, height), at `size`; large JPEGs decode smaller."""
    with _opened(source) as image:
        turn = _turn(image)
        if image.width * image.height > LARGE_PIXELS:
            least = round(2 * max(size) / SMALLEST_PART)
            image.draft(None, (least, least))
        upright = image if turn is None else image.transpose(turn)
        box, resampling = choose(upright.size)
        plain, target = _plain(upright, channels), (size[1], size[0])
        if image.width * image.height > LARGE_PIXELS:
            return _tensor(plain.resize(target, resampling, box, REDUCING_GAP), channels)
        return _tensor(plain.crop(tuple(map(int, box))).resize(target, resampling), channels)  # type: ignore[arg-type]


def decode_stored(source: str | Path | bytes, *, upright: bool = False) -> Tensor:
    """An image as stored, uint8 (3, H, W): most masks and boxes refer to stored pixels; or turned by its EXIF."""
    with _opened(source) as image:
        turn = _turn(image) if upright else None
        large = image.width * image.height > LARGE_PIXELS
        if large and turn is None and image.format == "JPEG" and image.mode in ("L", "RGB"):
            # In a fifth of the time, without Pillow's copy of four bytes a pixel.
            assert image.fp is not None
            image.fp.seek(0)
            pixels = decode_jpeg(torch.frombuffer(bytearray(image.fp.read()), dtype=torch.uint8), ImageReadMode.RGB)
            assert isinstance(pixels, Tensor)
            return pixels
        return _tensor(_plain(image if turn is None else image.transpose(turn), 3), 3)


def decode_numbers(source: str | Path | bytes) -> Tensor:
    """Pixel values (H, W), uint8 or, for more bits, int64: palette indices, or stored grey levels.

    Pillow stretches grey levels of 2 and 4 bits, and of PGM with a smaller maximum, to 8 or 16 bits. This function
    undoes the stretching: class 3 of 4 is stored as 3.
    """
    with _opened(source) as image:
        if image.format in ("JPEG", "MPO"):
            raise UnreadableImage("is a JPEG, whose compression changes numbers")
        if image.mode not in ("P", "L", "1") and not image.mode.startswith("I"):
            raise UnreadableImage(
                f"is a picture of mode {image.mode}, with no class numbers in it; give a palette or grey"
            )
        args = image.tile[0].args if image.tile else ()
        raw, *rest = args if isinstance(args, tuple) else (args,)
        # The stored grey level of white, where Pillow stretches the levels.
        top = {"2": 3, "4": 15}.get(str(raw).partition("L;")[2][:1])
        if image.format == "PPM":
            top = int(rest[-1]) if rest else None
        values = np.array(image)
        whole = 65535 if values.itemsize > 1 else 255
        if image.mode != "P" and top is not None and top != whole:
            values = np.rint(np.arange(whole + 1) * (top / whole)).astype(values.dtype)[values]
        return torch.from_numpy(values.astype(np.int64 if values.itemsize > 1 else np.uint8, copy=False))


def stored_size(source: str | Path | bytes) -> tuple[int, int]:
    """(height, width) of a stored image, from its header; raises `UnreadableImage`."""
    with _opened(source) as image:
        return image.height, image.width


def is_read(ending: str) -> bool:
    """Whether files with this ending, such as .jpg, are read as images."""
    ending = ending.lower()
    return ending in ENDINGS or (ending in OPTIONAL and features.check(OPTIONAL[ending]) is True)


def _turn(image: Image.Image) -> Image.Transpose | None:
    """Rotation by EXIF; None if there is none, or if the EXIF is damaged."""
    with contextlib.suppress(Exception):
        # A PNG's own method decodes the pixels, since EXIF may follow them; this one does not (`_needed`).
        return TURNS[Image.Image.getexif(image)[ExifTags.Base.Orientation]]
    return None


def _plain(image: Image.Image, channels: int) -> Image.Image:
    """An image in 8 bits on white: grey for one channel or grey images, else RGB."""
    if channels not in (1, 3):
        raise UserError(f"images have 1 or 3 channels here, not {channels}")
    clear = image.mode in TRANSPARENT or "transparency" in image.info
    grey = image.mode in ("1", "L", "F") or image.mode.startswith("I")
    mode = "L" if channels == 1 or (grey and not clear) else "RGB"
    image = _eight_bit(image)
    # Pillow copies even an image that already has the mode.
    return image if image.mode == mode else image.convert(mode)


def _tensor(image: Image.Image, channels: int) -> Tensor:
    image = image if channels == 1 or image.mode == "RGB" else image.convert("RGB")
    pixels = np.array(image).reshape(image.height, image.width, channels)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


@contextlib.contextmanager
def _opened(source: str | Path | bytes) -> Iterator[ImageFile.ImageFile]:
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(_file(source))
            if file.seek(0, os.SEEK_END) == 0:
                raise UnreadableImage("is empty (0 bytes)")
            image = stack.enter_context(_identified(_needed(file)))
            kind = str(image.format)
            image.info[SIGNED] = kind == "TIFF" and image.mode == "I"
            most = MAX_PIXELS // WHOLE.get(kind, 1)
            if image.width * image.height > most:
                remedy = "convert it to PNG, TIFF or JPEG" if kind in WHOLE else "scale it down, or cut it"
                raise UnreadableImage(
                    f"has {image.width} x {image.height} pixels, more than {most:,} as {kind} ({remedy})"
                )
            if image.width * image.height > LARGE_PIXELS:
                # Large images are opened one at a time.
                stack.enter_context(_unlimited())
            yield image
        except (UnreadableImage, UserError):
            raise
        except FileNotFoundError:
            raise UnreadableImage("does not exist") from None
        except PermissionError:
            raise UnreadableImage("may not be read by this user") from None
        except Image.UnidentifiedImageError:
            raise UnreadableImage("is not an image of a known format") from None
        # Decoders raise any exception for damaged data: OSError, SyntaxError, struct.error, ValueError, zlib.error, ...
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            cut = "is truncated" if "truncated" in text.lower() else "cannot be decoded"
            raise UnreadableImage(f"{cut} ({text})") from None


def _file(source: str | Path | bytes) -> BinaryIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    try:
        return open_regular(source)
    except UserError:
        folder = f"is a folder: name the files in it, as in {source}/*"
        raise UnreadableImage(folder if os.path.isdir(source) else "is a pipe or a device, not a file") from None


def _identified(file: BinaryIO) -> ImageFile.ImageFile:
    """The image by Pillow's readers of common formats, or else by all, which take 2 MB more."""
    with _unlimited():
        for import_readers in (Image.preinit, Image.init):
            import_readers()
            with contextlib.suppress(Image.UnidentifiedImageError):
                return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
    raise Image.UnidentifiedImageError


@contextlib.contextmanager
def _unlimited() -> Iterator[None]:
    """Lift Pillow's own limit, which is process-wide and warns at 89 million pixels."""
    with _pillow_limit:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _needed(file: BinaryIO) -> BinaryIO:
    """The file; for PNG only the pixel chunks, since texts, profiles and animations must not make it unreadable."""
    file.seek(0)
    spans, pixels, skipped = [(0, len(PNG))], [], False
    if file.read(len(PNG)) == PNG:
        while len(head := file.read(8)) == 8:
            start, (length, kind) = file.tell(), struct.unpack(">I4s", head)
            text = length <= LONGEST_TEXT and kind in (b"iTXt", b"tEXt", b"zTXt") and file.read(32)
            if kind in PIXEL_CHUNKS or (text and text.startswith(ORIENTED_TEXTS)):
                # The orientation may follow the pixels, but is needed before they are decoded.
                skipped |= bool(pixels) and kind not in (b"IDAT", b"IEND")
                (pixels if kind in (b"IDAT", b"IEND") else spans).append((start - 8, start + length + 4))
            else:
                skipped = True
            file.seek(start + length + 4)
    file.seek(0)
    return io.BufferedReader(_Spans(file, spans + pixels)) if skipped else file


class _Spans(io.RawIOBase):
    def __init__(self, file: BinaryIO, spans: list[tuple[int, int]]) -> None:
        self._file, self._spans = file, spans
        self._ends = np.cumsum([stop - start for start, stop in spans])
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: int(self._ends[-1])}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        place = int(np.searchsorted(self._ends, self._at, side="right"))
        if place == len(self._spans):
            return 0
        left = int(self._ends[place]) - self._at
        self._file.seek(self._spans[place][1] - left)
        data = self._file.read(min(left, len(buffer)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _eight_bit(image: Image.Image) -> Image.Image:
    """Grey images of 16 or 32 bits, or of floats, as 8-bit grey; transparent images on white."""
    if image.mode.startswith(("I", "F")):
        levels = np.array(image, dtype=np.float32)
        if image.mode == "F":
            if not np.isfinite(levels).all():
                raise UnreadableImage("holds NaN or infinite values")
            low, high = levels.min(), levels.max()
            if low < 0 or high > 255:
                raise UnreadableImage(
                    f"holds values from {low:g} to {high:g}, outside of 0..1 and of 0..255 (scale them)"
                )
            levels *= 255 if high <= 1 else 1
        else:
            if image.info.get(SIGNED):
                raise UnreadableImage("is a TIFF of signed or 32-bit numbers of unknown range (save 8 or 16 bits)")
            levels[levels == image.info.get("transparency", -1)] = 65535
            levels /= 257
        image = Image.fromarray(levels.round(out=levels).clip(0, 255, out=levels).astype(np.uint8))
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
    # Rounding may make the box wider than the image.
    left, top = max(0.0, (width - box_width) / 2), max(0.0, (height - box_height) / 2)
    return left, top, min(left + box_width, width), min(top + box_height, height)
