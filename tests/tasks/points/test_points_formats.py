"""Files of clouds: what each format says is what comes out, and a damaged one is one line."""

import codecs
import io
import os
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenmix.errors import UserError
from tokenmix.lab.tasks.points.files import read_points, sampled
from tokenmix.lab.tasks.points.ply import write_ply

# A tetrahedron whose faces run anticlockwise seen from outside.
CORNERS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=np.float64)
FACES = [[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]]
AREAS = torch.tensor([0.5, 0.5, 0.5, 3**0.5 / 2])


def ply(order: str, faces: list[list[int]]) -> bytes:
    names = {"<": "binary_little_endian", ">": "binary_big_endian", "": "ascii"}
    head = [
        "ply",
        f"format {names[order]} 1.0",
        "comment made by a test",
        f"element vertex {len(CORNERS)}",
        *(f"property float {axis}" for axis in "xyz"),
        *(f"property uchar {tint}" for tint in ("red", "green", "blue")),
        f"element face {len(faces)}",
        "property uchar flag",
        "property list uchar int vertex_indices",
        "end_header",
        "",
    ]
    tints = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 9, 9)]
    if order == "":
        rows = [f"{x} {y} {z} {r} {g} {b}" for (x, y, z), (r, g, b) in zip(CORNERS, tints)]
        rows += [" ".join(map(str, [7, len(face), *face])) for face in faces]
        return "\n".join([*head, *rows, ""]).encode()
    body = b"".join(struct.pack(f"{order}3f3B", *point, *tint) for point, tint in zip(CORNERS, tints))
    body += b"".join(struct.pack(f"{order}BB{len(face)}i", 7, len(face), *face) for face in faces)
    return "\n".join(head).encode() + body


def off(header: str) -> str:
    rows = [" ".join(map(str, point)) for point in CORNERS]
    return "\n".join([header, *rows, *(f"3 {a} {b} {c}" for a, b, c in FACES), ""])


def obj() -> str:
    rows = ["# a comment", *(f"v {x} {y} {z}" for x, y, z in CORNERS), "vt 0 0", "vn 0 0 1", "usemtl red"]
    rows += [f"f {a + 1}/1/1 {b + 1}//1 {c + 1}" for a, b, c in FACES[:3]]
    # From the end, as OBJ allows.
    rows += ["f -3 -2 -1"]
    return "\n".join(rows)


MESHES: dict[str, bytes] = {
    "little.ply": ply("<", FACES),
    "big.ply": ply(">", FACES),
    "text.ply": ply("", FACES),
    "plain.off": off("OFF\n4 4 6").encode(),
    "modelnet.off": off("OFF4 4 0").encode(),
    "mesh.obj": obj().encode(),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_is_read_as_it_is(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(MESHES[name])
    cloud = read_points(tmp_path / name, surface="keep")
    torch.testing.assert_close(cloud.points, torch.from_numpy(CORNERS).float())
    assert cloud.faces is not None
    assert cloud.faces.tolist() == FACES
    if name.endswith(".ply"):
        assert cloud.colors is not None
        assert cloud.colors.tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255], [9, 9, 9]]


@pytest.mark.parametrize("order", ["<", ">", ""])
def test_polygons_of_several_sizes_become_triangles(tmp_path: Path, order: str):
    (tmp_path / "a.ply").write_bytes(ply(order, [[0, 1, 2, 3], [0, 2, 1], [0, 1]]))
    faces = read_points(tmp_path / "a.ply", surface="keep").faces
    assert faces is not None
    assert sorted(faces.tolist()) == [[0, 1, 2], [0, 2, 1], [0, 2, 3]]


