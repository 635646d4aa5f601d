"""WebDataset shards, written here with tarfile: order, ranks, resuming, and what is wrong with a shard."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tokenmix.errors import UserError
from tokenmix.lab.data.images import ImageData, load_images
from tokenmix.lab.data.images import decode as decoding
from tokenmix.lab.data.images import webdataset as shards_module
from tokenmix.lab.data.images.webdataset import ShardImages, expand, shuffled
from tokenmix.lab.data.indexed import EpochLoader, make_loader
from tokenmix.lab.data.lookup import short_name, with_absolute_paths


def encoded(value: int, kind: str = "png") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 16), (value % 256, 0, 0)).save(file, kind)
    return file.getvalue()


def write(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sample(number: int, label: int | None = None) -> list[tuple[str, bytes]]:
    """Picture, label and notes of one sample; the picture's red is the sample's number."""
    key = f"part/{number:06}"
    label = number % 3 if label is None else label
    return [(f"{key}.png", encoded(number)), (f"{key}.cls", str(label).encode()), (f"{key}.json", b'{"label": 7}')]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMIX_DATA", str(tmp_path / "cache"))


@pytest.fixture
def shards(tmp_path: Path) -> Callable[..., str]:
    """Writes shards of 7, 8, 9, ... samples, and two of 3 for testing; returns the specification."""

    def make(count: int = 4) -> str:
        number = 0
        for shard in range(count):
            numbers = range(number, number + 7 + shard)
            write(tmp_path / "set" / f"train-{shard:03}.tar", [m for n in numbers for m in sample(n)])
            number += 7 + shard
        for shard in range(2):
            write(tmp_path / "set" / f"val-{shard}.tar", [m for n in range(3) for m in sample(200 + 3 * shard + n, n)])
        return f"wds:{tmp_path}/set/train-{{000..{count - 1:03}}}.tar,{tmp_path}/set/val-{{0..1}}.tar"

    return make


def loader(data: ImageData, epoch: int = 0, **options: Any) -> EpochLoader:
    order = {"batch_size": 4, "shuffle": True, "seed": 0, **options}
    samples = data.train.prepared(mean=(0, 0, 0), std=(1, 1, 1), augment="light", seed=order["seed"])
    made = make_loader(samples, **order)
    made.set_epoch(epoch)
    return made


def order(data: ImageData, **options: Any) -> list[int]:
    return torch.cat([batch["index"] for batch in loader(data, **options)]).tolist()


def test_samples_and_their_labels(shards: Callable[..., str]):
    data = load_images(shards(), img_size=8)
    assert (len(data.train), len(data.test), data.classes) == (34, 6, ["0", "1", "2"])
    for index in (0, 13, 33):
        image, label = data.train[index]
        assert label == index % 3
        assert image[0].float().mean() == index
    assert [data.test[i][1] for i in range(6)] == [0, 1, 2] * 2


def test_labels_from_json_and_names_of_classes(tmp_path: Path):
    members = [(f"{n:03}.{e}", d) for n in range(10) for e, d in (("jpg", encoded(n, "jpeg")), ("json", label(n % 2)))]
    write(tmp_path / "a.tar", members)
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    data = load_images(f"wds:{tmp_path}/*.tar", img_size=8)
    assert data.classes == ["cat", "dog"]
    assert data.describe()["counts"] == {"train": {"cat": 4, "dog": 4}, "test": {"cat": 1, "dog": 1}}
    (tmp_path / "classes.txt").write_text("cat\n")
    with pytest.raises(UserError, match="names 1 classes, the labels go up to 1"):
        load_images(f"wds:{tmp_path}/*.tar", img_size=8)


def label(value: int) -> bytes:
    return json.dumps({"label": value, "caption": "x"}).encode()


def test_order_is_a_permutation_that_seed_and_epoch_fix(shards: Callable[..., str]):
    data = load_images(shards(), img_size=8)
    first = order(data, epoch=3)
    assert sorted(first) == list(range(34))
    assert first == order(data, epoch=3)
    assert first != order(data, epoch=4)
    assert first != order(data, epoch=3, seed=1)


@given(count=st.integers(0, 60), size=st.integers(1, 20), seed=st.integers(0, 5))
def test_a_buffer_gives_everything_once_and_nothing_early(count: int, size: int, seed: int):
    out = shuffled(np.arange(count), size, np.random.default_rng(seed))
    assert sorted(out.tolist()) == list(range(count))
    # The i-th to come out is among the first i + size that went in.
    assert all(place < i + size for i, place in enumerate(out))


def test_processes_read_shards_of_their_own(shards: Callable[..., str]):
    data = load_images(shards(), img_size=8)
    train = data.train
    assert isinstance(train, ShardImages)
    for epoch in range(3):
        parts = [order(data, epoch=epoch, rank=rank, world_size=2) for rank in range(2)]
        assert [len(part) for part in parts] == [17, 17]
        read = [{int(train.shard[i]) for i in part} for part in parts]
        assert not read[0] & read[1]
        assert read[0] | read[1] == {0, 1, 2, 3}
    assert read[0] != {int(train.shard[i]) for i in order(data, epoch=0, rank=0, world_size=2)}
    with pytest.raises(UserError, match="4 shards cannot be distributed over 5 processes"):
        order(data, rank=0, world_size=5)
    samples = train.prepared(mean=data.mean, std=data.std)
    with pytest.raises(UserError, match="give --devices 4 or fewer"):
        make_loader(samples, batch_size=2, shuffle=True, seed=0, world_size=5)


def test_workers_change_nothing(shards: Callable[..., str]):
    data = load_images(shards(), img_size=8)
    for alone, helped in zip(loader(data), loader(data, workers=2), strict=True):
        assert all(torch.equal(alone[key], helped[key]) for key in alone)


def test_resuming_decodes_nothing_that_was_seen(shards: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    data = load_images(shards(), img_size=8)
    expected = list(loader(data, epoch=2))[6:]
    opened, before = [], decoding._opened
    monkeypatch.setattr(decoding, "_opened", lambda source: opened.append(1) or before(source))
    rest = list(loader(data, epoch=2, start_batch=6))
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(rest, expected, strict=True))
    assert len(opened) == 34 - 6 * 4


def test_headers_are_read_once(shards: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = shards()
    load_images(spec, img_size=8)
    with monkeypatch.context() as patch:
        patch.setattr(tarfile, "open", lambda *a, **k: pytest.fail("a shard was scanned again"))
        assert len(load_images(spec, img_size=8).train) == 34
    write(tmp_path / "set" / "train-001.tar", sample(1))
    assert len(load_images(spec, img_size=8).train) == 27


def test_bad_members_are_skipped_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bad = [
        ("a.png", b""),
        ("a.cls", b"0"),
        ("b.cls", b"1"),
        ("c.png", encoded(1)),
        ("d.png", encoded(1)),
        ("d.cls", b"cat"),
        ("e.png", encoded(1)),
        ("e.cls", b"-3"),
        ("f.png", encoded(1)[:-30]),
        ("f.cls", b"0"),
    ]
    write(tmp_path / "a.tar", [*bad, *(m for n in range(9) for m in sample(n))])
    shutil.copy(tmp_path / "a.tar", tmp_path / "b.tar")
    data = load_images(f"wds:{tmp_path}/a.tar,{tmp_path}/b.tar", img_size=8)
    reasons = {s.path.split(": ")[1]: s.reason for s in data.skipped[:5]}
    assert set(reasons) == {"a", "b", "c", "d", "e"}
    assert "0 bytes" in reasons["a"]
    assert "no picture" in reasons["b"]
    assert "neither .cls nor .json" in reasons["c"]
    assert "no label" in reasons["d"]
    assert "label -3" in reasons["e"]
    assert "10 samples left out" in capsys.readouterr().err
    # That a picture is cut off is seen when it is read.
    assert 0 not in order(data)
    assert f"left out: {tmp_path}/a.tar: f is truncated" in capsys.readouterr().err


def cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def cut_between_members(path: Path) -> None:
    with tarfile.open(path) as tar:
        offset = tar.getmembers()[3].offset
    path.write_bytes(path.read_bytes()[:offset])


def overwrite_a_header(path: Path) -> None:
    with tarfile.open(path) as tar:
        offset = tar.getmembers()[3].offset
    data = bytearray(path.read_bytes())
    data[offset : offset + 200] = b"\xff" * 200
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: cut(p, 0.3), r"train-001\.tar is truncated after part/"),
        (cut_between_members, r"train-001\.tar is truncated after part/000007\.json"),
        (overwrite_a_header, r"train-001\.tar is damaged after part/000007\.json"),
        (lambda p: p.write_bytes(b""), r"train-001\.tar is no uncompressed tar file"),
        (lambda p: p.write_bytes(b"\x1f\x8b\x08" + bytes(600)), r"train-001\.tar is no uncompressed tar file"),
        (lambda p: p.unlink(), r"train-001\.tar does not exist \(1 of 4 shards\)"),
    ],
)
def test_a_damaged_shard_is_one_clear_line(shards: Callable[..., str], tmp_path: Path, spoil: Any, message: str):
    spec = shards()
    spoil(tmp_path / "set" / "train-001.tar")
    with pytest.raises(UserError, match=message) as caught:
        load_images(spec, img_size=8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("wds:", "wds needs a path: give --data wds:PATH/train-"),
        ("wds:,", "wds needs one pattern"),
        ("wds:a,b,c", "wds needs one pattern"),
        ("wds:/no/*.tar", "no file fits it"),
        ("wds:/no/a-{0..3.tar", "does not exist"),
        ("wds:/", "/ is no file"),
        ("wds:/no/a-{0..99999999}{0..99999999}.tar", "these are more than 500 shards"),
    ],
)
def test_mistakes_in_the_pattern(spec: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards_module, "MOST_SHARDS", 500)
    with pytest.raises(UserError, match=message):
        load_images(spec)


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a-08.tar", "a-09.tar", "a-10.tar"):
        (tmp_path / name).touch()
    assert [p.name for p in expand(f"{tmp_path}/a-{{08..10}}.tar")] == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert [p.name for p in expand(f"{tmp_path}/a-*.tar")] == ["a-08.tar", "a-09.tar", "a-10.tar"]
    monkeypatch.chdir(tmp_path)
    assert with_absolute_paths("wds:a-*.tar,b.tar") == f"wds:{tmp_path}/a-*.tar,{tmp_path}/b.tar"
    assert short_name("wds:/data/flowers/a-{0..9}.tar,/data/flowers/b.tar") == "wds-flowers"
    assert with_absolute_paths("digits") == short_name("digits") == "digits"


def shard(path: Path, labels: list[bytes], ending: str = "cls") -> str:
    write(path, [m for i, text in enumerate(labels) for m in ((f"{i}.png", encoded(i)), (f"{i}.{ending}", text))])
    # The same shard cannot be given twice.
    shutil.copy(path, test := path.with_name(f"test-{path.name}"))
    return f"wds:{path},{test}"


def test_a_key_that_comes_again_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A writer that was started again and appended; and one that wrote all pictures before the labels."""
    first = [("a.png", encoded(1)), ("a.cls", b"0"), ("b.png", encoded(2)), ("b.cls", b"1")]
    again = [("a.png", encoded(3)), ("a.cls", b"1")]
    spec = f"wds:{write(tmp_path / 'a.tar', first + again)},{write(tmp_path / 'b.tar', first)}"
    for _ in range(2):  # Also from the cached index.
        data = load_images(spec, img_size=16)
        assert {(int(image[0, 0, 0]), label) for image, label in data.train} == {(1, 0), (3, 1), (2, 1)}
        assert f"1 key repeated in one shard, the first {tmp_path}/a.tar: a" in capsys.readouterr().err
    mixed = [m for m in first + again if "png" in m[0]] + [m for m in first + again if "cls" in m[0]]
    data = load_images(f"wds:{write(tmp_path / 'c.tar', mixed)},{tmp_path}/b.tar", img_size=16)
    assert {(int(image[0, 0, 0]), label) for image, label in data.train} == {(2, 1)}, "a.png comes twice"
    apart = [m for m in first if "png" in m[0]] + [m for m in first if "cls" in m[0]]
    data = load_images(f"wds:{write(tmp_path / 'e.tar', apart)},{tmp_path}/b.tar", img_size=16)
    assert {(int(image[0, 0, 0]), label) for image, label in data.train} == {(1, 0), (2, 1)}
    lonely = load_images(f"wds:{write(tmp_path / 'd.tar', [*first, ('a.png', encoded(3))])},{tmp_path}/b.tar")
    assert ["d.tar: a" in s.path and "no label" not in s.path for s in lonely.skipped] == [True]
    assert len(lonely.train) == 2


