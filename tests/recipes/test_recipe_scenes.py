"""Scenes of the recipes: windows cut out of large ones; the sets where the cache has them, else made tiny here."""

from pathlib import Path

import pytest
import torch

from recipes.datasets.images.blue_marble import CLASSES, is_test_column, whole_map
from recipes.datasets.images.windows import Window, cut, cut_scenes, starts
from tokenmix.errors import UserError
from tokenmix.lab.data import fetch_data, list_data
from tokenmix.lab.data.lookup import stored_path
from tokenmix.lab.data.scenes import Objects, ObjectSamples, Scene, load_scenes, objects_of
from tokenmix.lab.data.store import fetched
from tokenmix.lab.registry import DATA_SETS


@pytest.mark.parametrize(
    ("spec", "want", "message"),
    [
        ("blue-mable", "classes", "did you mean blue-marble"),
        ("blue-marble", "boxes", "has classes, not boxes; give one of .*trees, composed, nuclei"),
        ("blue-marble:1000", "classes", "16 to 450"),
        ("blue-marble:112-4", "classes", "with -1 or -2 for other test blocks"),
        ("blue-marble:", "classes", "no variant ''"),
        ("nuclei:64", "masks", "nuclei has no variants, got 'nuclei:64'"),
        ("trees:x", "boxes", "64 to 2000"),
        ("composed:8", "masks", "64 to 450"),
    ],
)
def test_what_cannot_be_had(spec: str, want: str, message: str):
    with pytest.raises(UserError, match=message):
        load_scenes(spec, want=want)  # type: ignore[arg-type]


def test_they_are_listed_and_fetched_by_name(tmp_path: Path):
    rows = {row.name: row for row in list_data(tmp_path)}
    assert {"emoji", "blue-marble", "trees", "composed", "nuclei"} <= set(rows)
    assert not rows["blue-marble"].cached
    with pytest.raises(UserError, match="did you mean blue-marble"):
        fetch_data("blue-marbel")
    with pytest.raises(UserError, match="unknown data set 'tree'; did you mean trees"):
        fetch_data("tree")


def items() -> Objects:
    masks = torch.zeros(3, 20, 30, dtype=torch.bool)
    masks[0, 2:8, 3:9] = True
    masks[1, 10:20, 25:30] = True
    masks[2, 0:2, 28:30] = True
    return objects_of([4, 0, 2], masks=masks)


def test_cutting_moves_boxes_and_leaves_out_what_is_hardly_seen():
    scene = Scene(torch.arange(600).reshape(1, 20, 30).expand(3, -1, -1).byte(), "whole", objects=items())
    part = cut(scene, Window(0, 0, 6, 20, 24))
    assert part.image.shape == (3, 20, 24)
    assert torch.equal(part.image, scene.image[:, :, 6:])
    assert part.objects is not None
    assert part.objects.boxes.tolist() == [[0, 2, 3, 8], [19, 10, 24, 20], [22, 0, 24, 2]]
    part = cut(scene, Window(0, 0, 7, 20, 20))
    assert part.objects is not None
    assert part.objects.labels.tolist() == []
    cuts = cut_scenes([scene], [Window(0, 5, 6, 4, 4)])
    assert cuts.scene(0).name == "whole from row 5, column 6"


@pytest.mark.parametrize(
    ("length", "side", "overlap"), [(100, 30, 0), (100, 30, 10), (30, 30, 5), (10, 30, 0), (61, 30, 0)]
)
def test_windows_cover_a_length(length: int, side: int, overlap: int):
    places = starts(length, side, overlap)
    side = min(side, length)
    assert places[0] == 0
    assert places[-1] + side == length
    assert all(0 < b - a <= side - overlap for a, b in zip(places, places[1:]))  # noqa: RUF007