@pytest.mark.parametrize("name", MESHES)
def test_a_surface_is_sampled_by_area_with_outward_normals(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(MESHES[name])
    cloud = read_points(tmp_path / name, num_points=6000, seed=3)
    assert cloud.points.shape == (6000, 3)
    assert cloud.normals is not None
    outward = torch.tensor([[0, 0, -1.0], [0, -1, 0], [-1, 0, 0], [3**-0.5] * 3])
    which = (cloud.normals @ outward.T).argmax(1)
    torch.testing.assert_close(cloud.normals, outward[which])
    # Each point lies in the plane of its face, inside the tetrahedron.
    offset = torch.tensor([0, 0, 0, 3**-0.5])
    torch.testing.assert_close((cloud.points * outward[which]).sum(1), offset[which], atol=1e-5, rtol=0)
    assert bool((cloud.points > -1e-6).all())
    share = which.bincount(minlength=4) / 6000
    torch.testing.assert_close(share, AREAS / AREAS.sum(), atol=0.02, rtol=0)
    # Evenly within a face: the mean is the middle of it.
    torch.testing.assert_close(cloud.points[which == 0].mean(0), torch.tensor([1 / 3, 1 / 3, 0]), atol=0.03, rtol=0)


def test_a_sample_is_a_function_of_the_seed(tmp_path: Path):
    (tmp_path / "a.off").write_bytes(MESHES["plain.off"])
    one, same, other = (read_points(tmp_path / "a.off", num_points=50, seed=seed).points for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_colours_of_vertices_are_mixed(tmp_path: Path):
    (tmp_path / "a.ply").write_bytes(MESHES["little.ply"])
    cloud = read_points(tmp_path / "a.ply", num_points=500)
    assert cloud.colors is not None
    on_floor = cloud.points[:, 2] == 0
    x, y = cloud.points[on_floor, 0], cloud.points[on_floor, 1]
    expected = torch.stack([1 - x - y, x, y], 1) * 255
    torch.testing.assert_close(cloud.colors[on_floor].float(), expected, atol=1, rtol=0)


def test_points_of_a_surface_have_the_part_of_the_nearest_corner(tmp_path: Path):
    np.savez(tmp_path / "a.npz", points=CORNERS, faces=np.array(FACES), parts=np.array([0, 1, 2, 3]))
    cloud = read_points(tmp_path / "a.npz", num_points=200)
    assert cloud.parts is not None
    # Shares of the corners at (1, 0, 0), (0, 1, 0) and (0, 0, 1) are the coordinates; that at the origin has the rest.
    shares = torch.cat([1 - cloud.points.sum(1, keepdim=True), cloud.points], 1)
    assert cloud.parts.tolist() == shares.argmax(1).tolist()


def test_arrays(tmp_path: Path):
    points = np.random.default_rng(0).normal(size=(5, 3))
    np.save(tmp_path / "a.npy", points)
    np.savez(tmp_path / "b.npz", xyz=points, normals=points, parts=np.arange(5))
    np.savez(tmp_path / "c.npz", points=CORNERS, faces=np.array(FACES))
    assert read_points(tmp_path / "a.npy").points.dtype == torch.float32
    cloud = read_points(tmp_path / "b.npz")
    assert cloud.normals is not None
    assert cloud.parts is not None
    torch.testing.assert_close(cloud.normals.norm(dim=1), torch.ones(5))
    assert cloud.parts.tolist() == [0, 1, 2, 3, 4]
    assert len(read_points(tmp_path / "c.npz", num_points=7).points) == 7


def test_tables_tell_normals_from_colours(tmp_path: Path):
    (tmp_path / "a.xyz").write_text("# x y z\n1 2 3\n4 5 6\n")
    (tmp_path / "b.txt").write_text("1,2,3,0,0,1\n4,5,6,0.6,0.8,0\n")
    (tmp_path / "c.txt").write_text("1 2 3 255 0 128\n4 5 6 0 0 1\n")
    (tmp_path / "d.txt").write_text("1 2 3 0 0 1 4.000000\n4 5 6 0 1 0 5.000000\n")
    assert read_points(tmp_path / "a.xyz").points.tolist() == [[1, 2, 3], [4, 5, 6]]
    (tmp_path / "a.csv").write_text('"x","y",z\n1,2,3\n4,5,6\n')
    assert read_points(tmp_path / "a.csv").points.tolist() == [[1, 2, 3], [4, 5, 6]]
    normals, colors = read_points(tmp_path / "b.txt").normals, read_points(tmp_path / "c.txt").colors
    parts = read_points(tmp_path / "d.txt").parts
    assert normals is not None
    assert colors is not None
    assert parts is not None
    torch.testing.assert_close(normals, torch.tensor([[0, 0, 1], [0.6, 0.8, 0]]))
    assert colors.tolist() == [[255, 0, 128], [0, 0, 1]]
    assert parts.tolist() == [4, 5]
    # Pure colours have the length of normals, and a coarse table has normals of any length.
    (tmp_path / "e.csv").write_text("x,y,z,r,g,b\n1,2,3,1,0,0\n4,5,6,0,1,0\n")
    (tmp_path / "f.csv").write_text("x,y,z,nx,ny,nz\n1,2,3,1,0,0\n4,5,6,0,2,0\n")
    assert read_points(tmp_path / "e.csv").normals is None
    normals = read_points(tmp_path / "f.csv").normals
    assert normals is not None
    assert normals.tolist() == [[1, 0, 0], [0, 1, 0]]


TABLES = {
    "semicolons": "0,5;1,25;2,75\n1,5;0,25;3\n",
    "blanks": "0,5 1,25\t2,75\n1,5 0,25 3\n",
    "points": "0.5;1.25;2.75\n1.5;0.25;3\n",
    "comment": "// a, b\n0.5 1.25 2.75\n# c; d\n1.5 0.25 3\n",
    "commas": "0.5 , 1.25,2.75\n1.5, 0.25, 3 \n",
    "mac": "# a, b\r0.5 1.25 2.75\r1.5 0.25 3\r",
    "mark": "\ufeff0.5 1.25 2.75\n1.5 0.25 3\n",
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_other_programs_and_languages(tmp_path: Path, name: str):
    (tmp_path / "a.txt").write_bytes(TABLES[name].encode())
    assert read_points(tmp_path / "a.txt").points.tolist() == [[0.5, 1.25, 2.75], [1.5, 0.25, 3]]


HEAD = [b"ply", b"format ascii 1.0", b"element vertex 2", *(b"property float " + axis for axis in (b"x", b"y", b"z"))]


@pytest.mark.parametrize(
    ("kind", "rows", "expected"),
    [
        ("uchar", [[0, 128, 255], [255, 0, 0]], [[0, 128, 255], [255, 0, 0]]),
        ("int", [[0, 128, 255], [255, 0, 0]], [[0, 128, 255], [255, 0, 0]]),
        ("short", [[0, 128, 255], [255, 0, 0]], [[0, 128, 255], [255, 0, 0]]),
        ("ushort", [[0, 65535, 257], [0, 0, 0]], [[0, 255, 1], [0, 0, 0]]),
        ("uint", [[0, 65535, 257], [0, 0, 0]], [[0, 255, 1], [0, 0, 0]]),
        ("int", [[0, 2**31 - 1, 2**30], [0, 0, -1]], [[0, 255, 128], [0, 0, 0]]),
        ("float", [[0, 0.5, 1], [0, 0, 0]], [[0, 128, 255], [0, 0, 0]]),
        ("float", [[0, 0.5, 1.0001], [0, 0, 0]], [[0, 128, 255], [0, 0, 0]]),
        ("double", [[0, 128, 255], [0, 0, 0]], [[0, 128, 255], [0, 0, 0]]),
        ("float", [[25, 2, 75], [0, 0, 0]], [[25, 2, 75], [0, 0, 0]]),
        # Text says more than its type holds.
        ("uchar", [[0, 0.5, 1], [0, 0, 0]], [[0, 128, 255], [0, 0, 0]]),
    ],
)
def test_colours_of_every_type(tmp_path: Path, kind: str, rows: list[list[float]], expected: list[list[int]]):
    tints = [f"property {kind} {tint}".encode() for tint in ("red", "green", "blue")]
    lines = [" ".join(map(str, [1, 2, 3, *row])).encode() for row in rows]
    (tmp_path / "a.ply").write_bytes(b"\n".join([*HEAD, *tints, b"end_header", *lines, b""]))
    colors = read_points(tmp_path / "a.ply").colors
    assert colors is not None
    assert colors.tolist() == expected


def test_colours_of_an_archive_have_the_type_that_numpy_gives_them(tmp_path: Path):
    np.savez(tmp_path / "a.npz", points=np.zeros((1, 3)), colors=np.array([[0, 128, 255]]))
    colors = read_points(tmp_path / "a.npz").colors
    assert colors is not None
    assert colors.tolist() == [[0, 128, 255]]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize(
    "comment", [b"comment no end_header here", b"comment \xc3\x85 element vertex 9", b"obj_info end_header"]
)
def test_a_header_ends_where_its_last_line_does(tmp_path: Path, end: bytes, comment: bytes):
    body = np.arange(6, dtype="<f4").tobytes()
    # In the second file a line break is the first byte of the first number.
    for content in (body, b"\n" + body[1:]):
        head = [HEAD[0], b"format binary_little_endian 1.0", comment, *HEAD[2:], b"end_header", b""]
        (tmp_path / "a.ply").write_bytes(end.join(head) + content)
        expected = np.frombuffer(content, "<f4").reshape(2, 3)
        assert read_points(tmp_path / "a.ply").points.tolist() == expected.tolist()
    (tmp_path / "a.ply").write_bytes(end.join([*HEAD[:2], comment, *HEAD[2:], b"end_header", b"0 1 2", b"3 4 5", b""]))
    assert read_points(tmp_path / "a.ply").points.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_byte_order_mark_hides_no_vertex(tmp_path: Path):
    for name in ("mesh.obj", "plain.off", "text.ply"):
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + MESHES[name])
        assert len(read_points(tmp_path / name, surface="keep").points) == 4


@pytest.mark.parametrize("with_colors", [False, True])
def test_what_is_written_is_read(tmp_path: Path, with_colors: bool):
    points = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    colors = torch.arange(27, dtype=torch.uint8).view(9, 3) if with_colors else None
    cloud = read_points(write_ply(tmp_path / "a.ply", points, colors))
    assert torch.equal(cloud.points, points)
    assert (cloud.colors is None) == (colors is None)
    if colors is not None and cloud.colors is not None:
        assert torch.equal(cloud.colors, colors)


DAMAGED: dict[str, tuple[bytes, str]] = {
    "short.ply": (MESHES["little.ply"][:-3], "ends before"),
    "short_vertices.ply": (MESHES["little.ply"].split(b"end_header\n")[0] + b"end_header\nab", "ends before"),
    "short_text.ply": (MESHES["text.ply"][:-4], "ends before"),
    "words.ply": (MESHES["text.ply"].replace(b"0.0 0.0 0.0", b"0.0 zero 0.0"), "damaged"),
    "no_ply.ply": (b"solid", "no PLY header"),
    "type.ply": (MESHES["little.ply"].replace(b"float y", b"quad y"), "'property quad y'"),
    "no_xyz.ply": (MESHES["little.ply"].replace(b"float y", b"float q"), "without x, y and z"),
    "corner.ply": (ply("<", [[0, 1, 9]]), "refers to vertex 9, but there are 4"),
    "short.off": (off("OFF\n4 9 0").encode(), "declares 4 vertices and 9 faces"),
    "no_counts.off": (b"OFF\nx y z\n", "no counts"),
    "no_off.off": (b"4 4 0\n", "does not begin with OFF"),
    "words.off": (off("OFF\n4 4 0").replace("1.0 0.0 0.0", "1.0 one 0.0").encode(), "'1.0 one 0.0'"),
    "face.off": (off("OFF\n4 4 0").replace("3 0 2 1", "3 0 2").encode(), "not a vertex or face"),
    "flat.off": (b"OFF\n3 1 0\n0 0 0\n1 1 1\n2 2 2\n3 0 1 2\n", "none of the 1 faces has an area"),
    "face.obj": (b"v 0 0 0\nv 1 0 0\nf 1 two 3\n", "'f 1 two 3'"),
    "outside.obj": (b"v 0 0 0\nv 1 0 0\nv 1 1 0\nf 1 2 4\n", "refers to vertex 4, but there are 3, counted from 1"),
    "none.obj": (b"o nothing\n", "no points"),
    "nan.xyz": (b"0 0 0\n1 nan 3\n", "point 2 of 2 is not finite"),
    "huge.xyz": (b"0 0 0\n1 1e300 3\n", "point 2 of 2 is not finite"),
    "columns.xyz": (b"0 0 0\n1 3\n", "line 2 has 2 numbers instead of 3"),
    "two.csv": (b"0,0\n1,3\n", "2 columns"),
    "turned.csv": (b"z,y,x\n1,2,3\n", "has z in column 1; give the columns x y z"),
    "colours_first.csv": (b"r,g,b,x,y,z\n1,2,3,4,5,6\n", "has r in column 1"),
    "counted.csv": (b"id,x,y,z,nx,ny\n0,1,2,3,4,5\n", "has x in column 2"),
    "label_fourth.csv": (b"x,y,z,label,nx,ny,nz\n1,2,3,0,0,1,4\n", "has label in column 4"),
    "cell.csv": (b"x,y,z\n1,2,3\n1.5,,3.5\n", "an empty cell in line 3"),
    "endless.txt": (b"1 2 3 0 0 1 inf\n", "inf in column 7"),
    "words.csv": (b"x,y,z\n1,3,4\na,b,c\n", "line 3 has 'a'"),
    "neither.txt": (b"0 0 0 -7 2 2\n", "neither normals nor colours"),
    "part.txt": (b"0 0 0 1 0 0 3\n0 0 1 1 0 0 0.5\n", "0.5 in column 7"),
    "note.txt": (b"# nothing\n", "no points"),
    "empty.npz": (b"", "is empty"),
    "list.ply": (
        b"\n".join([*HEAD, b"end_header", b"1 1 1 1", b"1 2 2 2", b""]).replace(b"float x", b"list uchar float x"),
        "without x, y and z, one number each",
    ),
    "corners.ply": (
        b"\n".join(
            [*HEAD, b"element face 1", b"property int vertex_index", b"end_header", b"1 2 3", b"4 5 6", b"0", b""]
        ),
        "corners are not a list",
    ),
    "wide.txt": ("1 2 3\n".encode("utf-16"), "is UTF-16; convert it"),
    "groups.txt": (b"1,2,3 4,5,6\n", "its commas were read as decimal commas"),
    "thousands.txt": (b"1.234,5;2;3\n", "'1.234.5'"),
    "broken.npz": (b"PK\x03\x04 and no more", "not a readable array"),
    "a.stl": (b"solid", "an unknown suffix for a point cloud"),
}


def npy_header(shape: tuple[int, ...]) -> bytes:
    """An array of float64 whose header announces more than follows."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return stream.getvalue() + bytes(24)


def test_many_small_arrays_of_zeros_are_refused_together(tmp_path: Path):
    np.savez_compressed(tmp_path / "a.npz", **{f"a{i}": np.zeros(500_000) for i in range(20)}, points=np.zeros((2, 3)))
    with pytest.raises(UserError, match=r"npy declares 4000128 bytes in"):
        read_points(tmp_path / "a.npz")


def encrypted() -> bytes:
    """An archive whose member says that it needs a password."""
    stream = io.BytesIO()
    np.savez(stream, points=np.zeros((2, 3)))
    data = bytearray(stream.getvalue())
    for place in (6, data.find(b"PK\1\2") + 8):
        data[place] |= 1
    return bytes(data)


def test_zeros_that_unpack_to_a_thousand_times_the_file_are_refused(tmp_path: Path):
    """233 kB of them took 1.1 GB."""
    for count, readable in ((10_000, True), (3_000_000, False)):
        np.savez_compressed(tmp_path / "a.npz", points=np.zeros((count, 3)))
        if readable:
            assert len(read_points(tmp_path / "a.npz").points) == count
        else:
            with pytest.raises(UserError, match=r"points\.npy declares 72000128 bytes in"):
                read_points(tmp_path / "a.npz")


MANY = 10**12
DAMAGED |= {
    "many.ply": (MESHES["little.ply"].replace(b"vertex 4", b"vertex %d" % MANY), "ends before"),
    "many_text.ply": (MESHES["text.ply"].replace(b"face 4", b"face %d" % MANY), "ends before"),
    "long_face.ply": (MESHES["text.ply"].replace(b"7 3 0 2 1", b"7 %d 0 2 1" % MANY), "ends before"),
    "long.ply": (MESHES["little.ply"].replace(b"vertex 4", b"vertex " + b"9" * 5000), "the header line 'element vert"),
    "long_size.off": (b"OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n" + b"9" * 5000 + b" 0 1 2\n", "not a vertex or face"),
    "encrypted.npz": (encrypted(), "is encrypted"),
    "many.off": (off(f"OFF\n{MANY} 4 0").encode(), f"declares {MANY} vertices"),
    "many.npy": (npy_header((MANY, 3)), "it declares"),
    "zero.obj": (obj().replace("f -3 -2 -1", "f 0 1 2").encode(), "refers to vertex 5"),
    "short_vertex.obj": (b"v 0 0 0\nv 1 0\n", "'v 1 0'"),
    "far_back.obj": (b"v 0 0 0\nv 1 0 0\nf -1 -2 -3\nv 1 1 1\n", "refers to vertex 0"),
    "cut.obj": (b"v 0 0 0\nv 1 0 0\nv 1 1 0\nf 1 2 -", "'f 1 2 -'"),
}


def test_a_header_inside_an_archive_announces_no_more_than_it_holds(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("points.npy", npy_header((MANY, 3)))
    with pytest.raises(UserError, match=r"a\.npz is not a readable array \(it declares"):
        read_points(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["a.ply", "a.npz", "a.xyz"])
def test_a_pipe_is_refused_at_once(tmp_path: Path, name: str):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="is a pipe or a device"):
        read_points(tmp_path / name)


def test_a_mesh_without_trimesh_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # A name that is None in sys.modules cannot be imported.
    monkeypatch.setitem(sys.modules, "trimesh", None)
    for name, content in MESHES.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name} needs trimesh: pip install 'tokenmix\[points\]'"):
            read_points(tmp_path / name)
    assert len(read_points(write_ply(tmp_path / "cloud.ply", torch.zeros(5, 3))).points) == 5


def test_numbers_below_zero_count_back_from_the_face(tmp_path: Path):
    rows = [
        "v 0 0 0",
        "v 1 0 0",
        "v 0 1 0",
        "f -3 -2 -1",
        "vt 0 0",
        "v 0 0 1",
        "v 1 0 1",
        "v 0 1 1",
        "f -3/1 -2/1 -1/1",
    ]
    (tmp_path / "a.obj").write_text("\n".join(rows))
    faces = read_points(tmp_path / "a.obj", surface="keep").faces
    assert faces is not None
    assert faces.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("name", ["a.off", "a.obj"])
def test_polygons_are_triangles_about_a_corner(tmp_path: Path, name: str):
    points = [" ".join(map(str, corner)) for corner in np.random.default_rng(0).random((5, 3))]
    counts = ["OFF", "5 3 0", *points, "5 0 1 2 3 4", "4 1 2 3 4", "2 0 1"]
    plain = [*(f"v {point}" for point in points), "f 1 2 3 4 5", "f 2 3 4 5", "f 1 2"]
    (tmp_path / name).write_text("\n".join(counts if name == "a.off" else plain))
    faces = read_points(tmp_path / name, surface="keep").faces
    assert faces is not None
    # The same triangle may begin at any of its corners.
    turned = sorted(min(face[i:] + face[:i] for i in range(3)) for face in faces.tolist())
    assert turned == [[0, 1, 2], [0, 2, 3], [0, 3, 4], [1, 2, 3], [1, 3, 4]]


FAR = np.array([500_000.0, 5_400_000.0, 120.0])


def far_away(tmp_path: Path, points: np.ndarray) -> list[Path]:
    """The same points in three formats; the header of the text says float, as most programs write."""
    rows = "\n".join(" ".join(f"{value:.6f}" for value in row) for row in points)
    head = "\n".join(
        ["ply", "format ascii 1.0", f"element vertex {len(points)}", *(f"property float {a}" for a in "xyz")]
    )
    np.savez(tmp_path / "far.npz", points=points)
    (tmp_path / "far.ply").write_text(f"{head}\nend_header\n{rows}\n")
    (tmp_path / "far.xyz").write_text(rows)
    return sorted(tmp_path.glob("far.*"))


def test_coordinates_of_a_map_keep_their_digits(tmp_path: Path):
    points = np.random.default_rng(0).normal(size=(50, 3))
    wanted = torch.from_numpy(points - points.mean(0)).float()
    for file in far_away(tmp_path, points + FAR):
        torch.testing.assert_close(read_points(file, centred=True).points, wanted, rtol=0, atol=2e-6)
        # As the file has them, float32 holds them to half a metre alone.
        assert (read_points(file).points - torch.from_numpy(FAR) - torch.from_numpy(points)).abs().max() > 0.1


def test_centring_leaves_a_broken_point_to_be_named(tmp_path: Path):
    points = np.zeros((4, 3)) + FAR
    points[2, 1] = np.nan
    np.savez(tmp_path / "a.npz", points=points)
    with pytest.raises(UserError, match=r"point 3 of 4 is not finite \(1 in all\)"):
        read_points(tmp_path / "a.npz", centred=True)


@pytest.mark.parametrize("order", ["<", ">", ""])
def test_more_than_the_header_announces_is_told(tmp_path: Path, order: str):
    whole = ply(order, FACES)
    (tmp_path / "a.ply").write_bytes(whole + b"\n")
    assert len(read_points(tmp_path / "a.ply", surface="keep").points) == 4
    (tmp_path / "a.ply").write_bytes(whole.replace(b"element face 4", b"element face 3"))
    left = "5 numbers" if order == "" else "14 bytes"
    with pytest.raises(UserError, match=f"has {left} more than its header declares"):
        read_points(tmp_path / "a.ply")


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line(tmp_path: Path, name: str):
    content, said = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read_points(tmp_path / name)
    assert said in str(error.value)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"other": np.zeros((4, 3))}, "holds other"),
        ({"points": np.zeros((4, 2))}, "shape (4, 2)"),
        ({"points": np.zeros((0, 3))}, "no points"),
        ({"points": np.array([[None, 1, 2]])}, "not a readable array"),
        ({"points": np.zeros((4, 3)), "normals": np.zeros((5, 3))}, "normals of shape (5, 3)"),
        ({"points": np.zeros((4, 3)), "parts": np.zeros(4)}, "parts of shape (4,) and type float64"),
        ({"points": np.zeros((4, 3)), "faces": np.full((1, 3), -1)}, "refers to vertex -1"),
        ({"points": np.zeros((4, 3)), "faces": np.array(3)}, "faces of shape ()"),
    ],
)
def test_arrays_that_are_no_cloud(tmp_path: Path, arrays: dict[str, np.ndarray], said: str):
    np.savez(tmp_path / "a.npz", allow_pickle=True, **arrays)
    with pytest.raises(UserError) as error:
        read_points(tmp_path / "a.npz")
    assert said in str(error.value)


def test_a_file_that_is_not_there():
    with pytest.raises(UserError, match=r"nowhere\.ply.* does not exist"):
        read_points("nowhere.ply")


def test_a_folder_is_told_from_a_file(tmp_path: Path):
    with pytest.raises(UserError, match="is a folder; name the files in it"):
        read_points(tmp_path)


def test_no_points_are_asked_for(tmp_path: Path):
    (tmp_path / "a.off").write_bytes(MESHES["plain.off"])
    with pytest.raises(UserError, match="0 points"):
        sampled(read_points(tmp_path / "a.off", surface="keep"), 0)


def test_points_of_another_shape_are_not_written(tmp_path: Path):
    with pytest.raises(UserError, match=r"\(4, 2\)"):
        write_ply(tmp_path / "a.ply", torch.zeros(4, 2))
    with pytest.raises(UserError, match="cannot write"):
        write_ply(tmp_path / "no" / "a.ply", torch.zeros(4, 3))
