"""Published layouts of point clouds and the user's own folder, made small by the tests."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenmix.errors import UserError
from tokenmix.lab.tasks.points.clouds import load_points
from tokenmix.lab.tasks.points.layouts import PARTS

BOX = """{header}
8 6 0
0 0 0
0 0 1
0 1 0
0 1 {side}
1 0 0
1 0 1
1 1 0
1 1 1
4 0 1 3 2
4 4 6 7 5
4 0 4 5 1
4 2 3 7 6
4 0 2 6 4
4 1 5 7 3
"""


def rows(seed: int, count: int, part: int | None = None) -> str:
    """Lines x,y,z,nx,ny,nz and perhaps a part."""
    rng = np.random.default_rng(seed)
    normals = rng.normal(size=(count, 3))
    values = np.concatenate([rng.normal(size=(count, 3)), normals / np.linalg.norm(normals, axis=1)[:, None]], axis=1)
    lines = [" ".join(f"{v:.6f}" for v in row) for row in values]
    return "\n".join(line if part is None else f"{line} {part + i % 2}.000000" for i, line in enumerate(lines))


def meshes(folder: Path) -> Path:
    for name in ("bathtub", "night_stand"):
        for side, count in (("train", 3), ("test", 1)):
            place = folder / name / side
            place.mkdir(parents=True)
            for i in range(count):
                # The quirk of ModelNet40: counts after OFF on one line.
                text = BOX.format(header="OFF", side=1 + i)
                (place / f"{name}_{i}.off").write_text(text.replace("OFF\n", "OFF", 1) if i % 2 else text)
    return folder


def resampled(folder: Path) -> Path:
    shapes = {"train": ["airplane_0001", "night_stand_0001"], "test": ["night_stand_0002"]}
    folder.mkdir()
    (folder / "modelnet40_shape_names.txt").write_text("airplane\nnight_stand\n")
    (folder / "modelnet10_shape_names.txt").write_text("night_stand\n")
    for side, names in shapes.items():
        (folder / f"modelnet40_{side}.txt").write_text("\n".join(names) + "\n")
        for name in names:
            place = folder / name.rpartition("_")[0]
            place.mkdir(exist_ok=True)
            (place / f"{name}.txt").write_text(rows(len(name), 3000).replace(" ", ","))
    return folder


def shapenet(folder: Path, part: int = PARTS["Chair"].start) -> Path:
    (folder / "train_test_split").mkdir(parents=True)
    (folder / "synsetoffset2category.txt").write_text("Chair\t03001627\nBag\t02773838\n")
    starts = {"03001627": part, "02773838": PARTS["Bag"].start}
    for side in ("train", "val", "test"):
        listed = [f"shape_data/{synset}/{side}{synset}" for synset in starts]
        (folder / "train_test_split" / f"shuffled_{side}_file_list.json").write_text(json.dumps(listed))
        for synset, start in starts.items():
            (folder / synset).mkdir(exist_ok=True)
            (folder / synset / f"{side}{synset}.txt").write_text(rows(len(side), 20 + len(side), start))
    return folder


def own(folder: Path, apart: bool = True, parts: bool = False) -> Path:
    for side, count in (("train", 4), ("test", 2)) if apart else (("", 10),):
        for label, name in enumerate(("cup", "key")):
            place = folder / side / name
            place.mkdir(parents=True)
            for i in range(count):
                rng = np.random.default_rng([label, i, len(side)])
                more = {"parts": np.arange(30) % 2 + label} if parts else {}
                np.savez(place / f"{i}.npz", points=rng.normal(size=(30, 3)), **more)
    return folder


def test_modelnets_meshes(tmp_path: Path):
    data = load_points(f"modelnet:{meshes(tmp_path / 'm')}", root=tmp_path / "cache")
    assert data.classes == ["bathtub", "night_stand"]
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [0, 1]
    assert data.has_normals
    cloud = data.train.cloud(4)
    assert cloud.points.shape == (2048, 3)
    assert cloud.name.endswith("night_stand_1.off")
    torch.testing.assert_close(cloud.points.norm(dim=1).max(), torch.tensor(1.0), atol=1e-3, rtol=0)


def test_modelnets_resampled_points(tmp_path: Path):
    data = load_points(f"modelnet:{resampled(tmp_path / 'm')}", root=tmp_path / "cache")
    assert data.classes == ["airplane", "night_stand"]
    assert data.train.labels.tolist() == [0, 1]
    assert data.test.labels.tolist() == [1]
    assert len(data.test.cloud(0).points) == 2048


def test_what_was_read_once_is_kept_until_a_file_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = resampled(tmp_path / "m")
    for _ in range(2):
        data = load_points(f"modelnet:{folder}", root=tmp_path / "cache")
    assert capsys.readouterr().err.count("reading 3 files") == 1
    (folder / "airplane" / "airplane_0001.txt").write_text(rows(9, 2100))
    changed = load_points(f"modelnet:{folder}", root=tmp_path / "cache")
    assert not torch.equal(changed.train.cloud(0).points, data.train.cloud(0).points)


def test_what_is_kept_has_the_labels_and_parts_of_its_lists(tmp_path: Path):
    folder, root = resampled(tmp_path / "m"), tmp_path / "cache"
    shutil.copy(folder / "night_stand" / "night_stand_0002.txt", folder / "night_stand" / "night_stand_0003.txt")

    def labels(train: list[str], test: list[str]) -> tuple[list[int], list[int]]:
        for side, names in (("train", train), ("test", test)):
            (folder / f"modelnet40_{side}.txt").write_text("\n".join(names) + "\n")
        data = load_points(f"modelnet:{folder}", root=root)
        return data.train.labels.tolist(), data.test.labels.tolist()

    names = ["airplane_0001", "night_stand_0001", "night_stand_0002", "night_stand_0003"]
    assert labels(names[:2], names[2:]) == ([0, 1], [1, 1])
    assert labels(names[:3], names[3:]) == ([0, 1, 1], [1])
    (folder / "modelnet40_shape_names.txt").write_text("night_stand\nairplane\n")
    assert labels(names[:3], names[3:]) == ([1, 0, 0], [0])


def test_shapenet_part(tmp_path: Path):
    data = load_points(f"shapenet-part:{shapenet(tmp_path / 's')}", want="parts", root=tmp_path / "cache")
    assert data.classes == ["Bag", "Chair"]
    assert data.parts == {"Bag": [4, 5], "Chair": [12, 13, 14, 15]}
    assert len(data.part_names) == 50
    assert data.part_names[13] == "Chair 1"
    # Validation is for training too.
    assert len(data.train) == 4
    sizes = [len(data.train.cloud(i).points) for i in range(4)]
    assert sorted(sizes) == [23, 23, 25, 25]
    cloud = data.test.cloud(1)
    assert cloud.parts is not None
    assert set(cloud.parts.tolist()) <= set(data.parts[data.classes[cloud.label]])
    assert load_points(f"shapenet-part:{tmp_path / 's'}", root=tmp_path / "cache").test.cloud(0).parts is None


def test_a_part_of_another_category_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = shapenet(tmp_path / "s", 40)
    for _ in range(2):
        # The second time from the cache.
        data = load_points(f"shapenet-part:{folder}", want="parts", root=tmp_path / "cache")
        said = capsys.readouterr().err
        assert " left out: " in said
        assert f"tokenmix: shapenet-part:{folder} has no cloud of 'Chair' at all\n" in said
    assert "part 40, but Chair has 12 to 15" in data.skipped[0].reason
    assert set(data.train.labels.tolist()) == {0}


@pytest.mark.parametrize("apart", [True, False])
def test_a_folder_of_ones_own(tmp_path: Path, apart: bool):
    data = load_points(f"clouds:{own(tmp_path / 'o', apart)}")
    assert data.classes == ["cup", "key"]
    assert (len(data.train), len(data.test)) == ((8, 4) if apart else (16, 4))
    assert not data.has_normals
    assert data.parts == {}
    again = load_points(f"clouds:{tmp_path / 'o'}")
    assert [again.test.names[i] for i in range(4)] == [data.test.names[i] for i in range(4)]


def test_parts_of_ones_own(tmp_path: Path):
    folder = own(tmp_path / "o", parts=True)
    assert load_points(f"clouds:{folder}", want="parts").part_names == ["part 0", "part 1", "part 2"]
    (folder / "parts.json").write_text('["rim", "handle", "tooth"]')
    data = load_points(f"clouds:{folder}", want="parts")
    assert data.parts == {"cup": [0, 1], "key": [1, 2]}
    assert data.part_names == ["rim", "handle", "tooth"]


def test_an_unreadable_file_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = own(tmp_path / "o")
    (folder / "train" / "cup" / "bad.xyz").write_text("1 2 nan\n")
    (folder / "train" / "cup" / "notes.md").write_text("no cloud")
    data = load_points(f"clouds:{folder}")
    assert [Path(s.path).name for s in data.skipped] == ["bad.xyz"]
    assert "not finite" in data.skipped[0].reason
    assert "1 file of" in capsys.readouterr().err


def test_a_pipe_is_left_out_and_named(tmp_path: Path):
    folder = own(tmp_path / "o", apart=False)
    os.mkfifo(folder / "cup" / "pipe.xyz")
    data = load_points(f"clouds:{folder}")
    assert [(Path(s.path).name, "is a pipe" in s.reason) for s in data.skipped] == [("pipe.xyz", True)]


def test_meshes_are_not_left_out_where_trimesh_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = own(tmp_path / "o")
    (folder / "train" / "cup" / "box.off").write_text(BOX.format(header="OFF", side=1))
    assert len(load_points(f"clouds:{folder}").train) == 9
    monkeypatch.setitem(sys.modules, "trimesh", None)
    with pytest.raises(UserError, match=r"box\.off needs trimesh: pip install 'tokenmix\[points\]'"):
        load_points(f"clouds:{folder}")


def test_a_link_to_nowhere_is_one_line(tmp_path: Path):
    folder = meshes(tmp_path / "m")
    (folder / "bathtub" / "train" / "gone.off").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"cannot read .*gone\.off \(No such file"):
        load_points(f"modelnet:{folder}", root=tmp_path / "cache")


def test_a_class_that_is_not_tested_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    load_points(f"shapenet-part:{unreadable('test')(shapenet(tmp_path / 's'))}", root=tmp_path / "cache")
    assert "has no cloud of 'Bag' for testing: it is not measured\n" in capsys.readouterr().err


def unreadable(*sides: str) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        for side in sides:
            (folder / "02773838" / f"{side}02773838.txt").write_text("no numbers\n")
        return folder

    return change


def without(path: str) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        (folder / path).unlink()
        return folder

    return change


def only_train(folder: Path) -> Path:
    for file in folder.glob("*/test/*.off"):
        file.unlink()
    return folder


def one_class(folder: Path) -> Path:
    for side in ("train", "test"):
        (folder / side / "key").rename(folder / f"{side}-key")
    return folder


def new_class(folder: Path) -> Path:
    (folder / "test" / "new").mkdir()
    return folder


def new_part(folder: Path) -> Path:
    np.savez(folder / "test" / "cup" / "9.npz", points=np.eye(3), parts=np.array([0, 1, 2]))
    return folder


def negative_part(folder: Path) -> Path:
    for file in folder.glob("train/cup/*.npz"):
        np.savez(file, points=np.eye(3), parts=np.array([0, 1, -2]))
    return folder


WRONG = [
    ("modelnet", meshes, only_train, "class", "no .off file for test"),
    ("modelnet", resampled, without("airplane/airplane_0001.txt"), "class", "1 of 2 files of modelnet40_train.txt"),
    ("modelnet", resampled, without("modelnet40_test.txt"), "class", "does not exist"),
    (
        "modelnet",
        meshes,
        None,
        "parts",
        "has clouds, not parts; give one of ",
    ),
    ("shapenet-part", shapenet, without("02773838/val02773838.txt"), "parts", "1 of 2 files"),
    ("shapenet-part", shapenet, without("synsetoffset2category.txt"), "parts", "does not exist"),
    (
        "shapenet-part",
        shapenet,
        unreadable("train", "val"),
        "parts",
        "clouds of 'Bag' for testing, and none that can be",
    ),
    ("clouds", own, one_class, "class", "has only one class"),
    ("clouds", own, new_class, "class", "the class 'new'"),
    ("clouds", own, None, "parts", "has no parts for its points"),
    ("clouds", lambda f: own(f, parts=True), new_part, "parts", "the part 2, which no training cloud"),
    ("clouds", lambda f: own(f, parts=True), negative_part, "parts", "no readable cloud"),
]


@pytest.mark.parametrize(("kind", "make", "change", "want", "said"), WRONG)
def test_what_cannot_be_used_is_one_line(tmp_path: Path, kind: str, make, change, want, said: str):
    folder = make(tmp_path / "x")
    with pytest.raises(UserError) as error:
        load_points(f"{kind}:{folder if change is None else change(folder)}", want=want, root=tmp_path / "cache")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("modelnt", "did you mean modelnet"),
        ("modelnet", "modelnet needs a path: give --data modelnet:PATH"),
        ("clouds:/nowhere", "does not exist"),
        ("shapenet-part:/nowhere", "needs a folder"),
    ],
)
def test_an_unknown_set(spec: str, said: str):
    with pytest.raises(UserError, match=said):
        load_points(spec)


def test_a_cloud_that_is_none_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A list where a number belongs stopped the training."""
    head = "ply\nformat ascii 1.0\nelement vertex 1\nproperty float x\nproperty float y\nproperty float z\nend_header\n"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(10):
            (tmp_path / name / f"{i}.ply").write_text(f"{head}{i} 0 0\n")
    (tmp_path / "a" / "0.ply").write_text(head.replace("float x", "list uchar float x") + "1 0 0 0\n")
    data = load_points(f"clouds:{tmp_path}")
    assert len(data.train) + len(data.test) == 19
    assert [Path(skipped.path).name for skipped in data.skipped] == ["0.ply"]
    assert "1 file of" in capsys.readouterr().err


def test_the_lists_of_a_set_are_text(tmp_path: Path):
    folder = resampled(tmp_path / "set")
    names = folder / "modelnet40_shape_names.txt"
    names.write_text(names.read_text(), encoding="utf-8-sig")
    assert load_points(f"modelnet:{folder}", root=tmp_path / "cache").classes == ["airplane", "night_stand"]
    names.write_bytes("caf\xe9\n".encode("latin-1"))
    with pytest.raises(UserError, match="is not UTF-8; save it in this encoding"):
        load_points(f"modelnet:{folder}", root=tmp_path / "cache")


def test_a_list_names_no_file_outside_its_folder(tmp_path: Path):
    folder = resampled(tmp_path / "set")
    (folder / "airplane" / "airplane_").mkdir()
    (tmp_path / "secret.txt").write_text("1 2 3\n")
    (folder / "modelnet40_train.txt").write_text("airplane_/../../../secret\n")
    with pytest.raises(UserError, match="leaves the folder"):
        load_points(f"modelnet:{folder}", root=tmp_path / "cache")