@pytest.fixture
def small_world(tmp_path: Path) -> Path:
    """A cache with a map of the real width, whose image tells the column, and 20 + 20 items of one class a part."""
    columns = torch.arange(5400)
    image = torch.stack([columns // 450 * 20, columns // 50, columns % 256]).byte()
    classes = torch.full((512, 5400), CLASSES.index("ocean"), dtype=torch.uint8)
    classes[:200] = CLASSES.index("cold")
    world = {"image": image[:, None, :].expand(3, 512, -1).contiguous(), "classes": classes}
    fetched("blue-marble", tmp_path, lambda _: (world, {"source": "made"}))
    items = torch.zeros(20, 28, 28, dtype=torch.uint8)
    items[:, 4:24, 8:20] = 200
    parts = {}
    for part, label in (("train", 0), ("t10k", 1)):
        parts |= {f"{part}_images": items.clone(), f"{part}_labels": torch.full((20,), label, dtype=torch.uint8)}
    fetched("fashion-mnist", tmp_path, lambda _: (parts, {"source": "made"}))
    return tmp_path


def columns_of(scene: Scene) -> torch.Tensor:
    """The blocks that a scene of the small world shows, by its first channel."""
    return scene.image[0].unique()


@pytest.mark.parametrize(
    ("spec", "side", "tested"),
    [
        ("blue-marble", 112, {2, 5, 8, 11}),
        ("blue-marble:224", 224, {2, 5, 8, 11}),
        ("blue-marble:224-1", 224, {0, 3, 6, 9}),
        ("blue-marble:224-2", 224, {1, 4, 7, 10}),
    ],
)
def test_tiles_lie_in_blocks_of_their_part(small_world: Path, spec: str, side: int, tested: set[int]):
    data = load_scenes(spec, want="classes", root=small_world)
    per_block = 450 // side * (2 if side == 112 else 1)  # rows of tiles that begin above row 200, with enough land
    assert (len(data.train), len(data.test), data.crop) == (8 * per_block, 4 * per_block, (side, side))
    learned = set(range(12)) - tested
    for part, blocks in ((data.train, learned), (data.test, tested)):
        scenes = [part.scene(i) for i in range(len(part))]
        assert {int(v) // 20 for s in scenes for v in columns_of(s)} == blocks
        assert all(len(columns_of(s)) == 1 for s in scenes)
        assert all(s.image.shape == (3, side, side) and s.classes is not None for s in scenes)
    assert data.mean[0] == pytest.approx(sum(learned) * 20 / 8 / 255)


def test_the_whole_map_counts_what_it_is_asked_to(small_world: Path):
    everything, tested = whole_map(small_world), whole_map(small_world, counted="test")
    assert tested.image.shape == (3, 512, 5400)
    assert tested.classes is not None
    assert everything.classes is not None
    assert (everything.classes != 255).all()
    assert torch.equal((tested.classes != 255).all(0), is_test_column())
    assert int(is_test_column().sum()) == 4 * 450
    assert (tested.classes[:, ~is_test_column()] == 255).all()


def test_the_whole_map_as_one_sample_is_turned_and_ignores_the_other_part(small_world: Path):
    data = load_scenes("blue-marble:whole", want="classes", root=small_world)
    assert (len(data.train), len(data.test), data.crop) == (1, 1, (5400, 512))
    for part, tested in ((data.train, False), (data.test, True)):
        scene = part.scene(0)
        assert scene.classes is not None
        assert scene.image.shape == (3, 5400, 512)
        assert torch.equal((scene.classes != 255).all(1), is_test_column() == tested)
        assert torch.equal(scene.image.mT, whole_map(small_world).image)


def test_composed_scenes_are_a_function_of_seed_and_index(small_world: Path):
    first, again, other = (load_scenes("composed", want="masks", seed=s, root=small_world) for s in (0, 0, 1))
    for index in (0, 7, 1999):
        assert torch.equal(first.train.scene(index).image, again.train.scene(index).image)
        assert not torch.equal(first.train.scene(index).image, other.train.scene(index).image)
        assert torch.equal(first.test.scene(index % 400).image, other.test.scene(index % 400).image)
    assert not torch.equal(first.train.scene(0).image, first.train.scene(1).image)


def test_composed_scenes_share_neither_items_nor_places(small_world: Path):
    data = load_scenes("composed", want="masks", root=small_world)
    for part, label, blocks in ((data.train, 0, {0, 1, 3, 4, 6, 7, 9, 10}), (data.test, 1, {2, 5, 8, 11})):
        for index in range(20):
            scene = part.scene(index)
            objects = scene.objects
            assert objects is not None
            assert objects.masks is not None
            assert 3 <= len(objects.labels) <= 8
            assert set(objects.labels.tolist()) == {label}
            assert (objects.masks.sum(0) <= 1).all(), "a pixel shows one item"
            assert (objects.masks.flatten(1).sum(1) > 20).all()
            # Bilinear edges of an item may be of any level between 16 and 200.
            background = scene.image[:, ~objects.masks.any(0)]
            assert {int(v) // 20 for v in background[0].unique()} <= blocks
            inside = scene.image[:, objects.masks.any(0)]
            assert (inside[0] == inside[1]).all()
            assert int(inside.min()) >= 16


def test_boxes_of_composed_scenes_are_those_of_their_masks(small_world: Path):
    masks, boxes = (load_scenes("composed:96", want=want, root=small_world) for want in ("masks", "boxes"))
    one, other = (ObjectSamples(d.test).read(torch.tensor([3]), 0)["targets"][0] for d in (masks, boxes))
    assert torch.equal(one["boxes"], other["boxes"])
    assert "masks" not in other


def cached(name: str) -> None:
    if not all(stored_path(stored).exists() for stored in DATA_SETS[name].stored):
        pytest.skip(f"{name} is not in the cache; tokenmix data get {name}")


def test_the_real_map():
    cached("blue-marble")
    data = load_scenes("blue-marble:64", want="classes")
    assert (len(data.train), len(data.test)) == (1128, 439)
    labels = torch.cat([c.flatten() for i in range(439) if (c := data.test.scene(i).classes) is not None])
    assert set(labels.unique().tolist()) == set(range(7))


def test_the_real_trees():
    cached("trees")
    data = load_scenes("trees", want="boxes")
    assert list(data.notes["boxes"].values()) == [574, 279, 61, 37]
    assert (len(data.train), len(data.test)) == (64, 11)
    counts = [len(o.labels) for i in range(11) if (o := data.test.scene(i).objects) is not None]
    assert counts[-2:] == [61, 37]
    assert 260 <= sum(counts[:-2]) <= 279, "side by side, no tree counts twice"
    for i in range(64):
        objects = data.train.scene(i).objects
        assert objects is not None
        assert (objects.boxes >= 0).all()
        assert (objects.boxes <= 400).all()


def test_the_real_nuclei():
    cached("nuclei")
    data = load_scenes("nuclei", want="masks")
    for part in (data.train, data.test):
        assert len(part) == 8
        objects = part.scene(0).objects
        assert objects is not None
        assert objects.masks is not None
        assert objects.masks.flatten(1).any(1).all()
