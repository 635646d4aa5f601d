"""Files by class: links are followed, and nothing is taken twice."""

import shutil
from pathlib import Path

import pytest

from tokenmix.lab.data.reading import class_files, held_out, labelled_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of two files each, and a folder with one file outside."""
    for place in ("set/a/0", "set/a/1", "set/b/0", "set/b/1", "pool/deep/0"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    return tmp_path / "set"


def found(folder: Path) -> list[tuple[str, int]]:
    items = class_files(folder, ["a", "b"], lambda path: Path(path).name != "unwanted")
    return [(str(Path(path).relative_to(folder)), label) for path, label in items]


OWN = [("a/0", 0), ("a/1", 0), ("b/0", 1), ("b/1", 1)]


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("a/up", ".."),
        ("a/up", "../.."),
        ("a/self", "."),
        ("a/other", "../b"),
        ("a/2", "0"),
        ("a/2", "../b/1"),
        ("a/root", "/"),
        ("c", "a"),
    ],
)
def test_another_way_to_what_is_taken(folder: Path, link: str, target: str, capsys: pytest.CaptureFixture[str]):
    (folder / link).symlink_to(target)
    classes = sorted({"a", "b", Path(link).parts[0]})
    items = class_files(folder, classes, lambda name: True)
    assert [(str(Path(path).relative_to(folder)), label) for path, label in items] == OWN
    assert f"left out: {folder / link}, a" in capsys.readouterr().err


def test_links_to_elsewhere_are_followed_once(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "a" / "pool").symlink_to("../../pool")
    (folder / "b" / "pool").symlink_to("../../pool/deep")
    (folder / "b" / "2").symlink_to("../../pool/deep/0")
    assert found(folder) == [*OWN[:2], ("a/pool/deep/0", 0), *OWN[2:]]
    assert capsys.readouterr().err.count("left out") == 2


def test_two_links_that_lead_to_each_other_end(folder: Path, tmp_path: Path):
    for here, there in (("x", "y"), ("y", "x")):
        (tmp_path / here).mkdir()
        (tmp_path / here / "0").touch()
        (tmp_path / here / "there").symlink_to(f"../{there}")
        (folder / "a" / here).symlink_to(f"../../{here}")
    assert found(folder) == [*OWN[:2], ("a/x/0", 0), ("a/x/there/0", 0), *OWN[2:]]


def test_a_link_into_what_is_hidden_or_unwanted_is_a_file_of_its_own(folder: Path):
    for name in (".store", ".1", "unwanted"):
        (folder / "a" / name).touch()
        (folder / "a" / f"to{name}").symlink_to(name)
    (folder / "a" / "nothing").symlink_to("missing")
    assert found(folder)[2:-2] == [("a/nothing", 0), ("a/to.1", 0), ("a/to.store", 0), ("a/tounwanted", 0)]


def test_a_farm_of_links(folder: Path, tmp_path: Path):
    for place in range(3):
        (tmp_path / "pool" / f"x{place}").touch()
        (folder / "ab"[place % 2] / f"x{place}").symlink_to(tmp_path / "pool" / f"x{place}")
    assert len(found(folder)) == 7


def test_test_files_that_are_training_files_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for part in ("train", "val"):
        for name in ("a/0", "b/1", "b/2"):
            path = tmp_path / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # The same beginning is not the same file.
            path.write_text(f"{name} {' ' * 70_000} {part.ljust(5) if name == 'a/0' else name}")
    labelled_files(tmp_path, lambda path: True, of="images", layout="classes")
    said = capsys.readouterr().err
    assert "2 of 3 test images are training images too" in said
    assert f"{tmp_path}/val/b/1 is {tmp_path}/train/b/1" in said
    assert "copies" not in said


def test_copies_in_the_test_set_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("train/a/0", "train/b/0", "val/a/0", "val/a/1", "val/a/2", "val/b/0"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name[:-1]}{' ' * 70_000}{name[-1] * (name != 'val/a/2')}")
    shutil.copy(tmp_path / "val/a/0", tmp_path / "val/a/3")
    labelled_files(tmp_path, lambda path: True, of="images", layout="classes")
    said = capsys.readouterr().err
    assert f"1 of 5 test images are copies of others ({tmp_path}/val/a/3 is {tmp_path}/val/a/0)" in said
    assert "training images too" not in said
    for i in range(6):
        (tmp_path / f"{i}").write_text(f"{i // 3}")
    held_out([(f"{tmp_path}/{i}", 0) for i in range(6)], ["a"], "image")
    assert "2 of 3 test images are copies of others" in capsys.readouterr().err


def test_copies_of_other_classes_and_equal_beginnings(tmp_path: Path):
    """A copy is on one side whatever its label, and files with one length and beginning are not copies."""
    items = []
    for i in range(40):
        (tmp_path / f"{i}").write_text(f"{' ' * 70_000}{i % 30:02}")
        items.append((f"{tmp_path}/{i}", int(i >= 30)))
    test = held_out(items, ["a", "b"], "image").tolist()
    assert test[:10] == test[30:]
    assert 6 <= sum(test[:30]) <= 8
    both = held_out([*items[:30], *((items[i][0], 1) for i in (0, 1))], ["a", "b"], "image").tolist()
    assert sorted(both[30:]) == [False, True], "each part has an image of each class"


def test_a_class_with_underscores_counts(tmp_path: Path):
    for name in ("__background__/0", "a/0", "__MACOSX/a/0", "__pycache__/0"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert labelled_files(tmp_path, lambda path: True, of="images", layout="classes")[2] == ["__background__", "a"]
