"""Augmentation: what it does to one image, and that it depends on (seed, epoch, index) alone."""

import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.lab.data.images import make_augment
from tokenmix.lab.data.images.augment import shift_and_flip
from tokenmix.lab.data.indexed import hash_indices

RAND = "rand-m9-mstd0.5-inc1"


def images(count: int, channels: int = 3, size: int = 16) -> Tensor:
    return torch.randint(
        0, 256, (count, channels, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def plain_shift(image: Tensor, down: int, right: int, flip: bool, fill: int | None) -> Tensor:
    height, width = image.shape[-2:]
    if flip:
        image = image.flip(-1)
    out = torch.empty_like(image)
    for y in range(height):
        for x in range(width):
            a, b = y - down, x - right
            inside = 0 <= a < height and 0 <= b < width
            if inside or fill is None:
                out[:, y, x] = image[:, min(max(a, 0), height - 1), min(max(b, 0), width - 1)]
            else:
                out[:, y, x] = fill
    return out


@settings(max_examples=30, deadline=None)
@given(
    moves=st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.booleans()), min_size=1, max_size=4),
    channels=st.sampled_from([1, 3]),
    fill=st.sampled_from([0, 200, None]),
)
def test_shift_equals_a_plain_loop(moves: list[tuple[int, int, bool]], channels: int, fill: int | None):
    batch = images(len(moves), channels, 7)[..., :6]
    before = batch.clone()
    down, right, flips = (torch.tensor(values) for values in zip(*moves))
    out = shift_and_flip(batch, down, right, flips, fill)
    for image, changed, move in zip(batch, out, moves):
        assert torch.equal(changed, plain_shift(image, *move, fill))
    assert torch.equal(batch, before)


def test_hash_is_even_and_separates_its_arguments():
    indices = torch.arange(20_000)
    bits = hash_indices(0, 0, indices)
    assert len(np.unique(bits)) == len(bits)
    share = ((bits[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).mean(0)
    assert np.abs(share - 0.5).max() < 0.02
    for other in (hash_indices(1, 0, indices), hash_indices(0, 1, indices)):
        assert not np.isin(bits, other).any()
        assert abs(np.corrcoef(bits.astype(float), other.astype(float))[0, 1]) < 0.03


@pytest.mark.parametrize("name", ["light", RAND])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_comes_out_the_same_in_any_batch(name: str, channels: int):
    batch, indices = images(12, channels), torch.arange(100, 112)
    augment = make_augment(name, seed=3, flip=True, fill=0)
    whole = augment(batch, 5, indices)
    assert whole.shape == batch.shape
    assert whole.dtype == torch.uint8
    order = torch.tensor([7, 2, 9])
    assert torch.equal(augment(batch[order], 5, indices[order]), whole[order])
    again = pickle.loads(pickle.dumps(augment))
    assert torch.equal(again(batch, 5, indices), whole)


@pytest.mark.parametrize("name", ["light", RAND])
def test_seed_epoch_and_index_each_change_it(name: str):
    batch, indices = images(8), torch.arange(8)
    first = make_augment(name, seed=0, flip=True, fill=0)(batch, 0, indices)
    for seed, epoch, shift in ((1, 0, 0), (0, 1, 0), (0, 0, 8)):
        other = make_augment(name, seed=seed, flip=True, fill=0)(batch, epoch, indices + shift)
        assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ["none", "light", RAND])
def test_global_random_states_are_left_alone(name: str):
    augment = make_augment(name, seed=0, flip=True, fill=None)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    augment(images(4), 0, torch.arange(4))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_light_reaches_an_eighth_and_no_further():
    point = torch.zeros(500, 1, 16, 16, dtype=torch.uint8)
    point[:, :, 8, 8] = 255
    out = make_augment("light", seed=0, flip=False, fill=0)(point, 0, torch.arange(500))
    places = torch.nonzero(out)[:, 2:]
    assert len(places) == 500
    assert places.unique(dim=0).shape[0] == 25
    assert (places.min(), places.max()) == (6, 10)


def test_flip_only_where_it_is_allowed():
    ramp = torch.arange(16, dtype=torch.uint8).expand(400, 1, 16, 16)
    for flip, share in ((False, 0.0), (True, 0.5)):
        out = make_augment("light", seed=0, flip=flip, fill=None)(ramp, 0, torch.arange(400))
        mirrored = (out[:, 0, 0, 0] > out[:, 0, 0, -1]).float().mean().item()
        assert mirrored == pytest.approx(share, abs=0.08 if flip else 0)


def test_none_changes_nothing():
    batch = images(3)
    assert torch.equal(make_augment("none", seed=0, flip=True, fill=0)(batch, 0, torch.arange(3)), batch)


@pytest.mark.parametrize(
    "name", [RAND, "rand-m10-n4-p1-inc1", "augmix-m5-w2-d2", "original", "v0", "3a", "rand-tweights"]
)
def test_timm_policies_run_at_their_strongest(name: str):
    out = make_augment(name, seed=0, flip=True, fill=None)(images(40, size=12), 0, torch.arange(40))
    assert out.shape == (40, 3, 12, 12)


@pytest.mark.parametrize("name", ["", "lite", "rand-zzz", "rand-m9-q3", "v0-x9", "rand-m"])
def test_unknown_names_are_refused(name: str):
    with pytest.raises(UserError, match=RAND):
        make_augment(name, seed=0, flip=True, fill=0)
