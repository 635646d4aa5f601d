"""Augmentation of scenes and batches of them: image, classes, boxes and masks stay together."""

import pickle
import random

import numpy as np
import pytest
import torch
from torchvision.ops import masks_to_boxes

from tokenmix.errors import UserError
from tokenmix.lab.data.indexed import make_loader
from tokenmix.lab.data.scenes import (
    Objects,
    ObjectSamples,
    PixelSamples,
    Scene,
    SceneAugment,
    SceneData,
    Scenes,
    objects_of,
)


class Listed(Scenes):
    """Scenes in memory."""

    def __init__(self, *scenes: Scene) -> None:
        self.scenes = scenes

    def __len__(self) -> int:
        return len(self.scenes)

    def scene(self, index: int) -> Scene:
        return self.scenes[index]


def pixels(seed: int, height: int = 20, width: int = 30) -> Scene:
    """Random classes; the image's three channels are ten times the class, so that each can be told from the other."""
    classes = torch.randint(5, (height, width), generator=torch.Generator().manual_seed(seed))
    return Scene((10 * classes).byte().expand(3, -1, -1).contiguous(), f"scene {seed}", classes=classes)


def set_of(*scenes: Scene) -> SceneData:
    part = Listed(*scenes)
    zero, one = (0.0,) * 3, (1.0,) * 3
    return SceneData(
        spec="none",
        train=part,
        test=part,
        classes=list("abcde"),
        palette=[(0, 0, 0)] * 5,
        mean=zero,
        std=one,
        source="made here",
    )


def items() -> Objects:
    masks = torch.zeros(3, 20, 30, dtype=torch.bool)
    masks[0, 2:8, 3:9] = True
    masks[1, 10:20, 25:30] = True
    masks[2, 0:2, 28:30] = True
    return objects_of([4, 0, 2], masks=masks)


class Damaged(Listed):
    """Scenes of which some cannot be read."""

    def __init__(self, *scenes: Scene, bad: tuple[int, ...]) -> None:
        super().__init__(*scenes)
        self.bad = bad

    def scene(self, index: int) -> Scene:
        if index in self.bad:
            raise UserError(f"{self.scenes[index].name} is truncated")
        return super().scene(index)


def test_a_scene_that_cannot_be_read_is_left_out_counted_and_named(capsys: pytest.CaptureFixture[str]):
    scenes = [pixels(seed) for seed in range(12)]
    data = set_of(*scenes)
    samples = PixelSamples(data, Damaged(*scenes, bad=(1, 3)))
    for _ in range(2):
        batch = samples.read(torch.tensor([0, 1, 2, 3]), 0)
        assert batch["index"].tolist() == [0, 2]
        assert batch["image"].shape == (2, 3, 20, 30)
    # Of a batch of one the next stands in, and counts for nothing.
    assert samples.read(torch.tensor([3]), 0)["index"].tolist() == [-1]
    said = capsys.readouterr().err
    assert said.count("left out") == 2
    assert "scene 3 is truncated (2 so far)" in said
    # After ten in a row the first reason is reported.
    samples = PixelSamples(data, Damaged(*scenes, bad=tuple(range(12))))
    with pytest.raises(UserError, match="scene 5 is truncated"):
        samples.read(torch.tensor([5]), 0)


def test_image_and_classes_stay_together():
    scenes = [pixels(seed) for seed in range(6)]
    data = set_of(*scenes)
    augment = SceneAugment(seed=3, crop=(16, 24), ignore=255, scales=(1.0, 1.0), flip=0.5, fill=(1.0,) * 3)
    batch = PixelSamples(data, data.train, augment).read(torch.arange(6), epoch=2)
    assert batch["image"].shape == (6, 3, 16, 24)
    assert batch["image"].dtype == torch.float32
    assert batch["classes"].shape == (6, 16, 24)
    assert batch["classes"].dtype == torch.int64
    assert torch.equal((batch["image"][:, 0] * 255 / 10).round().long(), batch["classes"])
    unchanged = [torch.equal(b, s.classes[:16, :24]) for b, s in zip(batch["classes"], scenes) if s.classes is not None]
    assert not all(unchanged)


def test_what_is_padded_is_ignored_and_of_the_fill():
    data = set_of(pixels(0, 8, 8))
    augment = SceneAugment(seed=0, crop=(16, 12), ignore=255, scales=(0.5,), flip=0.0, fill=(1.0, 1.0, 1.0))
    batch = PixelSamples(data, data.train, augment).read(torch.tensor([0]), epoch=0)
    ignored = batch["classes"] == 255
    assert int((~ignored).sum()) == 4 * 4
    assert (batch["image"][:, 0][ignored] == 1).all()
    assert (batch["image"][:, 0][~ignored] < 0.2).all()


def test_batches_are_a_function_of_seed_epoch_and_index():
    data = set_of(*(pixels(seed) for seed in range(5)))
    augment = SceneAugment(seed=1, crop=(8, 8), ignore=255, scales=(0.5, 0.75, 1.25, 2.0), color_jitter=0.3)
    samples = PixelSamples(data, data.train, augment)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # type: ignore[union-attr]
    first = samples.read(torch.arange(5), epoch=4)
    assert states[0] == random.getstate()
    assert np.array_equal(states[1], np.random.get_state()[1])  # type: ignore[arg-type]
    assert torch.equal(states[2], torch.get_rng_state())
    backwards = samples.read(torch.tensor([4, 2]), epoch=4)
    assert torch.equal(backwards["image"], first["image"][[4, 2]])
    assert torch.equal(pickle.loads(pickle.dumps(samples)).read(torch.arange(5), 4)["image"], first["image"])
    assert not torch.equal(samples.read(torch.arange(5), epoch=5)["image"], first["image"])
    other = SceneAugment(seed=2, crop=(8, 8), ignore=255, scales=(0.5, 0.75, 1.25, 2.0), color_jitter=0.3)
    assert not torch.equal(PixelSamples(data, data.train, other).read(torch.arange(5), 4)["image"], first["image"])


