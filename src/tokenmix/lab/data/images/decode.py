"""One image file to one uint8 tensor, for every bit depth, palette, alpha and orientation; errors name broken files.

Memory: the result, and Pillow's decoded file of at most 4 bytes per pixel, or a strip of a large PNG or TIFF. A WebP
needs 16 bytes per pixel, a large one that is not animated 8, AVIF 10, and JPEG 2000 20 to 25.
"""

import contextlib
import io
import math
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile, features
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg, decode_webp

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
WHOLE = {"AVIF": 3, "JPEG2000": 6, "animated WebP": 4}
# Pixels converted at a time.
PART_PIXELS = 1 << 20
# Each pixel of a result is resampled from at least this many pixels per side; further ones are averaged before.
REDUCING_GAP = 3
# Smallest side of a random part (8 % of the area), as a share of the image's side.
SMALLEST_PART = 0.25
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
        small = _resized(image, channels, (width, height), _cover(image.size, (height, width), crop_pct))
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
        if image.width * image.height > LARGE_PIXELS:
            return _tensor(_resized(upright, channels, (size[1], size[0]), box, resampling), channels)
        part = _plain(upright, channels, box=tuple(map(int, box)))  # type: ignore[arg-type]
        return _tensor(part.resize((size[1], size[0]), resampling), channels)


def decode_stored(source: str | Path | bytes, *, upright: bool = False) -> Tensor:
    """An image as stored, uint8 (3, H, W): most masks and boxes refer to stored pixels; or turned by its EXIF."""
    with _opened(source) as image:
        if upright and (turn := _turn(image)) is not None:
            return _tensor(image.transpose(turn), 3)
        if image.format == "JPEG" and image.mode in ("L", "RGB") and image.width * image.height > LARGE_PIXELS:
            # Decoded into the tensor itself: Pillow would hold a second copy.
            assert image.fp is not None
            image.fp.seek(0)
            data = torch.frombuffer(bytearray(image.fp.read()), dtype=torch.uint8)
            pixels = decode_jpeg(data, ImageReadMode.RGB)
            assert isinstance(pixels, Tensor)
            return pixels
        return _tensor(image, 3)


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


def _resized(
    image: Image.Image,
    channels: int,
    size: tuple[int, int],
    box: Box,
    resampling: Image.Resampling = Image.Resampling.BICUBIC,
) -> Image.Image:
    """A box of an image at another (width, height), antialiased: `reducing_gap` without an 8-bit copy of the image."""
    scale = [(box[i + 2] - box[i]) / size[i] for i in range(2)]
    factor = tuple(max(1, int(side / REDUCING_GAP)) for side in scale)
    if factor == (1, 1):
        return _plain(image, channels).resize(size, resampling, box=box)
    # Half a pixel less than the support of a bicubic filter.
    reach = [1.5 * side for side in scale]
    low = [max(0, int(box[i] - reach[i])) for i in range(2)]
    high = [min(image.size[i], math.ceil(box[i + 2] + reach[i])) for i in range(2)]
    reduced = _plain(image, channels, box=(low[0], low[1], high[0], high[1]), factor=(factor[0], factor[1]))
    left, top, right, bottom = ((box[i] - low[i % 2]) / factor[i % 2] for i in range(4))
    return reduced.resize(size, resampling, box=(left, top, right, bottom))


