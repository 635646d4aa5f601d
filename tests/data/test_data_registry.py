"""Sets by name: the embedded digits always; the fetched ones where the cache has them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tokenmix.errors import UserError
from tokenmix.lab.data import fetch_data, list_data
from tokenmix.lab.data.images import ImageSet, load_images
from tokenmix.lab.data.images.image_set import resize_images
from tokenmix.lab.data.indexed import choose
from tokenmix.lab.data.lookup import stored_path
from tokenmix.lab.registry import DATA_SETS
from tokenmix.registry import load_object


def test_digits():
    data = load_images("digits")
    assert (len(data.train), len(data.test), data.channels, data.img_size) == (1437, 360, 1, (8, 8))
    assert not data.flip
    pixels = data.train.pixels(torch.arange(1437))[0].double() / 255
    assert data.mean == pytest.approx((pixels.mean().item(),))
    assert data.std == pytest.approx((pixels.std(correction=0).item(),))
    assert torch.bincount(data.test.labels).tolist() == pytest.approx([36] * 10, abs=1)
    image, label = data.train[-1]
    assert image.dtype == torch.uint8
    assert isinstance(label, int)
    with pytest.raises(IndexError):
        data.train[1437]


def test_digits_are_the_scans_of_scikit_learn():
    from sklearn.datasets import load_digits

    data, scans = load_images("digits"), load_digits()  # type: ignore[attr-defined]
    known = {
        image.tobytes(): label for image, label in zip((scans.images * 255 / 16).round().astype("uint8"), scans.target)
    }
    read = [*(data.train[i] for i in range(50)), *(data.test[i] for i in range(50))]
    assert all(known[image.numpy().tobytes()] == label for image, label in read)


def test_description_is_json_and_complete():
    described = load_images("digits").describe()
    assert json.loads(json.dumps(described)) == described
    assert described["spec"] == described["name"] == "digits"
    assert sum(described["counts"]["test"].values()) == 360
    assert "scikit-learn" in described["source"]


def test_size_and_limits():
    data = load_images("digits", img_size=12, limit=100, limit_eval=40)
    assert data.img_size == (12, 12)
    assert data.train[0][0].shape == (1, 12, 12)
    assert (len(data.train), len(data.test)) == (100, 40)
    assert torch.bincount(data.train.labels).tolist() == pytest.approx([10] * 10, abs=2)
    assert load_images("digits", img_size=(6, 10)).img_size == (6, 10)
    assert len(load_images("digits", limit=10**6).train) == 1437


def test_images_without_a_size_have_the_size_of_their_entry(monkeypatch):
    entry = replace(DATA_SETS["digits"], name="large-digits", img_size=12)
    monkeypatch.setitem(DATA_SETS._entries, entry.name, entry)
    data = load_images("large-digits")
    assert data.img_size == (12, 12)
    assert torch.equal(
        data.train.pixels(torch.arange(5))[0], load_images("digits", img_size=12).train.pixels(torch.arange(5))[0]
    )
    assert load_images("large-digits", img_size=8).img_size == (8, 8)


def test_the_seed_chooses_training_images_and_no_others():
    one, same, other = (load_images("digits", limit=50, limit_eval=50, seed=s) for s in (0, 0, 1))
    assert torch.equal(everything(one.train), everything(same.train))
    assert not torch.equal(everything(one.train), everything(other.train))
    assert torch.equal(everything(one.test), everything(other.test))


def everything(part: ImageSet) -> torch.Tensor:
    return part.pixels(torch.arange(len(part)))[0]


def test_a_larger_limit_contains_the_smaller():
    labels = torch.arange(300) % 3
    small, large = choose(labels, 30, 5), choose(labels, 90, 5)
    assert small is not None
    assert large is not None
    assert set(small.tolist()) < set(large.tolist())
    assert torch.bincount(labels[small]).tolist() == [10, 10, 10]


@pytest.mark.parametrize("limit", [0, -5])
def test_limit_without_images(limit: int):
    with pytest.raises(UserError, match="limit"):
        load_images("digits", limit=limit)


def test_resizing_in_parts_equals_resizing_at_once():
    images = torch.randint(0, 256, (1030, 1, 6, 6), dtype=torch.uint8)
    out = resize_images(images, (9, 4))
    assert out.shape == (1030, 1, 9, 4)
    assert torch.equal(out[1020:], resize_images(images[1020:], (9, 4)))
    assert resize_images(images, (6, 6)) is images


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fashion-mist", "did you mean fashion-mnist"),
        ("digits:8", "no variants"),
        ("folder", "needs a path"),
        ("folder:", "needs a path"),
        ("folder:/no/such/place", "'/no/such/place' does not exist"),
    ],
)
def test_unknown_set(spec: str, message: str):
    with pytest.raises(UserError, match=message):
        load_images(spec)


def test_folder_without_its_prefix(tmp_path: Path):
    with pytest.raises(UserError, match=f"give folder:{tmp_path}"):
        load_images(str(tmp_path))


def test_a_set_of_another_kind_says_which_have_the_kind():
    with pytest.raises(UserError, match=r"english has corpus, not images; give one of .*fashion-mnist, digits, folder"):
        load_images("english")


def test_table(tmp_path: Path):
    rows = {row.name: row for row in list_data(tmp_path)}
    assert list(rows) == DATA_SETS.names()
    assert rows["digits"].cached
    assert not rows["fashion-mnist"].cached
    assert "embedded" in fetch_data("digits")
    for entry in DATA_SETS:
        assert callable(load_object(entry.load))
        assert entry.variant != "path" or entry.about.startswith(f"{entry.name}:PATH")


def test_fashion_mnist_if_cached():
    if not stored_path("fashion-mnist").exists():
        pytest.skip("Fashion-MNIST is not in the cache; `tokenmix data get fashion-mnist` fetches it")
    data = load_images("fashion-mnist")
    assert (len(data.train), len(data.test)) == (60000, 10000)
    assert torch.bincount(data.train.labels).tolist() == [6000] * 10
    # The publisher's well-known statistics.
    assert data.mean == pytest.approx((0.2860,), abs=1e-4)
    assert data.std == pytest.approx((0.3530,), abs=1e-4)
