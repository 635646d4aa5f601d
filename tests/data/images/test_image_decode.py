"""One file to one tensor: depths, modes, orientation, and every kind of broken file."""

import io
import os
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, PngImagePlugin

from tokenmix.errors import UserError
from tokenmix.lab.data.images import read_image
from tokenmix.lab.data.images.decode import (
    FORMATS,
    _cover,
    decode,
    decode_numbers,
    decode_part,
    decode_stored,
    is_read,
    read_stored,
    stored_size,
)
from tokenmix.lab.data.reading import UnreadableImage


def read(image: Image.Image, path: Path, channels: int = 3, size: int | tuple[int, int] = 8, **options) -> torch.Tensor:
    image.save(path, **options)
    return read_image(path, channels, size)


def test_endings_are_pillows(monkeypatch: pytest.MonkeyPatch):
    Image.init()
    assert {ending for ending, name in Image.EXTENSION.items() if name in FORMATS} == set(
        filter(is_read, Image.EXTENSION)
    )
    with monkeypatch.context() as patch:
        patch.setattr("PIL.features.check", lambda name: False)
        assert is_read(".JPG")
        assert not is_read(".webp")


def test_native_size_is_exact(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    out = read(Image.fromarray(pixels), tmp_path / "a.png")
    assert out.dtype == torch.uint8
    assert torch.equal(out, torch.from_numpy(pixels).permute(2, 0, 1))


@pytest.mark.parametrize(("channels", "size", "shape"), [(1, 8, (1, 8, 8)), (3, (6, 10), (3, 6, 10))])
def test_channels_and_size(tmp_path: Path, channels: int, size, shape: tuple[int, ...]):
    assert read(Image.new("RGB", (33, 17), "red"), tmp_path / "a.png", channels, size).shape == shape


def test_crop_is_about_the_centre(tmp_path: Path):
    image = Image.new("RGB", (24, 8), "red")
    image.paste("blue", (8, 0, 16, 8))
    out = read(image, tmp_path / "a.png", size=8)
    assert (out[2] == 255).all()
    assert (out[0] == 0).all()


def test_downsizing_is_antialiased(tmp_path: Path):
    checks = np.indices((64, 64)).sum(0) % 2 * 255
    out = read(Image.fromarray(checks.astype(np.uint8)), tmp_path / "a.png", 1, 8)
    assert (out.int() - 127).abs().max() <= 4


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_becomes_white(tmp_path: Path, mode: str):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0)) if mode != "LA" else Image.new("LA", (8, 8), (0, 0))
    options = {}
    if mode == "P":
        image, options = Image.new("P", (8, 8), 3), {"transparency": 3}
        image.putpalette(range(12))
    assert (read(image, tmp_path / "a.png", **options) == 255).all()


def test_palette(tmp_path: Path):
    image = Image.new("RGB", (8, 8), (10, 200, 30)).convert("P", palette=Image.Palette.ADAPTIVE)
    assert read(image, tmp_path / "a.png")[:, 0, 0].tolist() == [10, 200, 30]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits(tmp_path: Path, suffix: str):
    levels = np.full((8, 8), 65535, np.uint16)
    levels[:, :4] = 257 * 100
    out = read(Image.fromarray(levels), tmp_path / f"a.{suffix}", 1)
    assert out[0, 0].tolist() == [100] * 4 + [255] * 4


def test_the_transparent_level_of_sixteen_bits_is_white(tmp_path: Path):
    levels = np.full((8, 8), 257 * 100, np.uint16)
    levels[:, :4] = 257 * 100 + 1
    file = tmp_path / "a.png"
    Image.fromarray(levels).save(file)
    whole, at = file.read_bytes(), file.read_bytes().index(b"IDAT") - 4
    file.write_bytes(whole[:at] + chunk(b"tRNS", struct.pack(">H", 257 * 100 + 1)) + whole[at:])
    assert read_image(file, 1, 8)[0, 0].tolist() == [255] * 4 + [100] * 4


def test_cmyk(tmp_path: Path):
    out = read(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), tmp_path / "a.jpg")
    assert out[0].min() > 200
    assert out[1:].max() < 60


def test_one_bit(tmp_path: Path):
    assert (read(Image.new("1", (8, 8), 1), tmp_path / "a.png") == 255).all()


