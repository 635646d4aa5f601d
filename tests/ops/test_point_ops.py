"""Sampling and neighbours against plain loops; order, padding and chunks change nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.ops.points import farthest_points, gather_points, group_points, nearest_neighbours, sort_points


def cloud(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grid() -> Tensor:
    """27 points of a cube: many are equally far from each other."""
    axis = torch.arange(3.0)
    return torch.cartesian_prod(axis, axis, axis)[None]


def plain_farthest(points: Tensor, count: int) -> list[int]:
    rows = points.double().tolist()
    middle = [sum(column) / len(rows) for column in zip(*rows)]

    def far(one: list[float], other: list[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(one, other))

    chosen = [max(range(len(rows)), key=lambda i: far(rows[i], middle))]
    while len(chosen) < count:
        chosen.append(max(range(len(rows)), key=lambda i: min(far(rows[i], rows[c]) for c in chosen)))
    return chosen


def test_farthest_points_are_those_of_a_plain_loop() -> None:
    points = cloud(2, 40, 3)
    found = farthest_points(points, 12)
    assert found.indices.tolist() == [plain_farthest(one, 12) for one in points]
    assert found.mask.all()


@pytest.mark.parametrize("points", [cloud(1, 60, 3), grid()], ids=["random", "grid"])
def test_order_does_not_decide(points: Tensor) -> None:
    expected = gather_points(points, farthest_points(points, 9).indices)
    for seed in range(4):
        order = torch.randperm(points.shape[1], generator=torch.Generator().manual_seed(seed))
        other = points[:, order]
        assert torch.equal(gather_points(other, farthest_points(other, 9).indices), expected)
        assert torch.equal(gather_points(other, sort_points(other)), gather_points(points, sort_points(points)))


@pytest.mark.parametrize("points", [cloud(1, 30, 3), grid()], ids=["random", "grid"])
def test_padding_does_not_decide(points: Tensor) -> None:
    kept = points.shape[1]
    padded = torch.cat([points, torch.full((1, 11, 3), torch.nan)], 1)
    mask = (torch.arange(kept + 11) < kept)[None]
    assert torch.equal(farthest_points(padded, 8, mask=mask).indices, farthest_points(points, 8).indices)
    clean = padded.nan_to_num(0.0)
    expected = nearest_neighbours(points, points, 6)
    assert torch.equal(nearest_neighbours(points, clean, 6, mask=mask), expected)


def test_a_prefix_of_a_sample_is_a_sample() -> None:
    points = cloud(2, 50, 3)
    assert torch.equal(farthest_points(points, 20).indices[:, :7], farthest_points(points, 7).indices)


def test_fewer_points_than_centres_are_masked_out() -> None:
    three = cloud(1, 3, 3)
    found = farthest_points(three.repeat(1, 4, 1), 5)
    assert found.mask.tolist() == [[True, True, True, False, False]]
    assert len({*map(tuple, gather_points(three.repeat(1, 4, 1), found.indices)[0, :3].tolist())}) == 3
    none = farthest_points(three, 2, mask=torch.zeros(1, 3, dtype=torch.bool))
    assert not none.mask.any()


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 5))
def test_nearest_neighbours_are_those_of_a_sort(places: int, count: int, chunk: int) -> None:
    points, queries = cloud(2, places, 3, seed=places), cloud(2, 4, 3, seed=99)
    found = nearest_neighbours(queries, points, count, chunk_size=chunk)
    expected = torch.cdist(queries.double(), points.double()).argsort(-1)[..., :count]
    assert torch.equal(found[..., :places], expected)
    assert (found[..., places:] == found[..., :1]).all()


def test_of_equally_near_points_the_first_are_taken() -> None:
    points = torch.zeros(1, 6, 3)
    assert nearest_neighbours(points[:, :1], points, 4).tolist() == [[[0, 1, 2, 3]]]


def test_masked_points_are_no_neighbours() -> None:
    points, mask = cloud(1, 5, 3), torch.tensor([[False, True, False, True, False]])
    found = nearest_neighbours(points, points, 4, mask=mask)
    assert set(found.flatten().tolist()) == {1, 3}
    assert torch.equal(found[..., 2:], found[..., :1].expand(-1, -1, 2))


def test_groups_are_differences_and_centres() -> None:
    values, centres = cloud(2, 7, 4), torch.tensor([[0, 6], [3, 3]])
    near = torch.tensor([[[0, 1], [2, 6]], [[4, 5], [3, 0]]])
    grouped = group_points(values, centres, near)
    assert grouped.shape == (2, 2, 2, 8)
    assert torch.equal(grouped[1, 0, 1], torch.cat([values[1, 5] - values[1, 3], values[1, 3]]))


def test_gathering_hands_gradients_back() -> None:
    values = cloud(2, 4, 3).double().requires_grad_()
    index = torch.tensor([[[0, 1], [1, 1]], [[3, 0], [2, 2]]])
    assert torch.autograd.gradcheck(lambda v: gather_points(v, index), values)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p: farthest_points(p, 0), "count must be at least 1, got 0"),
        (lambda p: farthest_points(p[..., :2], 1), "coordinates come first"),
        (lambda p: farthest_points(p, 1, mask=torch.ones(1, 4)), "mask must be bool"),
        (lambda p: nearest_neighbours(p, p, 0), "count must be at least 1, got 0"),
        (lambda p: nearest_neighbours(p, p[:, :0], 1), "without points"),
        (lambda p: farthest_points(p[:, :0], 1), "without points"),
    ],
)
def test_mistakes_are_told(call, said: str) -> None:
    with pytest.raises(UserError, match=said):
        call(cloud(1, 4, 3))


def test_far_points_in_half_precision_have_neighbours() -> None:
    points = torch.tensor([[[0.0, 0, 0], [300, 0, 0], [400, 0, 0], [900, 0, 0]]])
    found = nearest_neighbours(points.half(), points.half(), 3)
    assert torch.equal(found, nearest_neighbours(points, points, 3))