ONE, THREE, LABEL = ("a.png", encoded(1)), ("a.png", encoded(3)), ("a.cls", b"1")


@pytest.mark.parametrize(
    ("start", "end", "pairs"),
    [
        ([ONE], [THREE, LABEL], {(3, 1)}),
        ([ONE], [LABEL, THREE], {(3, 1)}),
        ([("a.cls", b"0")], [THREE, LABEL], {(3, 1)}),
        ([ONE, ("a.cls", b"0")], [("a.tiff", encoded(3, "tiff")), ("a.json", b'{"label": 1}')], {(1, 0), (3, 1)}),
        ([ONE, THREE], [LABEL], set()),
    ],
)
def test_a_label_of_a_repeated_key_goes_to_its_own_picture(
    tmp_path: Path, start: list[tuple[str, bytes]], end: list[tuple[str, bytes]], pairs: set[tuple[int, int]]
):
    good = [("b.png", encoded(2)), ("b.cls", b"0"), ("c.png", encoded(4)), ("c.cls", b"1")]
    files = write(tmp_path / "a.tar", [*start, *good, *end])
    data = load_images(f"wds:{files},{write(tmp_path / 'b.tar', good)}", img_size=16)
    assert {(int(image[0, 0, 0]), label) for image, label in data.train} == {(2, 0), (4, 1)} | pairs


