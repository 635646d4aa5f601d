"""Folders of a user's own images: layouts, the split, and what is wrong with them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tokenmix.errors import UserError
from tokenmix.lab.data.images import ImageData, load_images
from tokenmix.lab.data.indexed import make_loader

Make = Callable[..., Path]


def load(folder: Path, **options) -> ImageData:
    return load_images(f"folder:{folder}", **{"img_size": 8, **options})


def pixels(part) -> set[bytes]:
    return {part[i][0].numpy().tobytes() for i in range(len(part))}


def test_split_is_stratified_and_covers_everything(image_folder: Make):
    data = load(image_folder(count=10))
    assert data.classes == ["cat", "dog"]
    assert data.describe()["counts"] == {"train": {"cat": 8, "dog": 8}, "test": {"cat": 2, "dog": 2}}
    assert len(pixels(data.train) | pixels(data.test)) == 20
    assert data.channels == 3
    assert data.img_size == (8, 8)


def test_split_depends_on_contents_alone(image_folder: Make):
    folder = image_folder(count=10)
    before = load(folder)
    for i, path in enumerate(sorted(folder.glob("cat/*"), reverse=True)):
        path.rename(path.with_name(f"x{i}.png"))
    after = load(folder, seed=7)
    assert pixels(before.test) == pixels(after.test)


def test_copies_stay_on_one_side(image_folder: Make):
    folder = image_folder(count=8)
    for path in list(folder.glob("*/*.png")):
        shutil.copy(path, path.with_name(f"copy-{path.name}"))
    data = load(folder)
    assert len(data.train) + len(data.test) == 32
    assert not pixels(data.train) & pixels(data.test)


@pytest.mark.parametrize("name", ["test", "val", "valid"])
def test_given_parts_are_kept(image_folder: Make, name: str):
    image_folder(count=3, part="train")
    data = load(image_folder(count=2, part=name))
    assert (len(data.train), len(data.test)) == (6, 4)


def test_train_alone_is_split(image_folder: Make):
    data = load(image_folder(count=5, part="train"))
    assert data.classes == ["cat", "dog"]
    assert (len(data.train), len(data.test)) == (8, 2)


def test_default_size_and_nested_folders(image_folder: Make):
    folder = image_folder(count=4)
    (folder / "cat" / "deep" / "er").mkdir(parents=True)
    (folder / "cat" / "00.png").rename(folder / "cat" / "deep" / "er" / "a.png")
    data = load(folder, img_size=None)
    assert data.img_size == (64, 64)
    assert len(data.train) + len(data.test) == 8


def spoil(folder: Path) -> None:
    (folder / "cat" / "empty.png").write_bytes(b"")
    (folder / "cat" / "notes.txt").write_text("these are cats\n" * 9)
    whole = (folder / "dog" / "00.png").read_bytes()
    (folder / "dog" / "cut.png").write_bytes(whole[: len(whole) // 2])
    levels = np.full((8, 8), np.nan, np.float32)
    Image.fromarray(levels).save(folder / "dog" / "nan.tif")
    (folder / "dog" / ".DS_Store").write_bytes(b"x")
    (folder / "dog" / "Thumbs.db").write_bytes(b"x")


def test_broken_files_are_skipped_counted_and_named(image_folder: Make, capsys: pytest.CaptureFixture[str]):
    folder = image_folder(count=5)
    spoil(folder)
    data = load(folder)
    assert {Path(s.path).name for s in data.skipped} == {"empty.png", "notes.txt", "cut.png", "nan.tif"}
    assert len(data.train) + len(data.test) == 10
    described = json.loads(json.dumps(data.describe()))
    assert described["skipped"] == 4
    assert any("0 bytes" in s["reason"] for s in described["skipped_first"])
    assert "4 files" in capsys.readouterr().err


def test_broken_files_of_a_test_folder_are_skipped(image_folder: Make):
    image_folder(count=3, part="train")
    folder = image_folder(count=3, part="test")
    (folder / "test" / "cat" / "empty.png").write_bytes(b"")
    data = load(folder)
    assert [Path(s.path).name for s in data.skipped] == ["empty.png"]
    assert len(data.test) == 6


def test_large_set_is_read_from_files(image_folder: Make, monkeypatch: pytest.MonkeyPatch):
    folder = image_folder(count=5)
    whole = load(folder)
    monkeypatch.setattr("tokenmix.lab.data.images.sets.MEMORY_BYTES", 0)
    lazy = load(folder)
    assert not lazy.train.in_memory
    assert pixels(lazy.train) == pixels(whole.train)
    assert lazy.mean == pytest.approx(whole.mean)
    assert len(load(folder, limit=4).train) == 4


def test_file_that_breaks_later_is_left_out_of_its_batch(
    image_folder: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = image_folder(count=5)
    monkeypatch.setattr("tokenmix.lab.data.images.sets.MEMORY_BYTES", 0)
    data = load(folder)
    Path(data.train.source(2)).write_bytes(b"")  # type: ignore[attr-defined]
    samples = data.train.prepared(augment="light", mean=data.mean, std=data.std)
    loader = make_loader(samples, batch_size=8, shuffle=False, seed=0)
    for _ in range(2):
        (batch,) = loader
        assert batch["index"].tolist() == [0, 1, 3, 4, 5, 6, 7]
        assert torch.equal(batch["label"], data.train.labels[batch["index"]])
        assert len(batch["image"]) == 7
    assert capsys.readouterr().err.count("left out") == 1
    with pytest.raises(UserError, match="cannot be read"):
        data.train[2]


def remove(path: Path) -> None:
    shutil.rmtree(path)


MISTAKES = {
    "missing": (lambda f: remove(f), "does not exist"),
    "a file": (lambda f: (remove(f), f.write_text("x")), "is a file"),
    "empty": (lambda f: (remove(f), f.mkdir()), "no images"),
    "no labels": (
        lambda f: ([p.rename(f / p.name) for p in f.glob("cat/*")], remove(f / "cat"), remove(f / "dog")),
        "labels",
    ),
    "one class": (lambda f: remove(f / "dog"), "only one class.*'cat'"),
    "too deep": (
        lambda f: ((f / "all").mkdir(), (f / "dog").rename(f / "all/dog"), (f / "cat").rename(f / "all/cat")),
        "only one class.*'all'.*/all if its sub-folders are the classes",
    ),
    "empty class": (lambda f: (f / "bird").mkdir(), "no images of class 'bird'"),
    "no images": (lambda f: [p.unlink() for p in f.rglob("*.png")], "no images"),
    "broken class": (lambda f: [p.write_bytes(b"") for p in f.glob("dog/*")], r"class 'dog' \(4 unreadable.*0 bytes"),
    "single image": (lambda f: [p.unlink() for p in sorted(f.glob("dog/*"))[1:]], "'dog' has only one image"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_clear_line(image_folder: Make, name: str):
    folder = image_folder(count=4)
    spoil_it, message = MISTAKES[name]
    spoil_it(folder)
    with pytest.raises(UserError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_test_folder_with_a_class_of_its_own(image_folder: Make):
    image_folder(part="train")
    with pytest.raises(UserError, match="'bird'"):
        load(image_folder(classes=("cat", "bird"), part="test"))


def test_empty_test_folder(image_folder: Make):
    folder = image_folder(part="train")
    (folder / "test" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no images in .*test"):
        load(folder)


def test_grey_and_named_sets_in_colour(image_folder: Make):
    grey = load(image_folder(count=4), channels=1)
    assert (grey.channels, grey.train[0][0].shape) == (1, (1, 8, 8))
    colour = load_images("digits", channels=3)
    assert torch.equal(colour.train[5][0], load_images("digits").train[5][0].expand(3, 8, 8))
    assert colour.channels == len(colour.mean) == 3


def test_a_link_multiplies_nothing(image_folder: Make):
    folder = image_folder(count=10)
    (folder / "cat" / "up").symlink_to("..")
    data = load(folder)
    assert data.describe()["counts"] == {"train": {"cat": 8, "dog": 8}, "test": {"cat": 2, "dog": 2}}


def test_training_takes_nothing_of_the_test_folder_by_a_link(image_folder: Make):
    image_folder(count=3, part="train")
    folder = image_folder(count=2, part="test")
    (folder / "train" / "cat" / "more").symlink_to("../../test/cat")
    (folder / "test" / "dog" / "more").symlink_to("../../train/dog")
    data = load(folder)
    assert (len(data.train), len(data.test)) == (6, 4)


def test_shrinking_is_said(image_folder: Make, capsys: pytest.CaptureFixture[str]):
    folder = image_folder(count=4)
    load(folder, img_size=8)
    assert "scaled down" not in capsys.readouterr().err
    load(folder, img_size=4)
    assert "photographs of 16 x 20 px are scaled down by 4.0 to 4 x 4 px" in capsys.readouterr().err


def test_corrected_labels_of_test_images_are_other_data(image_folder: Make):
    image_folder(count=4, part="train")
    folder = image_folder(count=4, part="test")
    before = load(folder).describe()
    assert load(folder).describe() == before
    (folder / "test" / "cat").rename(folder / "test" / "x")
    (folder / "test" / "dog").rename(folder / "test" / "cat")
    (folder / "test" / "x").rename(folder / "test" / "dog")
    changed = {key for key, value in load(folder).describe().items() if value != before[key]}
    assert changed == {"test_digest"}
    lazy = load_images(f"imagefolder:{folder}", img_size=8).describe()["test_digest"]
    path = next((folder / "test" / "cat").iterdir())
    shutil.copy(next((folder / "train" / "cat").iterdir()), path)
    assert load_images(f"imagefolder:{folder}", img_size=8).describe()["test_digest"] != lazy


def test_images_that_hardly_use_their_levels_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """12 bits in files of 16."""
    generator = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(5):
            levels = generator.integers(0, 2048, (8, 8)).astype(np.uint16)
            Image.fromarray(levels).save(tmp_path / name / f"{i}.png")
    load(tmp_path)
    assert "if they have 12 bits, scale them to 16" in capsys.readouterr().err