def test_orientation(tmp_path: Path):
    image = Image.new("RGB", (8, 8), "black")
    image.paste("white", (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter to the right for display
    out = read(image, tmp_path / "a.png", exif=exif)
    assert (out[:, :, 4:] == 255).all()
    assert (out[:, :, :4] == 0).all()


@pytest.mark.parametrize("turn", range(1, 9))
def test_every_turn(turn: int):
    """A smooth picture, so that the order of resizing and turning does not matter."""
    corners = Image.fromarray(np.random.default_rng(0).integers(0, 256, (3, 3, 3), dtype=np.uint8))
    image, exif, file = corners.resize((60, 36), Image.Resampling.BICUBIC), Image.Exif(), io.BytesIO()
    exif[0x0112] = turn
    image.save(file, "png", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(file))
    expected = np.asarray(upright.resize((10, 8), Image.Resampling.BICUBIC, box=_cover(upright.size, (8, 10), 1.0)))
    found = decode(file.getvalue(), 3, (8, 10)).permute(1, 2, 0).numpy()
    assert np.abs(found.astype(int) - expected).max() <= 2
    box = (5, 3, 25, 19)
    part = decode_part(file.getvalue(), 3, (8, 10), lambda size: (box, Image.Resampling.BICUBIC))
    assert np.array_equal(
        part.permute(1, 2, 0).numpy(), np.asarray(upright.crop(box).resize((10, 8), Image.Resampling.BICUBIC))
    )


def jpeg_with_exif(*entries: tuple[int, int, int, bytes]) -> bytes:
    """A picture that is red in its upper half, with these tags: number, type, count and value."""
    file, picture = io.BytesIO(), np.zeros((40, 60, 3), np.uint8)
    picture[:20] = (200, 30, 30)
    Image.fromarray(picture).save(file, "jpeg", quality=95)
    tags = b"".join(struct.pack("<HHI", *tag[:3]) + tag[3] for tag in entries)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries)) + tags + bytes(4)
    raw = file.getvalue()
    return raw[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + raw[2:]


QUARTER = (0x0112, 3, 1, struct.pack("<HH", 6, 0))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize(
    "damaged",
    [
        (0x011A, 2, 3, b"72\0\0"),  # a resolution as text
        (0x0132, 3, 1, b"ab\0\0"),  # a date as a number
        (0x8769, 4, 1, b"\xff\xff\xff\xff"),  # a directory after the end
        (0x9286, 7, 2**31, b"\0\0\0\0"),  # a comment of 2 GB
    ],
)
def test_damaged_exif_costs_no_picture_and_no_turn(damaged: tuple[int, int, int, bytes]):
    image = decode(jpeg_with_exif(QUARTER, damaged), 3, (60, 40))
    assert abs(int(image[0, 5, 35]) - 200) < 8
    assert int(image[0, 5, 5]) < 8


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize(
    "value", [(0x0112, 2, 3, b"up\0\0"), (0x0112, 3, 1, b"\x63\0\0\0"), (0x0112, 9, 1, b"\xff" * 4)]
)
def test_an_orientation_that_is_none_turns_nothing(value: tuple[int, int, int, bytes]):
    assert abs(int(decode(jpeg_with_exif(value), 3, (40, 60))[0, 5, 5]) - 200) < 8


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(values: np.ndarray, depth: int, *more: bytes, palette: bool = False, after: bytes = b"") -> bytes:
    """A PNG of these grey levels or palette indices of `depth` bits, with more chunks before and after its pixels."""
    head = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], depth, 3 if palette else 0, 0, 0, 0)
    rows = [f"{''.join(f'{v:0{depth}b}' for v in row):0<{-(-len(row) * depth // 8) * 8}}" for row in values]
    raw = b"".join(b"\0" + int(row, 2).to_bytes(len(row) // 8, "big") for row in rows)
    colours = [chunk(b"PLTE", bytes(3 * 2**depth))] if palette else []
    parts = [chunk(b"IHDR", head), *more, *colours, chunk(b"IDAT", zlib.compress(raw)), after, chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


LONG = zlib.compress(bytes(3_000_000))
USELESS = {
    "a long text": chunk(b"zTXt", b"workflow\0\0" + LONG),
    "a long international text": chunk(b"iTXt", b"workflow\0\1\0\0\0" + LONG),
    "a long profile": chunk(b"iCCP", b"ICC\0\0" + LONG),
    "a cut resolution": chunk(b"pHYs", b"\0"),
    "a text with a wrong checksum": chunk(b"tEXt", b"a\0b")[:-4] + bytes(4),
}


@pytest.mark.parametrize("what", USELESS)
def test_what_no_pixel_needs_makes_no_png_unreadable(what: str):
    values = np.arange(64).reshape(8, 8) * 4
    for file in (png(values, 8, USELESS[what]), png(values, 8, after=USELESS[what])):
        assert torch.equal(decode(file, 1, (8, 8))[0], torch.from_numpy(values.astype(np.uint8)))


def test_damaged_pixels_are_still_refused(tmp_path: Path):
    file = png(np.arange(64).reshape(8, 8), 8, USELESS["a long text"])
    place = file.index(b"IDAT") + 8
    (tmp_path / "a.png").write_bytes(file[:place] + b"\xff\xff" + file[place + 2 :])
    with pytest.raises(UserError, match=r"a\.png cannot be decoded"):
        read_image(tmp_path / "a.png", 1, 8)
    (tmp_path / "a.png").write_bytes(file[: place + 5])
    with pytest.raises(UserError, match=r"a\.png (is truncated|cannot be decoded)"):
        read_image(tmp_path / "a.png", 1, 8)


def test_a_text_may_hold_the_orientation():
    xmp = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="3"/></x:xmpmeta>'
    file, info = io.BytesIO(), PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", xmp)
    Image.fromarray(np.uint8([[1, 2], [3, 4]])).save(file, "png", pnginfo=info)
    assert decode(file.getvalue(), 1, (2, 2)).flatten().tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("palette", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_class_numbers_are_those_that_are_stored(depth: int, palette: bool):
    values = np.arange(44).reshape(4, 11) % min(2**depth, 30)
    file = png(values, depth, palette=palette)
    assert np.array_equal(decode_numbers(file).numpy(), values)


@pytest.mark.parametrize(("most", "kind"), [(3, "P2"), (3, "P5"), (200, "P5"), (255, "P5"), (1000, "P5"), (1000, "P2")])
def test_class_numbers_of_pgm(most: int, kind: str):
    values = np.arange(12).reshape(3, 4) * most // 11
    text = f"{kind} 4 3 {most}\n".encode()
    plain = " ".join(map(str, values.ravel())).encode()
    file = text + (plain if kind == "P2" else values.astype(">u2" if most > 255 else np.uint8).tobytes())
    assert np.array_equal(decode_numbers(file).numpy(), values)


def test_large_jpegs_are_decoded_at_a_part_of_their_size(monkeypatch: pytest.MonkeyPatch):
    file, seen = io.BytesIO(), []
    Image.new("RGB", (800, 1600), "red").save(file, "jpeg")
    monkeypatch.setattr("tokenmix.lab.data.images.decode.LARGE_PIXELS", 1000)

    def choose(size: tuple[int, int]):
        seen.append(size)
        return (0, 0, *size), Image.Resampling.BICUBIC

    assert decode_part(file.getvalue(), 3, (8, 8), choose).shape == (3, 8, 8)
    assert seen == [(100, 200)]


def test_pillows_limit_is_lifted_while_pixels_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    monkeypatch.setattr("tokenmix.lab.data.images.decode.LARGE_PIXELS", 50)
    Image.new("RGB", (40, 40), "red").save(tmp_path / "a.tif", compression="tiff_lzw", tile=(32, 32))
    assert read_image(tmp_path / "a.tif", 3, 8)[0].min() == 255
    assert Image.MAX_IMAGE_PIXELS == 100


def test_every_size_has_a_box_within_the_image():
    """By rounding, a box may begin before the image, which Pillow refuses."""
    rng = np.random.default_rng(0)
    for width, height, *size in rng.integers(1, 400, (5000, 4)).tolist():
        left, top, right, bottom = _cover((width, height), tuple(size), 1.0)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


def test_size_of_a_file(tmp_path: Path):
    Image.new("L", (30, 20)).save(tmp_path / "a.png")
    assert stored_size(tmp_path / "a.png") == (20, 30)


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"a\.png is a pipe or a device"):
        read_image(tmp_path / "a.png", 3, 8)


def test_float_levels(tmp_path: Path):
    assert (read(Image.fromarray(np.full((8, 8), 0.5, np.float32)), tmp_path / "a.tif", 1) == 128).all()
    assert (read(Image.fromarray(np.full((8, 8), 77.0, np.float32)), tmp_path / "b.tif", 1) == 77).all()


def test_whole_numbers_of_32_bits(tmp_path: Path):
    """They do not tell their range, whichever way up."""
    exif = Image.Exif()
    for turn in (1, 6):
        exif[0x0112] = turn
        with pytest.raises(UserError, match=r"a\.tif is a TIFF of signed or 32-bit numbers"):
            read(Image.fromarray(np.full((4, 8), 200, np.int32)), tmp_path / "a.tif", exif=exif)
        with pytest.raises(UserError, match="of unknown range"):
            read_stored(tmp_path / "a.tif", upright=True)
    assert decode_numbers(tmp_path / "a.tif").unique().tolist() == [200]


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 1e4])
def test_float_without_meaning(tmp_path: Path, value: float):
    levels = np.zeros((8, 8), np.float32)
    levels[3, 3] = value
    with pytest.raises(UserError, match=r"a\.tif holds"):
        read(Image.fromarray(levels), tmp_path / "a.tif")


@pytest.mark.parametrize("size", [1, 8])
def test_one_pixel(tmp_path: Path, size: int):
    assert (read(Image.new("L", (1, 1), 9), tmp_path / "a.png", 1, size) == 9).all()


def test_very_long_image(tmp_path: Path):
    assert (read(Image.new("L", (3000, 1), 9), tmp_path / "a.png", 1, 8) == 9).all()


def test_huge_image_neither_warns_nor_fails(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    limit = Image.MAX_IMAGE_PIXELS
    # Pillow's shrinking by a factor of a thousand rounds a little below white.
    assert (read(Image.new("1", (20_000, 10_000), 1), tmp_path / "a.png", 1) >= 250).all()
    assert not recwarn.list
    assert limit == Image.MAX_IMAGE_PIXELS


def test_too_many_pixels_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tokenmix.lab.data.images.decode.MAX_PIXELS", 50)
    with pytest.raises(UserError, match="8 x 8 pixels, more than 50"):
        read(Image.new("L", (8, 8)), tmp_path / "a.png")


@pytest.mark.parametrize(("kind", "times"), [("AVIF", 3), ("JPEG2000", 6), ("WEBP", 4)])
def test_formats_that_are_decoded_whole_have_a_lower_limit(kind: str, times: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tokenmix.lab.data.images.decode.MAX_PIXELS", times * 63)
    file, first = io.BytesIO(), Image.new("RGB", (8, 8), "red")
    more = {"save_all": True, "append_images": [Image.new("RGB", (8, 8))]} if kind == "WEBP" else {}
    first.save(file, kind, **more)
    with pytest.raises(UnreadableImage, match=r"8 x 8 pixels, more than 63 .*convert it to PNG, TIFF or JPEG"):
        decode(file.getvalue(), 3, (8, 8))


@pytest.mark.parametrize("mode", ["I;16", "RGBA", "F"])
def test_what_is_converted_takes_little_more_than_what_is_kept(tmp_path: Path, mode: str):
    """A PNG of 92 kB with 16 bits took 1.1 GB, for an image of 64 x 64."""
    side = 2000
    image = (
        Image.new("RGBA", (side, side))
        if mode == "RGBA"
        else Image.fromarray(np.zeros((side, side), np.uint16 if mode == "I;16" else np.float32))
    )
    path = tmp_path / "a.tif"
    image.save(path, compression="tiff_adobe_deflate")
    # Of NumPy's arrays: Pillow's own memory, 4 bytes a pixel at most, is not seen.
    tracemalloc.start()
    try:
        read_image(path, 3, 64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * side**2


def test_unicode_path(tmp_path: Path):
    folder = tmp_path / "猫 Ünïcode"
    folder.mkdir()
    assert read(Image.new("L", (8, 8), 5), folder / "图片 ☂.png", 1).sum() == 5 * 64


def broken(path: Path, kind: str) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    if kind == "folder":
        path.mkdir()
    elif kind in ("png", "jpeg", "webp"):
        Image.fromarray(noise).save(path, kind)
        path.write_bytes(path.read_bytes()[:600])
    elif kind != "missing":
        path.write_bytes(
            {"empty": b"", "text": b"hello\n" * 50, "svg": b"<svg></svg>", "eps": b"%!PS-Adobe-3.0 EPSF"}[kind]
        )
    return path


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("missing", "does not exist"),
        ("folder", "is a folder"),
        ("empty", "is empty"),
        ("text", "is not an image"),
        ("svg", "is not an image"),
        ("eps", "is not an image"),
        ("png", "truncated|cannot be decoded"),
        ("jpeg", "truncated"),
        ("webp", "cannot be decoded|is not an image|truncated"),
    ],
)
def test_broken_file_is_named_in_one_line(tmp_path: Path, kind: str, reason: str):
    path = broken(tmp_path / "photo.png", kind)
    with pytest.raises(UserError, match=reason) as caught:
        read_image(path, 3, 8)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, -3, (4, 0)])
def test_impossible_size(tmp_path: Path, size):
    with pytest.raises(UserError, match="img_size must be at least 1"):
        read(Image.new("L", (8, 8)), tmp_path / "a.png", 1, size)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_a_large_jpeg_as_stored_is_that_of_pillow(mode: str, monkeypatch: pytest.MonkeyPatch):
    down, along = np.mgrid[0:103, 0:57]
    levels = (down[..., None] * 2 + along[..., None] * 3 + np.arange(3) * 40).astype(np.uint8)
    Image.fromarray(levels).convert(mode).save(stream := io.BytesIO(), "JPEG")
    whole = decode_stored(stream.getvalue())
    monkeypatch.setattr("tokenmix.lab.data.images.decode.LARGE_PIXELS", 1000)
    assert (decode_stored(stream.getvalue()).int() - whole.int()).abs().max() <= 2
