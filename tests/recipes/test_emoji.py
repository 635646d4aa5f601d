"""The emoji package: what is one concept, the split, and reading a tiny package in the published layout."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from recipes.datasets.images.emoji import Picture, composite, concept_of, pictures_of, read_package, split_concepts
from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import FetchError
from tokenmix.lab.data.images import load_images
from tokenmix.lab.data.lookup import stored_path


def entry(name: str, unified: str, category: str = "People & Body", sub: str = "person", skins: int = 0) -> dict:
    made = {
        "name": name,
        "unified": unified,
        "category": category,
        "subcategory": sub,
        "image": f"{unified.lower()}.png",
    }
    if skins:
        made["skin_variations"] = {str(i): {"image": f"{unified.lower()}-1f3f{i}.png"} for i in range(skins)}
    return made


SAME = [
    ("1F3C4", "1F3C4-200D-2640-FE0F", "1F3C4-200D-2642-FE0F"),
    ("1F468-200D-1F33E", "1F469-200D-1F33E", "1F9D1-200D-1F33E"),
    ("1F3C3", "1F3C3-200D-27A1-FE0F", "1F3C3-200D-2642-FE0F-200D-27A1-FE0F"),
    ("1F48F", "1F468-200D-2764-FE0F-200D-1F48B-200D-1F468", "1F469-200D-2764-FE0F-200D-1F48B-200D-1F468"),
    ("1F491", "1F469-200D-2764-FE0F-200D-1F468"),
    ("1F46B", "1F46C", "1F9D1-200D-1F91D-200D-1F9D1"),
    ("1F46A", "1F468-200D-1F469-200D-1F466", "1F9D1-200D-1F9D2-200D-1F9D2"),
    ("1F385", "1F936", "1F9D1-200D-1F384"),
    ("1F934", "1F478", "1FAC5"),
    ("1F44D", "1F44D-1F3FD"),
]


@pytest.mark.parametrize("forms", SAME)
def test_variants_are_one_concept(forms: tuple[str, ...]):
    assert len({concept_of(entry("x", form)) for form in forms}) == 1


def test_different_things_are_different_concepts():
    assert len({concept_of(entry("x", forms[0])) for forms in SAME}) == len(SAME)
    assert concept_of(entry("MAN", "1F468")) != concept_of(entry("BOY", "1F466"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            ("LARGE RED CIRCLE", "1F534", "Symbols", "geometric"),
            ("MEDIUM WHITE CIRCLE", "26AA", "Symbols", "geometric"),
        ),
        (("BLUE BOOK", "1F4D8", "Objects", "book-paper"), ("GREEN BOOK", "1F4D7", "Objects", "book-paper")),
        (("CLOCK FACE ONE OCLOCK", "1F550", "Travel", "time"), ("CLOCK FACE TWO-THIRTY", "1F55D", "Travel", "time")),
        (("HASH KEY", "0023-FE0F-20E3", "Symbols", "keycap"), ("KEYCAP 7", "0037-FE0F-20E3", "Symbols", "keycap")),
    ],
)
def test_colours_clocks_and_keys_are_one_concept(one: tuple, other: tuple):
    assert concept_of(entry(*one)) == concept_of(entry(*other))


def test_components_are_no_pictures():
    listed = list(pictures_of([entry("TONE", "1F3FB", "Component", "skin-tone"), entry("HAND", "270B", skins=5)]))
    assert len(listed) == 6
    assert {p.category for p in listed} == {"People & Body"}


def test_split_keeps_shares_and_never_cuts_a_concept():
    pictures = [
        Picture(f"{c}-{k}-{i}.png", c, f"{c}-{k}")
        for c, n in (("A", 40), ("B", 200))
        for k in range(n)
        for i in range(1 + k % 3)
    ]
    test = split_concepts(pictures)
    assert test == split_concepts(list(reversed(pictures)))
    for category in "AB":
        mine = [p for p in pictures if p.category == category]
        assert sum(p.concept in test for p in mine) / len(mine) == pytest.approx(0.2, abs=0.02)


def test_composite_is_exact():
    rgba = torch.zeros(4, 4, 1, 1, dtype=torch.uint8)
    rgba[:, 0] = 100
    rgba[:, 3] = torch.tensor([0, 255, 128, 51]).view(-1, 1, 1)
    assert composite(rgba)[:, 0].flatten().tolist() == [255, 100, round((100 * 128 + 255 * 127) / 255), 224]
    assert composite(rgba, level=0)[:, 0].flatten().tolist() == [0, 100, 50, 20]


def package(path: Path, meta: list[dict] | None, files: list[str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:

        def add(name: str, content: bytes) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))

        for i, name in enumerate(files):
            png = io.BytesIO()
            Image.fromarray(np.full((64, 64, 4), i, np.uint8)).save(png, "PNG")
            add(f"package/img/google/64/{name}", png.getvalue())
        add("package/img/google/sheets/32.png", b"not read")
        if meta is not None:
            add("package/emoji.json", json.dumps(meta).encode())
    return path


def test_reads_a_package(tmp_path: Path):
    meta = [entry("CAT", "1F408", "Animals", "mammal"), entry("HAND", "270B", skins=2), entry("UNDRAWN", "1F000")]
    files = ["1f408.png", "270b.png", "270b-1f3f0.png", "270b-1f3f1.png", "stranger.png"]
    tensors, notes = read_package(package(tmp_path / "p.tgz", meta, files), "google")
    assert tensors["images"].shape == (4, 4, 64, 64)
    names = json.loads(notes["files"])
    assert names == sorted(files[:4])
    assert tensors["images"][:, 0, 0, 0].tolist() == [files.index(name) for name in names]
    classes = json.loads(notes["classes"])
    assert [classes[i] for i in tensors["labels"]] == ["Animals", *["People & Body"] * 3]


def test_packages_that_are_none(tmp_path: Path):
    with pytest.raises(FetchError, match=r"no emoji\.json"):
        read_package(package(tmp_path / "a.tgz", None, ["1f408.png"]), "google")
    with pytest.raises(FetchError, match="none of the pictures"):
        read_package(package(tmp_path / "b.tgz", [entry("CAT", "1F408", "Animals")], []), "google")
    cut = package(tmp_path / "c.tgz", [entry("CAT", "1F408", "Animals")], ["1f408.png"])
    cut.write_bytes(cut.read_bytes()[:100])
    with pytest.raises(FetchError, match="no readable package"):
        read_package(cut, "google")


def test_a_vendor_that_is_unknown_or_empty():
    with pytest.raises(UserError, match="google"):
        load_images("emoji:gogle")
    with pytest.raises(UserError, match="emoji has no variant '', got 'emoji:'; give emoji"):
        load_images("emoji:")


def _skip_unless_cached(vendor: str) -> Path:
    path = stored_path(f"emoji-{vendor}")
    if not path.exists():
        pytest.skip(f"emoji of {vendor} are not in the cache; `tokenmix data get emoji:{vendor}` fetches them")
    return path


@pytest.mark.parametrize("vendor", ["google", "twitter"])
def test_emoji_if_cached(vendor: str):
    _skip_unless_cached(vendor)
    data = load_images(f"emoji:{vendor}")
    assert len(data.classes) == 9
    assert (len(data.train), len(data.test)) == (3029, 752)
    counts = data.describe()["counts"]
    for label in data.classes:
        share = counts["test"][label] / (counts["test"][label] + counts["train"][label])
        assert share == pytest.approx(0.2, abs=0.02)
    corners = data.test.pixels(torch.arange(len(data.test)))[0][:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 255).float().mean() > 0.8


def test_emoji_concepts_of_both_vendors_are_on_the_same_side():
    sides = []
    for vendor in ("google", "twitter"):
        with safe_open(_skip_unless_cached(vendor), framework="pt") as file:
            concepts = json.loads(file.metadata()["concepts"])
            sides.append(dict(zip(concepts, file.get_tensor("test").tolist())))
            per_concept = set(zip(concepts, file.get_tensor("test").tolist()))
            assert len(per_concept) == len(set(concepts))
    assert sides[0] == sides[1]
