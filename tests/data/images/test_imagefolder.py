"""Photographs in ImageNet's layout: the layout, what training and testing see of a photograph, and what is wrong."""

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from timm.data.transforms_factory import transforms_imagenet_eval

from tokenmix.errors import UserError
from tokenmix.lab.data.images import ImageData, load_images, read_image
from tokenmix.lab.data.images.augment import Erase
from tokenmix.lab.data.images.image_set import RANDOM_CROP, LazyImages
from tokenmix.lab.data.indexed import hash_indices, make_loader


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    """A smooth picture (width, height), so that JPEG keeps it."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    return coarse.resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """12 + 6 photographs of different sizes in three classes."""
    for part, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(("n01", "n02", "n03")):
            for i in range(count):
                path = tmp_path / "set" / part / name / f"{name}_{i}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                picture(100 * label + i, (40 + 7 * i, 60 - 5 * i)).save(path, quality=95)
    return tmp_path / "set"


def load(folder: Path, **options: Any) -> ImageData:
    return load_images(f"imagefolder:{folder}", **{"img_size": 24, **options})


def batches(data: ImageData, **options: Any) -> list[dict[str, torch.Tensor]]:
    chosen = {"augment": "light", "seed": 0, **options}
    order = {key: chosen.pop(key) for key in ("batch_size", "shuffle", "workers") if key in chosen}
    samples = data.train.prepared(mean=data.mean, std=data.std, **chosen)
    loader = make_loader(samples, **{"batch_size": 4, "shuffle": True, "seed": chosen["seed"], **order})
    loader.set_epoch(1)
    return list(loader)


def by_index(made: list[dict[str, torch.Tensor]]) -> dict[int, torch.Tensor]:
    return {int(i): image for batch in made for i, image in zip(batch["index"], batch["image"])}


def test_layout(imagenet: Path):
    data = load(imagenet)
    assert data.classes == ["n01", "n02", "n03"]
    assert (len(data.train), len(data.test), data.img_size, data.channels) == (12, 6, (24, 24), 3)
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    described = data.describe()
    assert (described["crop_pct"], described["mean"][0]) == (0.875, 0.485)
    assert load(imagenet, img_size=None).img_size == (224, 224)
    assert load(imagenet, limit=6).train.labels.bincount().tolist() == [2, 2, 2]
    (imagenet / "val").rename(imagenet / "validation")
    assert len(load(imagenet).test) == 6


def test_nothing_is_decoded_at_the_start(imagenet: Path, monkeypatch: pytest.MonkeyPatch):
    decoded, before = [], Image.core.new
    monkeypatch.setattr(Image.core, "new", lambda *args: decoded.append(args) or before(*args))
    load(imagenet)
    assert not decoded
    assert len(batches(load(imagenet)))
    assert decoded


def test_testing_sees_the_centre(imagenet: Path):
    """As timm: resized until the shorter side is img_size / crop_pct, and the centre of it."""
    path = imagenet / "val" / "n02" / "n02_1.png"
    path.with_suffix(".JPEG").unlink()
    picture(9, (64, 96)).save(path)
    data = load(imagenet, img_size=28)
    image, label = data.test[3]
    assert label == 1
    assert torch.equal(image, read_image(path, 3, 28, crop_pct=0.875))
    timms = transforms_imagenet_eval(28, crop_pct=0.875, interpolation="bicubic", use_prefetcher=True)
    with Image.open(path) as photograph:
        expected = np.asarray(timms(photograph))
    # Levels: one resampling in place of two roundings.
    assert np.abs(image.numpy().astype(int) - expected).max() <= 2
    assert not torch.equal(image, load(imagenet, img_size=28, crop_pct=1.0).test[3][0])


def test_training_sees_timms_random_part(imagenet: Path):
    data = load(imagenet)
    assert isinstance(data.train, LazyImages)
    indices = torch.tensor([5, 0])
    images, _ = data.train.random_crops(indices, 3, 2)
    for image, index, bits in zip(images, indices.tolist(), hash_indices(3, 2, indices, RANDOM_CROP)):
        random.seed(int(bits))
        with Image.open(data.train.source(index)) as photograph:
            expected = RandomResizedCropAndInterpolation(24, interpolation="random")(photograph)
        assert torch.equal(image, torch.from_numpy(np.array(expected)).permute(2, 0, 1))


@pytest.mark.parametrize("augment", ["light", "rand-m9-mstd0.5-inc1"])
def test_an_image_depends_on_seed_epoch_and_index_alone(imagenet: Path, augment: str):
    data = load(imagenet)
    torch.manual_seed(0)
    options = {"augment": augment, "reprob": 0.5}
    expected = by_index(batches(data, **options))
    state = torch.random.get_rng_state()
    others = [batches(data, batch_size=3, **options), batches(data, workers=2, **options)]
    assert torch.equal(torch.random.get_rng_state(), state)
    for other in map(by_index, others):
        assert all(torch.equal(image, expected[i]) for i, image in other.items())
    assert any(not torch.equal(i, expected[k]) for k, i in by_index(batches(data, seed=1, **options)).items())


def test_none_leaves_photographs_as_testing_sees_them(imagenet: Path):
    data = load(imagenet)
    for index, image in by_index(batches(data, augment="none")).items():
        shown = (data.train[index][0] / 255 - torch.tensor(data.mean).view(3, 1, 1)) / torch.tensor(data.std).view(
            3, 1, 1
        )
        torch.testing.assert_close(image, shown)


def test_colour_jitter_changes_colours_and_no_places(imagenet: Path):
    data = load(imagenet)
    plain, jittered = by_index(batches(data)), by_index(batches(data, color_jitter=0.4))
    assert all(not torch.equal(plain[i], jittered[i]) for i in plain)
    correlation = [np.corrcoef(plain[i].flatten(), jittered[i].flatten())[0, 1] for i in plain]
    assert min(correlation) > 0.5
    with pytest.raises(UserError, match=r"color_jitter=0\.4 only works with augment=light"):
        batches(data, color_jitter=0.4, augment="rand-m9")


def test_erasing_replaces_one_box_by_noise():
    images = torch.zeros(400, 3, 16, 16)
    Erase(0.25, 0)(images, 0, torch.arange(400))
    changed = images.ne(0).any(1)
    assert changed.flatten(1).any(1).float().mean().item() == pytest.approx(0.25, abs=0.06)
    for box in changed[changed.flatten(1).any(1)]:
        rows, columns = box.any(1).sum(), box.any(0).sum()
        assert box.sum() == rows * columns
        assert 0.01 * 256 < box.sum() <= 256 / 3 + 16


def test_what_breaks_is_left_out_named_and_counted(imagenet: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("n01/n01_1.JPEG", "n03/n03_0.JPEG"):
        path = imagenet / "train" / name
        path.write_bytes(path.read_bytes()[:300])
    (imagenet / "train" / "n01" / ".hidden.JPEG").touch()
    (imagenet / "train" / "n01" / "notes.txt").touch()
    data = load(imagenet)
    assert len(data.train) == 12
    for _ in range(2):
        assert sorted(by_index(batches(data, shuffle=False))) == [0, 2, 3, 4, 5, 6, 7, 9, 10, 11]
    said = capsys.readouterr().err
    assert [s.path.rpartition("/")[2] for s in data.skipped] == ["notes.txt"]
    assert "1 file of" in said
    assert said.count("left out") == 3
    assert "n03_0.JPEG is truncated" in said
    assert "(2 so far)" in said


def test_sets_travel_to_other_processes(imagenet: Path):
    part = load(imagenet, crop_pct=0.5).train.subset(torch.tensor([7, 1]))
    sent = pickle.loads(pickle.dumps(part))
    assert torch.equal(sent[0][0], part[0][0])
    assert sent.crop_pct == 0.5


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "train").rename(f / "training"), "has no folder train/"),
        (lambda f: (f / "val").rename(f / "vals"), "has no folder val/"),
        (lambda f: (f / "val" / "n02").rename(f / "val" / "n09"), "has the class 'n09'"),
        (lambda f: [p.unlink() for p in (f / "train" / "n02").iterdir()], "no images of class 'n02'"),
        (lambda f: [p.unlink() for p in f.glob("val/*/*")], "no images in .*val"),
        (lambda f: [p.rename(f / p.name) for p in [*f.glob("train/n0[12]")]], r"only one class \('n03'\)"),
    ],
)
def test_mistake_is_one_clear_line(imagenet: Path, spoil: Any, message: str):
    spoil(imagenet)
    with pytest.raises(UserError, match=message) as caught:
        load(imagenet)
    assert "\n" not in str(caught.value)


def test_crop_is_for_photographs():
    with pytest.raises(UserError, match=r"crop_pct=0\.9 is for imagefolder and wds; leave it out for 'digits'"):
        load_images("digits", crop_pct=0.9)
    with pytest.raises(UserError, match="imagefolder needs a path"):
        load_images("imagefolder:")


def test_every_format_that_is_read_is_found_by_its_ending(imagenet: Path):
    kinds = {
        "jfif": "jpeg",
        "jpe": "jpeg",
        "avif": "avif",
        "pgm": "ppm",
        "jp2": "jpeg2000",
        "TIF": "tiff",
    }
    for ending, kind in kinds.items():
        picture(1, (40, 30)).convert("L").save(imagenet / "train" / "n01" / f"more.{ending}", kind)
    (imagenet / "train" / "n01" / "more.heic").touch()
    (imagenet / "train" / "n01" / "more").touch()
    data = load(imagenet)
    assert len(data.train) == 12 + len(kinds)
    assert len(batches(data, batch_size=1, shuffle=False)) == 12 + len(kinds)
    assert sorted(s.path.rpartition("/")[2] for s in data.skipped) == ["more", "more.heic"]
    assert data.describe()["skipped"] == 2


def test_grey_photographs(imagenet: Path):
    data = load(imagenet, channels=1)
    assert (data.channels, len(data.mean), data.train[0][0].shape) == (1, 1, (1, 24, 24))
    assert batches(data)[0]["image"].shape == (4, 1, 24, 24)
    with pytest.raises(UserError, match="channels must be 1 or 3, got 2"):
        load(imagenet, channels=2)


def test_photographs_that_lose_most_of_their_pixels_are_said(imagenet: Path, capsys: pytest.CaptureFixture[str]):
    load(imagenet, img_size=32)
    assert "scaled down" not in capsys.readouterr().err
    load(imagenet, img_size=16)
    assert "px are scaled down by 2.9 to 16 x 16 px; a larger --img-size keeps more" in capsys.readouterr().err
