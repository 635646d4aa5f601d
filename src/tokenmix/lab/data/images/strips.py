"""A large PNG or TIFF from top to bottom in strips, each decoded by Pillow from a small file made of its part."""

import io
import struct
import zlib
from collections.abc import Iterator
from itertools import accumulate
from typing import IO

from PIL import Image, ImageFile
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile

PNG = b"\x89PNG\r\n\x1a\n"
# Larger images are decoded one at a time, however many threads read images, and in strips where that is possible.
LARGE_PIXELS = 1 << 24
# What is decoded at a time, at least a row or what TIFF stores as one.
STRIP_PIXELS = 1 << 20
# Bytes a pixel by PNG's kind of colour: grey, RGB, palette, and the first two with transparency.
PNG_BYTES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# Of TIFF, all that its pixels depend on: sizes, types, compression, colours, and none that points elsewhere.
TIFF_TAGS = (256, 258, 259, 262, 266, 277, 284, 292, 293, 317, 320, 332, 338, 339, 347, 529, 530, 531, 532)
HEIGHT, COMPRESSION, OFFSETS, ROWS, COUNTS, PLANES = 257, 259, 273, 278, 279, 284
PLAIN = 1


def strips_of(image: Image.Image) -> Iterator[Image.Image] | None:
    """The strips of an image that was opened and not loaded; None if its file has to be decoded as a whole."""
    file = image.fp if isinstance(image, ImageFile.ImageFile) else None
    if file is None or image.width * image.height <= LARGE_PIXELS:
        return None
    if image.format == "PNG":
        file.seek(len(PNG))
        head = next(_chunks(file))[1]
        plain = head[8] == 8 and head[9] in PNG_BYTES and head[12] == 0
        return _png_strips(file, image.width, image.height) if plain else None
    if isinstance(image, TiffImageFile) and image.format == "TIFF" and image.mode != "F":
        tags = image.tag_v2
        if OFFSETS in tags and tags.get(PLANES, 1) == 1:
            return _tiff_strips(file, tags, image.width, image.height)
    return None


def _chunks(file: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Kind and content of each chunk of a PNG from here on; that of pixels in parts."""
    while len(found := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", found)
        while length > 0 and (part := file.read(min(length, 1 << 16) if kind == b"IDAT" else length)):
            yield kind, part
            length -= len(part)
        file.read(4)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk as it is stored."""
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
        # The filter of a row refers to the row above, which therefore comes first, unfiltered.
        first = struct.pack(">II", width, count + bool(above)) + head[8:]
        parts = (b"IHDR", first), (b"IDAT", zlib.compress(above + held, 0)), (b"IEND", b"")
        made = [png_chunk(*part) for part in parts]
        whole = Image.open(io.BytesIO(PNG + made[0] + colours + b"".join(made[1:])), formats=["PNG"])
        strip = whole.crop((0, bool(above), width, count + bool(above)))
        held.clear()
        above = b"\0" + strip.crop((0, count - 1, width, count)).tobytes()
        yield strip


def _tiff_strips(file: IO[bytes], tags: ImageFileDirectory_v2, width: int, height: int) -> Iterator[Image.Image]:
    rows, places = min(tags.get(ROWS, height), height), list(zip(tags[OFFSETS], tags[COUNTS], strict=True))
    if tags.get(COMPRESSION) == PLAIN:
        # Often all rows in one strip.
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