def test_training_shards_are_not_tested(tmp_path: Path):
    spec = shard(tmp_path / "a.tar", [b"0", b"1"])
    with pytest.raises(UserError, match=r"test-a\.tar is in both patterns"):
        load_images(f"wds:{tmp_path}/*.tar, {tmp_path}/test-a.tar")
    assert len(load_images(spec.replace(",", ", ")).test) == 2


def test_shards_joined_by_cat_are_refused(tmp_path: Path):
    shard(tmp_path / "a.tar", [b"0", b"1"])
    joined = tmp_path / "joined.tar"
    joined.write_bytes((whole := (tmp_path / "a.tar").read_bytes()) + bytes(1 << 18) + whole)
    with pytest.raises(UserError, match=r"joined\.tar has further files behind its end.*after 1\.cls"):
        load_images(f"wds:{joined},{tmp_path}/a.tar")


@pytest.mark.parametrize("ending", ["cls", "json"])
def test_labels_are_whole_numbers(tmp_path: Path, ending: str):
    good, bad = ["1", "0", "1.0", "2.", " 2\n", '"2"'], ["0.9", "-0.5", "true", "[1]", "1e-1", '"1_0"', '"x"', "null"]
    good = good if ending == "json" else good[:5]
    good.remove("2." if ending == "json" else " 2\n")
    texts = [text if ending == "cls" else f'{{"label": {text}}}' for text in (*good, *bad)]
    data = load_images(shard(tmp_path / "a.tar", [text.encode() for text in texts], ending), img_size=8)
    assert data.train.labels.tolist() == [int(float(text.strip(' "\n'))) for text in good]
    assert len(data.skipped) == 2 * len(bad)
    assert all("whole number" in s.reason for s in data.skipped)


