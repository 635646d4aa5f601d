"""Order, resuming, ranks and workers of the loader."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.lab.data.images import InMemoryImages, load_images, normalize
from tokenmix.lab.data.indexed import EpochLoader, make_loader


def image_set(count: int, size: int = 8) -> InMemoryImages:
    pixels = torch.randint(
        0, 256, (count, 1, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return InMemoryImages(pixels, torch.arange(count) % 7, flip=True, fill=0)


def loader(count: int = 50, epoch: int = 0, **options: Any) -> EpochLoader:
    augment, seed = options.pop("augment", "light"), options.pop("seed", 0)
    samples = image_set(count).prepared(mean=(0.4,), std=(0.2,), augment=augment, seed=seed)
    made = make_loader(samples, **{"batch_size": 8, "shuffle": True, "seed": seed, **options})
    made.set_epoch(epoch)
    return made


def order(made: EpochLoader) -> list[int]:
    return torch.cat([batch["index"] for batch in made]).tolist()


def same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    return len(a) == len(b) and all(torch.equal(x[key], y[key]) for x, y in zip(a, b) for key in x)


def test_batches_hold_what_they_say():
    images = image_set(50)
    for batch in loader(augment="none"):
        assert batch["image"].dtype == torch.float32
        assert torch.equal(batch["label"], images.labels[batch["index"]])
        torch.testing.assert_close(batch["image"], (images.images[batch["index"]] / 255 - 0.4) / 0.2)


def test_order_is_a_permutation_that_seed_and_epoch_fix():
    first = order(loader(epoch=3))
    assert sorted(first) == list(range(50))
    assert first == order(loader(epoch=3))
    assert first != order(loader(epoch=4))
    assert first != order(loader(epoch=3, seed=1))
    assert order(loader(shuffle=False)) == list(range(50))


def test_later_epochs_do_not_depend_on_earlier_ones():
    walked = loader()
    for epoch in range(3):
        walked.set_epoch(epoch)
        batches = list(walked)
    assert same(batches, list(loader(epoch=2)))


def test_lengths_and_drop_last():
    assert len(loader()) == 7
    assert len(list(loader())) == 7
    assert len(loader(drop_last=True)) == len(list(loader(drop_last=True))) == 6


@pytest.mark.parametrize("start", [0, 3, 7])
def test_resuming_gives_the_rest_of_the_epoch(start: int):
    resumed = loader(start_batch=start, epoch=1)
    assert len(resumed) == 7
    assert same(list(resumed), list(loader(epoch=1))[start:])
    resumed.set_epoch(2)
    assert same(list(resumed), list(loader(epoch=2)))


def test_resuming_reads_nothing_of_what_was_seen():
    seen = []

    class Watched(InMemoryImages):
        def pixels(self, indices: Tensor) -> tuple[Tensor, Tensor]:
            seen.extend(indices.tolist())
            return super().pixels(indices)

    whole = image_set(50)
    watched = Watched(whole.images, whole.labels, flip=True, fill=0)
    samples = watched.prepared(mean=(0,), std=(1,))
    rest = make_loader(samples, batch_size=8, shuffle=True, seed=0, start_batch=5)
    assert sum(len(batch["index"]) for batch in rest) == 10
    assert len(seen) == 10


@pytest.mark.parametrize("augment", ["light", "rand-m9-mstd0.5-inc1"])
def test_workers_change_nothing(augment: str):
    alone, helped = (loader(augment=augment, workers=workers) for workers in (0, 2))
    for epoch in range(2):
        alone.set_epoch(epoch)
        helped.set_epoch(epoch)
        assert same(list(alone), list(helped))


@pytest.mark.parametrize("sent", [torch.uint8, torch.float32])
def test_bytes_are_sent_but_to_page_locked_memory(sent: torch.dtype):
    """Bytes take a quarter of the shared memory. Page-locked floats are copied to a GPU in the background."""
    samples = image_set(50).prepared(mean=(0.4,), std=(0.2,)).chosen(torch.arange(32))
    made = make_loader(samples, batch_size=8, shuffle=False, seed=0, pin_memory=sent == torch.float32)
    keys = list(iter(made.sampler))
    read = [made.dataset[key]["image"] for key in keys]
    assert {images.dtype for images in read} == {sent}
    finished = read if sent == torch.float32 else [normalize(images, (0.4,), (0.2,)) for images in read]
    assert torch.equal(torch.cat(finished), torch.cat([batch["image"] for batch in made]))


def test_batch_size_changes_no_image():
    def by_index(batch_size: int) -> dict[int, Tensor]:
        batches = loader(batch_size=batch_size)
        return {int(i): image for batch in batches for i, image in zip(batch["index"], batch["image"])}

    small, large = by_index(3), by_index(20)
    assert all(torch.equal(small[i], large[i]) for i in range(50))


@settings(max_examples=25, deadline=None)
@given(count=st.integers(5, 60), world=st.integers(1, 4), drop_last=st.booleans())
def test_ranks_share_each_global_batch(count: int, world: int, drop_last: bool):
    ranks = [loader(count, batch_size=1, rank=r, world_size=world, drop_last=drop_last) for r in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    merged = [i for step in zip(*(order(rank) for rank in ranks)) for i in step]
    assert merged[:count] == order(loader(count, batch_size=world))
    evaluated = [order(loader(count, shuffle=False, rank=r, world_size=world)) for r in range(world)]
    assert sorted(i for indices in evaluated for i in indices) == list(range(count))


def test_no_draw_from_the_global_random_state():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    list(loader())
    assert torch.equal(torch.rand(1), expected)


def test_normalize_leaves_its_input_alone():
    pixels = image_set(4).images
    before = pixels.clone()
    out = normalize(pixels, (0.5,), (0.25,))
    torch.testing.assert_close(out, (before / 255 - 0.5) / 0.25)
    assert torch.equal(pixels, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 51, "drop_last": True}, "at most 50"),
    ],
)
def test_impossible_batches(options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        loader(**options)


def test_lightning_sets_the_epoch():
    from lightning.fabric.utilities.data import _set_sampler_epoch

    made = loader()
    _set_sampler_epoch(made, 4)
    assert order(made) == order(loader(epoch=4))


def test_digits_are_never_mirrored():
    data = load_images("digits")
    samples = data.train.prepared(augment="light", mean=(0,), std=(1 / 255,))
    made = make_loader(samples, batch_size=64, shuffle=False, seed=0)
    batch = next(iter(made))
    for image, original in zip(batch["image"].round().byte(), data.train.pixels(batch["index"])[0]):
        padded = torch.nn.functional.pad(original, (1, 1, 1, 1))
        windows = [padded[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
        assert any(torch.equal(image, window) for window in windows)