def _plain(
    image: Image.Image,
    channels: int,
    *,
    box: tuple[int, int, int, int] | None = None,
    factor: tuple[int, int] = (1, 1),
) -> Image.Image:
    """A box of an image in 8 bits on white: grey for one channel or grey images, else RGB; averages `factor` pixels."""
    left, top, right, bottom = box or (0, 0, *image.size)
    parts = _parts(image, channels, (left, top, right, bottom), factor)
    first = next(parts)
    size = -(-(right - left) // factor[0]), -(-(bottom - top) // factor[1])
    if first.size == size:
        return first
    whole, row = Image.new(first.mode, size), first.height
    whole.paste(first, (0, 0))
    for part in parts:
        whole.paste(part, (0, row))
        row += part.height
    return whole


def _parts(
    image: Image.Image, channels: int, box: tuple[int, int, int, int], factor: tuple[int, int] = (1, 1)
) -> Iterator[Image.Image]:
    """`_plain` in parts from top to bottom: float levels and transparency take many times the memory kept."""
    if channels not in (1, 3):
        raise UserError(f"images have 1 or 3 channels here, not {channels}")
    clear = image.mode in TRANSPARENT or "transparency" in image.info
    grey = channels == 1 or image.mode in ("1", "L", "F") or image.mode.startswith("I")
    mode = "L" if grey and (channels == 1 or not clear) else "RGB"
    strips = strips_of(image)
    if strips is None and image.mode == mode and not clear and factor == (1, 1) and box == (0, 0, *image.size):
        yield image
        return
    high = image.getextrema()[1] if image.mode == "F" else 0
    assert not isinstance(high, tuple)
    left, top, right, bottom = box
    rows = max(1, PART_PIXELS // ((right - left) * factor[1])) * factor[1]
    boxes = [(left, row, right, min(row + rows, bottom)) for row in range(top, bottom, rows)]
    for part in map(image.crop, boxes) if strips is None else _crops(strips, boxes):
        part = _in_mode(_eight_bit(part, high), mode)
        yield part if factor == (1, 1) else part.reduce(factor)


def _crops(strips: Iterator[Image.Image], boxes: Sequence[tuple[int, int, int, int]]) -> Iterator[Image.Image]:
    """Boxes, ordered from top to bottom, of the image that the strips form."""
    held, top = next(strips), 0
    for left, first, right, last in boxes:
        while top + held.height < last:
            below, kept = next(strips), held.crop((0, min(first - top, held.height), *held.size))
            top += held.height - kept.height
            held = below.crop((0, -kept.height, *below.size))
            held.paste(kept)
        yield held.crop((left, first - top, right, last - top))


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    # Pillow copies even an image that already has the mode.
    return image if image.mode == mode else image.convert(mode)


def _tensor(image: Image.Image, channels: int) -> Tensor:
    size, clear = (image.height, image.width, channels), "transparency" in image.info
    if image.mode == ("L" if channels == 1 else "RGB") and not clear and size[0] * size[1] <= PART_PIXELS:
        return torch.from_numpy(np.array(image).reshape(size)).permute(2, 0, 1).contiguous()
    pixels = torch.empty(channels, image.height, image.width, dtype=torch.uint8)
    row = 0
    for part in _parts(image, channels, (0, 0, *image.size)):
        rows = max(1, PART_PIXELS // part.width)
        for top in range(0, part.height, rows):
            strip = part.crop((0, top, part.width, min(top + rows, part.height))) if part.height > rows else part
            array = np.array(strip if channels == 1 else _in_mode(strip, "RGB"), dtype=np.uint8)
            array = array.reshape(strip.height, strip.width, channels)
            pixels[:, row : row + strip.height] = torch.from_numpy(array).permute(2, 0, 1)
            row += strip.height
    return pixels


@contextlib.contextmanager
def _opened(source: str | Path | bytes) -> Iterator[ImageFile.ImageFile]:
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(_file(source))
            if file.seek(0, os.SEEK_END) == 0:
                raise UnreadableImage("is empty (0 bytes)")
            image = stack.enter_context(_identified(_needed(file)))
            animated = image.format == "WEBP" and getattr(image, "is_animated", False)
            kind = "animated WebP" if animated else str(image.format)
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


def _eight_bit(image: Image.Image, high: float) -> Image.Image:
    """Grey images of 16 or 32 bits, or floats up to `high`, as 8-bit grey; transparent images on white."""
    levels = np.asarray(image, dtype=np.float64) if image.mode.startswith(("I", "F")) else None
    if image.mode == "F":
        assert levels is not None
        if not np.isfinite(levels).all():
            raise UnreadableImage("holds NaN or infinite values")
        if (low := levels.min()) < 0 or high > 255:
            raise UnreadableImage(f"holds values from {low:g} to {high:g}, outside of 0..1 and of 0..255 (scale them)")
        levels = levels * 255 if high <= 1 else levels
    elif levels is not None:
        levels = np.where(levels == image.info.get("transparency", -1), 255, levels / 257)
    if levels is not None:
        image = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
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


PNG = b"\x89PNG\r\n\x1a\n"
# Larger images are decoded one at a time, for any number of reader threads, and in strips where possible.
LARGE_PIXELS = 1 << 24
# Pixels decoded at a time: at least a row, or the unit that a TIFF stores.
STRIP_PIXELS = 1 << 20
# Bytes per pixel by PNG colour type: grey, RGB, palette, grey and RGB with transparency.
PNG_BYTES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# TIFF tags that pixels depend on: sizes, types, compression, colours. No tag that refers to another place.
TIFF_TAGS = (256, 258, 259, 262, 266, 277, 284, 292, 293, 317, 320, 332, 338, 339, 347, 529, 530, 531, 532)
HEIGHT, COMPRESSION, OFFSETS, ROWS, COUNTS, PLANES = 257, 259, 273, 278, 279, 284
PLAIN = 1


def strips_of(image: Image.Image) -> Iterator[Image.Image] | None:
    """Strips of an opened, unloaded image; None if the file must be decoded as a whole."""
    file = image.fp if isinstance(image, ImageFile.ImageFile) else None
    if file is None or image.width * image.height <= LARGE_PIXELS:
        return None
    if image.format == "PNG":
        file.seek(len(PNG))
        head = next(_chunks(file))[1]
        plain = head[8] == 8 and head[9] in PNG_BYTES and head[12] == 0
        return _png_strips(file, image.width, image.height) if plain else None
    if image.format == "WEBP" and not getattr(image, "is_animated", False):
        return _webp_strips(file, image)
    if isinstance(image, TiffImageFile) and image.format == "TIFF" and image.mode != "F":
        tags = image.tag_v2
        if OFFSETS in tags and tags.get(PLANES, 1) == 1:
            return _tiff_strips(file, tags, image.width, image.height)
    return None


def _chunks(file: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Kind and content of each following PNG chunk; pixel chunks in parts."""
    while len(found := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", found)
        while length > 0 and (part := file.read(min(length, 1 << 16) if kind == b"IDAT" else length)):
            yield kind, part
            length -= len(part)
        file.read(4)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _png_strips(file: IO[bytes], width: int, height: int) -> Iterator[Image.Image]:
    file.seek(len(PNG))
    chunks = _chunks(file)
    head, colours = next(chunks)[1], b""
    kind, data = next(chunks)
    while kind != b"IDAT":
        colours += png_chunk(kind, data) if kind in (b"PLTE", b"tRNS") else b""
        kind, data = next(chunks)
    inflate, held, above = zlib.decompressobj(), bytearray(), b""
    stride, rows = 1 + width * PNG_BYTES[head[9]], max(1, STRIP_PIXELS // width)
    for top in range(0, height, rows):
        count = min(rows, height - top)
        while (missing := count * stride - len(held)) > 0:
            if not data:
                data = next((part for kind, part in chunks if kind == b"IDAT"), b"")
            if not data:
                raise OSError(f"image file is truncated (its pixels end in row {top + len(held) // stride})")
            held += inflate.decompress(data, missing)
            data = inflate.unconsumed_tail
        # A row's filter refers to the row above, so the unfiltered row above comes first.
        first = struct.pack(">II", width, count + bool(above)) + head[8:]
        parts = (b"IHDR", first), (b"IDAT", zlib.compress(above + held, 0)), (b"IEND", b"")
        made = [png_chunk(*part) for part in parts]
        whole = Image.open(io.BytesIO(PNG + made[0] + colours + b"".join(made[1:])), formats=["PNG"])
        strip = whole.crop((0, bool(above), width, count + bool(above)))
        held.clear()
        above = b"\0" + strip.crop((0, count - 1, width, count)).tobytes()
        yield strip


def _webp_strips(file: IO[bytes], image: Image.Image) -> Iterator[Image.Image]:
    """Strips of a decoded image of 3 or 4 bytes per pixel, where Pillow's decoder needs 16."""
    file.seek(0)
    data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    pixels = decode_webp(data, ImageReadMode.RGB if image.mode == "RGB" else ImageReadMode.RGB_ALPHA)
    for rows in pixels.permute(1, 2, 0).split(max(1, STRIP_PIXELS // image.width)):
        yield Image.fromarray(rows.numpy())


def _tiff_strips(file: IO[bytes], tags: ImageFileDirectory_v2, width: int, height: int) -> Iterator[Image.Image]:
    rows, places = min(tags.get(ROWS, height), height), list(zip(tags[OFFSETS], tags[COUNTS], strict=True))
    if tags.get(COMPRESSION) == PLAIN:
        # Often all rows form one strip.
        held = [min(rows, height - first) for first in range(0, height, rows)]
        places = [(start + i * (size // n), size // n) for (start, size), n in zip(places, held) for i in range(n)]
        rows = 1
    together = max(1, STRIP_PIXELS // (width * rows))
    for first in range(0, -(-height // rows), together):
        some = places[first : first + together]
        part = ImageFileDirectory_v2(tags.prefix + struct.pack("<H" if tags.prefix == b"II" else ">H", 42) + bytes(4))
        for tag in TIFF_TAGS:
            if tag in tags:
                part.tagtype[tag] = tags.tagtype[tag]
                part[tag] = tags[tag]
        part[HEIGHT] = min(together * rows, height - first * rows)
        stored = []
        for offset, count in some:
            file.seek(offset)
            stored.append(file.read(count))
        part.tagtype[ROWS] = 4
        part[ROWS] = rows
        part[COUNTS] = tuple(map(len, stored))
        part.tagtype[OFFSETS] = 4
        part[OFFSETS] = tuple(accumulate(map(len, stored[:-1]), initial=0))
        made = io.BytesIO()
        part.save(made)
        made.write(b"".join(stored))
        strip = Image.open(made, formats=["TIFF"])
        strip.load()
        yield strip