def test_a_label_that_is_not_there_is_told_without_python_s_names(tmp_path: Path):
    texts = [b'{"label": 0}', b'{"label": 1}', b'{"class": 1}', b"[1]", b"{"]
    data = load_images(shard(tmp_path / "a.tar", texts, "json"), img_size=8)
    reasons = [s.reason for s in data.skipped][:3]
    assert reasons[:2] == ['has no label: its .json has no "label"'] * 2
    assert reasons[2].startswith("has no label: its .json is not JSON")


def test_a_label_beyond_what_is_plausible_is_one_line(tmp_path: Path):
    spec = shard(tmp_path / "a.tar", [b"0", b"1", b"999999"])
    with pytest.raises(UserError, match=r"a\.tar: 2 has the label 999999, and there are 6 samples; .* classes\.txt"):
        load_images(spec, img_size=8)
    assert len(load_images(shard(tmp_path / "b.tar", [b"0", b"999"]), img_size=8).classes) == 1000
    (tmp_path / "classes.txt").write_text("\n".join(f"c{i}" for i in range(1200)))
    assert len(load_images(shard(tmp_path / "b.tar", [b"0", b"1199"]), img_size=8).classes) == 1200


@pytest.mark.parametrize("content", ["caf\xe9\nth\xe9\n".encode("latin-1"), "cat\ndog\n".encode("utf-16")])
def test_names_in_another_encoding_are_one_line(tmp_path: Path, content: bytes):
    (tmp_path / "classes.txt").write_bytes(content)
    with pytest.raises(UserError, match=r"classes\.txt is not UTF-8"):
        load_images(shard(tmp_path / "a.tar", [b"0", b"1"]), img_size=8)


