"""What is held out for validation is a function of labels and number alone, and is never trained on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenmix.errors import UserError
from tokenmix.lab.data.images import load_images
from tokenmix.lab.data.indexed import choose, hold_out, validation_size
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.sources import make_config


@given(st.lists(st.integers(0, 3), min_size=2, max_size=200), st.data())
def test_two_parts_that_are_the_whole(labels: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(labels) - 1))
    kept, held = hold_out(torch.tensor(labels), size)
    assert len(held) == size
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(len(labels)))


def test_the_classes_keep_their_shares_and_a_larger_part_contains_a_smaller() -> None:
    labels = torch.arange(300) % 3
    small, large = hold_out(labels, 30)[1], hold_out(labels, 90)[1]
    assert torch.bincount(labels[small]).tolist() == [10, 10, 10]
    assert set(small.tolist()) < set(large.tolist())


@given(st.lists(st.integers(0, 5), min_size=2, max_size=100), st.data())
def test_groups_stay_together(groups: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(groups) - 1))
    kept, held = hold_out(torch.zeros(len(groups)), size, groups=torch.tensor(groups))
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(len(groups)))
    here, there = ({groups[i] for i in part.tolist()} for part in (kept, held))
    assert here
    assert not here & there
    most = max(map(groups.count, groups))
    assert len(held) < size + most
    assert len(held) >= size or len(here) == 1


def test_a_tenth_of_what_is_used() -> None:
    assert [validation_size(*counts) for counts in ((99, None), (60_000, None), (60_000, None, 1200))] == [0, 6000, 120]
    assert validation_size(1_281_167, None) == 10_000
    assert validation_size(100, 7, 20) == 7
    for count, most in ((100, 10), (4, 3), (1, 0)):
        said = rf"--validation {count} leaves none of the {count} samples to train on; give a number in \[0, {most}\]"
        with pytest.raises(UserError, match=said):
            validation_size(count, count)


def test_images_are_in_one_part_and_the_limit_is_of_the_others() -> None:
    whole = load_images("digits")
    one, other = (load_images("digits", limit=500, validation=None, seed=seed) for seed in (0, 1))
    assert one.validation is not None
    assert other.validation is not None
    assert (len(one.train), len(one.validation), len(one.test)) == (500, 50, len(whole.test))
    assert one.describe()["counts"].keys() == {"train", "validation", "test"}
    held, again = (part.pixels(torch.arange(50))[0] for part in (one.validation, other.validation))
    assert torch.equal(held, again), "no seed changes what is held out"
    rest = load_images("digits", validation=50)
    assert len(rest.train) == len(whole.train) - 50
    seen = {image.numpy().tobytes() for image in rest.train.pixels(torch.arange(len(rest.train)))[0]}
    # Some scans of the set are equal.
    assert sum(image.numpy().tobytes() in seen for image in held) <= 1


def test_validation_is_read_without_augmentation() -> None:
    config = make_config(data="digits", augment="light", validation=100)
    data = get_task(config.task).load_data(config)
    first, second = (next(iter(data.validation_batches(batch_size=100)))["image"] for _ in range(2))
    assert torch.equal(first, second)
    plain = load_images("digits", validation=100)
    assert plain.validation is not None
    expected = plain.validation.pixels(torch.arange(100))[0].float() / 255
    torch.testing.assert_close(first * plain.std[0] + plain.mean[0], expected)


def test_choose_refuses_none() -> None:
    with pytest.raises(UserError, match="a limit of 0 leaves no images"):
        choose(torch.zeros(3), 0, 0)