def test_a_loader_reads_scenes():
    data = set_of(*(pixels(seed) for seed in range(5)))
    samples = PixelSamples(data, data.train, SceneAugment(seed=1, crop=(8, 8), ignore=255))
    batches = list(make_loader(samples, batch_size=2, shuffle=True, seed=0))
    assert sorted(torch.cat([b["index"] for b in batches]).tolist()) == [0, 1, 2, 3, 4]


def test_whole_images_of_several_sizes_are_padded_below_and_on_the_right():
    small, large = pixels(0, 8, 8), pixels(1, 10, 6)
    batch = PixelSamples(set_of(small, large), Listed(small, large)).read(torch.arange(2), epoch=0)
    assert batch["classes"].shape == (2, 10, 8)
    assert small.classes is not None
    assert torch.equal(batch["classes"][0, :8], small.classes)
    assert (batch["classes"][0, 8:] == 255).all()
    assert (batch["classes"][1, :, 6:] == 255).all()


def test_boxes_follow_their_masks():
    scene = Scene(torch.zeros(3, 20, 30, dtype=torch.uint8), "items", objects=items(), key=77)
    augment = SceneAugment(seed=0, crop=(20, 24), scales=(0.7, 1.0, 1.4), flip=0.5, min_size=2)
    sizes = set()
    for epoch in range(20):
        batch = ObjectSamples(Listed(scene), augment).read(torch.tensor([0]), epoch)
        target = batch["targets"][0]
        assert batch["images"][0].shape == (3, 20, 24)
        assert batch["images"][0].dtype == torch.float32
        assert target["image_id"] == 77
        count = len(target["labels"])
        assert target["masks"].shape == (count, 20, 24)
        assert target["masks"].dtype == torch.bool
        assert torch.equal(target["area"], target["masks"].flatten(1).sum(1).float())
        tight = masks_to_boxes(target["masks"]) + torch.tensor([0, 0, 1, 1])
        assert torch.equal(target["boxes"], tight.reshape(-1, 4))
        assert ((target["boxes"][:, 2:] - target["boxes"][:, :2]) >= 2).all()
        sizes.add(count)
    assert len(sizes) > 1, "no crop ever cut an object off"


def test_flip_moves_boxes_and_masks():
    scene = Scene(torch.zeros(3, 20, 30, dtype=torch.uint8), "items", objects=items())
    target = ObjectSamples(Listed(scene), SceneAugment(seed=0, flip=1.0)).read(torch.tensor([0]), 0)["targets"][0]
    assert target["boxes"][0].tolist() == [21, 2, 27, 8]
    assert target["labels"].tolist() == [4, 0, 2]
    only_boxes = Objects(items().boxes, items().labels, None, items().crowd)
    scene = Scene(scene.image, "items", objects=only_boxes)
    target = ObjectSamples(Listed(scene), SceneAugment(seed=0, flip=1.0)).read(torch.tensor([0]), 0)["targets"][0]
    assert target["boxes"][0].tolist() == [21, 2, 27, 8]
    assert target["area"].tolist() == [36, 50, 4]
    assert "masks" not in target


def test_boxes_of_no_area_are_dropped_and_crowds_are_not_learnt():
    boxes = torch.tensor([[1.0, 1, 5, 5], [3, 3, 3, 9], [2, 2, 9, 9]])
    scene = Scene(
        torch.zeros(3, 10, 10).byte(), "x", objects=objects_of([0, 1, 2], boxes=boxes, crowd=[False, False, True])
    )
    tested = ObjectSamples(Listed(scene)).read(torch.tensor([0]), 0)["targets"][0]
    assert tested["labels"].tolist() == [0, 2]
    assert tested["iscrowd"].tolist() == [False, True]
    learnt = ObjectSamples(Listed(scene), SceneAugment(seed=0)).read(torch.tensor([0]), 0)["targets"][0]
    assert learnt["labels"].tolist() == [0]


@pytest.mark.parametrize("size", [None, (10, 12)])
def test_an_image_without_objects_is_background(size: tuple[int, int] | None):
    masks = None if size is None else torch.empty((0, *size), dtype=torch.bool)
    none = objects_of([], boxes=torch.empty(0, 4), masks=masks)
    scene = Scene(torch.zeros(3, 10, 12).byte(), "sea", objects=none)
    for augment in (None, SceneAugment(seed=0, crop=(8, 8), scales=(0.5, 2.0))):
        target = ObjectSamples(Listed(scene), augment).read(torch.tensor([0]), 0)["targets"][0]
        assert target["boxes"].shape == (0, 4)
        assert target["labels"].dtype == torch.int64
        assert ("masks" in target) == (size is not None)


def test_scenes_without_what_is_asked_for():
    data = set_of(Scene(torch.zeros(3, 4, 4).byte(), "bare"))
    with pytest.raises(UserError, match="bare has no classes"):
        PixelSamples(data, data.train).read(torch.tensor([0]), 0)
    with pytest.raises(UserError, match="bare has no objects"):
        ObjectSamples(data.train).read(torch.tensor([0]), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crop": None, "scales": (0.5, 1.0)}, "without a crop"),
        ({"scales": ()}, "no scales"),
    ],
)
def test_settings_that_are_not_possible(change: dict, message: str):
    def made() -> None:
        PixelSamples(set_of(pixels(0)), Listed(), SceneAugment(**{"seed": 0, "crop": (8, 8), **change}))

    with pytest.raises(UserError, match=message):
        made()