def test_a_byte_order_mark_is_no_letter(tmp_path: Path):
    (tmp_path / "classes.txt").write_bytes(b"\xef\xbb\xbfcat\r\ndog\r\n")
    spec = shard(tmp_path / "a.tar", [b"\xef\xbb\xbf0", b"1"])
    assert load_images(spec, img_size=8).classes == ["cat", "dog"]


def test_pictures_of_every_format_that_is_read(tmp_path: Path):
    kinds = {"jfif": "jpeg", "avif": "avif", "tiff": "tiff", "bmp": "bmp", "gif": "gif", "jp2": "jpeg2000"}
    members = [(f"{e}.{x}", d) for e, kind in kinds.items() for x, d in ((e, encoded(9, kind)), ("cls", b"0"))]
    both = [("z.png", encoded(1)), ("z.jpg", encoded(200, "jpeg")), ("z.cls", b"1")]
    write(tmp_path / "a.tar", [*members, *both])
    shutil.copy(tmp_path / "a.tar", tmp_path / "b.tar")
    data = load_images(f"wds:{tmp_path}/a.tar,{tmp_path}/b.tar", img_size=16)
    assert len(data.train) == len(kinds) + 1
    assert not data.skipped
    assert data.train[len(kinds)][0][0].float().mean() > 190


def header(name: str, size: int, kind: bytes = b"0") -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def block(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def extended(record: str) -> bytes:
    """A header of POSIX.1-2008 with this record, whose length is put in front."""
    record = f" {record}\n"
    size = next(n for n in range(len(record), len(record) + 9) if len(str(n)) + len(record) == n)
    return header("x", size, b"x") + block(f"{size}{record}".encode())


PICTURE = header("a.jpg", 4) + block(b"none")
HOSTILE = {
    "longer than any memory": header("././@LongLink", 7 * 10**12, b"L"),
    "a name in a name": (header("././@LongLink", 1, b"L") + block(b"x")) * 3000,
    "a sparse file": extended("GNU.sparse.map=0,1,2") + PICTURE,
    "beyond the end": header("a.jpg", 10**12),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_headers_that_announce_what_is_not_there(tmp_path: Path, what: str):
    (tmp_path / "a.tar").write_bytes(HOSTILE[what] + bytes(1024))
    with pytest.raises(UserError, match=r"(the shard .*a\.tar is (truncated|no uncompressed tar))|hold no sample"):
        load_images(f"wds:{tmp_path}/a.tar", root=tmp_path / "cache")


@pytest.mark.parametrize(
    ("ending", "content"),
    [("json", '{"label": Infinity}'), ("json", '{"label": 1e400}'), ("json", "[" * 20_000), ("cls", "9" * 5000)],
)
def test_labels_that_are_no_numbers(tmp_path: Path, ending: str, content: str):
    label = header(f"a.{ending}", len(content)) + block(content.encode())
    (tmp_path / "a.tar").write_bytes(PICTURE + label + bytes(1024))
    with pytest.raises(UserError, match=r"hold no sample with an image and a \.cls or \.json label"):
        load_images(f"wds:{tmp_path}/a.tar", root=tmp_path / "cache")


def test_a_class_named_twice_is_refused(tmp_path: Path):
    members = [("a.png", encoded(1)), ("a.cls", b"0"), ("b.png", encoded(2)), ("b.cls", b"1")]
    spec = f"wds:{write(tmp_path / 'a.tar', members)},{write(tmp_path / 'b.tar', members)}"
    (tmp_path / "classes.txt").write_text("cat\ncat\n")
    with pytest.raises(UserError, match="names 'cat' more than once"):
        load_images(spec, img_size=16)
