"""Batches of clouds: what is in them is a function of (seed, epoch, index), and padding is reported by the mask."""

import numpy as np
import pytest
import torch

from tokenmix.errors import UserError
from tokenmix.lab.data.indexed import make_loader
from tokenmix.lab.data.store import Names
from tokenmix.lab.tasks.points.clouds import (
    NO_PART,
    Cloud,
    CloudSamples,
    PackedClouds,
    choose_points,
    farthest,
    unit_ball,
)

SIZES = [40, 12, 16, 100]


def clouds(normals: bool = True, parts: bool = True) -> PackedClouds:
    """Clouds of several sizes; the part of a point is its place modulo 5, its normal the direction from the origin."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(sum(SIZES), 3, generator=generator) * 7 + 3
    return PackedClouds(
        points=points,
        ends=torch.tensor(SIZES).cumsum(0),
        labels=torch.tensor([0, 1, 1, 2]),
        names=Names.of(["a", "b", "c", "d"]),
        normals=torch.nn.functional.normalize(points, dim=1) if normals else None,
        parts=torch.cat([torch.arange(size) % 5 for size in SIZES]) if parts else None,
    )


ALL = torch.arange(4)


def test_a_batch_is_centred_scaled_padded_and_masked():
    batch = CloudSamples(clouds(), want="parts", num_points=16).read(ALL, 0)
    assert {k: (tuple(v.shape), v.dtype) for k, v in batch.items()} == {
        "points": ((4, 16, 3), torch.float32),
        "mask": ((4, 16), torch.bool),
        "label": ((4,), torch.int64),
        "index": ((4,), torch.int64),
        "part": ((4, 16), torch.int64),
    }
    assert batch["mask"].sum(1).tolist() == [16, 12, 16, 16]
    assert batch["label"].tolist() == [0, 1, 1, 2]
    # Clouds that are taken whole show it exactly.
    for row in (1, 2):
        points = batch["points"][row][batch["mask"][row]]
        torch.testing.assert_close(points.mean(0), torch.zeros(3), atol=1e-6, rtol=0)
        torch.testing.assert_close(points.norm(dim=1).max(), torch.tensor(1.0))
    assert (batch["points"][~batch["mask"]] == 0).all()
    assert (batch["part"][~batch["mask"]] == NO_PART).all()
    assert batch["part"][1, :12].tolist() == [i % 5 for i in range(12)]


def test_normals_ride_along():
    batch = CloudSamples(clouds(), features="xyz+normals", num_points=10).read(ALL, 0)
    assert batch["points"].shape == (4, 10, 6)
    assert "part" not in batch
    torch.testing.assert_close(batch["points"][..., 3:].norm(dim=-1), torch.ones(4, 10))


TRAINING = {"choice": "random", "scale": 1.5, "shift": 0.2, "point_dropout": 0.8}


def test_augmentation_is_a_function_of_seed_epoch_and_index():
    def read(seed: int, epoch: int, indices: list[int]) -> torch.Tensor:
        samples = CloudSamples(clouds(), num_points=16, seed=seed, **TRAINING)
        return samples.read(torch.tensor(indices), epoch)["points"]

    torch.manual_seed(0)
    one = read(3, 5, [0, 3])
    torch.manual_seed(1)
    assert torch.equal(one, read(3, 5, [0, 3]))
    assert torch.equal(one[1], read(3, 5, [3, 1])[0])
    assert not torch.equal(one, read(4, 5, [0, 3]))
    assert not torch.equal(one, read(3, 6, [0, 3]))


def test_nothing_is_random_without_settings():
    samples = CloudSamples(clouds(), num_points=16)
    assert torch.equal(samples.read(ALL, 0)["points"], samples.read(ALL, 9)["points"])


def test_scale_and_shift_are_one_factor_and_offset_for_each_axis():
    plain = CloudSamples(clouds(), num_points=12).read(ALL, 0)["points"]
    moved = CloudSamples(clouds(), num_points=12, scale=1.5, shift=0.2).read(ALL, 0)["points"]
    for before, after in zip(plain, moved):
        for axis in range(3):
            design = torch.stack([before[:, axis], torch.ones(12)], 1)
            factor, offset = torch.linalg.lstsq(design, after[:, axis, None]).solution.flatten().tolist()
            torch.testing.assert_close(factor * before[:, axis] + offset, after[:, axis], atol=1e-5, rtol=0)
            assert 2 / 3 <= factor <= 1.5
            assert -0.2 <= offset <= 0.2
            assert abs(factor - 1) > 1e-4


def test_normals_stay_at_right_angles_to_a_scaled_surface():
    """Points of a plane with its normal: after scaling along the axes still the normal of that plane."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.nn.functional.normalize(torch.tensor([1.0, 2.0, 3.0]), dim=0)
    points = torch.randn(20, 3, generator=generator)
    points -= (points @ normal)[:, None] * normal
    flat = PackedClouds(
        points=points,
        ends=torch.tensor([20]),
        labels=torch.tensor([0]),
        names=Names.of(["flat"]),
        normals=normal.expand(20, 3).clone(),
    )
    batch = CloudSamples(flat, features="xyz+normals", num_points=20, scale=1.5).read(torch.tensor([0]), 0)
    moved, normals = batch["points"][0].split(3, dim=1)
    assert float((normals[0] - normal).abs().max()) > 1e-3
    along = moved - moved[0]
    torch.testing.assert_close((along * normals).sum(1), torch.zeros(20), atol=1e-5, rtol=0)


def test_dropped_points_become_copies_of_the_first_with_its_part():
    plain = CloudSamples(clouds(), want="parts", num_points=100).read(torch.tensor([3]), 0)
    batch = CloudSamples(clouds(), want="parts", num_points=100, point_dropout=0.9).read(torch.tensor([3]), 0)
    same = (batch["points"] == plain["points"]).all(-1)[0]
    assert 0 < int((~same).sum()) < 100
    assert (batch["points"][0][~same] == plain["points"][0, 0]).all()
    assert (batch["part"][0][~same] == plain["part"][0, 0]).all()
    assert (batch["part"][0][same] == plain["part"][0][same]).all()


def test_a_random_choice_takes_no_point_twice():
    points = CloudSamples(clouds(), num_points=30, choice="random").read(torch.tensor([0, 3]), 1)["points"]
    for row in points:
        assert len(row.unique(dim=0)) == 30


def test_the_farthest_points_against_a_loop():
    generator = torch.Generator().manual_seed(2)
    several = [torch.randn(size, 3, generator=generator) for size in (20, 9, 33)]
    for cloud, found in zip(several, farthest(several, 9)):
        taken = [0]
        while len(taken) < 9:
            distance = [min(float((p - cloud[t]).square().sum()) for t in taken) for p in cloud]
            taken.append(max(range(len(cloud)), key=distance.__getitem__))
        assert found.tolist() == taken


def test_the_farthest_spread_wider_than_the_first():
    first, far = (
        CloudSamples(clouds(), num_points=16, choice=choice).read(torch.tensor([3]), 0)["points"][0]
        for choice in ("first", "farthest")
    )
    nearest = [torch.cdist(p, p).fill_diagonal_(9).min(1).values.min() for p in (first, far)]
    assert nearest[1] > 1.5 * nearest[0]


def test_the_farthest_points_are_sought_once(monkeypatch: pytest.MonkeyPatch):
    """They depend on no seed and no epoch, and take fifty times as long as random ones."""
    sought = []
    monkeypatch.setattr(
        "tokenmix.lab.tasks.points.clouds.farthest", lambda *given: sought.append(1) or farthest(*given)
    )
    samples = CloudSamples(clouds(), num_points=16, choice="farthest")
    first = samples.read(torch.tensor([0, 3]), 0)
    again = samples.read(ALL, 1)
    assert sought == [1], "the other two have no more than 16 points"
    assert torch.equal(again["points"][[0, 3]], first["points"])
    assert torch.equal(samples.read(torch.tensor([3, 1]), 2)["points"], again["points"][[3, 1]])


@pytest.mark.parametrize("choice", ["first", "random", "farthest"])
def test_a_network_gets_as_many_points_as_asked_for(choice: str):
    many, few = torch.randn(50, 3), torch.randn(5, 3)
    chosen = choose_points([many, few], 10, choice, lambda _: np.random.default_rng(0))
    assert [len(one.unique()) for one in chosen] == [10, 5]
    assert (chosen[0].tolist() == list(range(10))) == (choice == "first")


def test_the_loader_takes_them():
    samples = CloudSamples(clouds(), num_points=16, **TRAINING)
    batches = list(make_loader(samples, batch_size=2, shuffle=True, seed=0, drop_last=True))
    assert sorted(torch.cat([batch["index"] for batch in batches]).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_units_of_any_size_come_to_the_unit_ball(size: float):
    """Squares of the first and the last leave the range of float32."""
    points = torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [1.0, 3.0, 0.0]])
    wanted = (points - points.mean(0)) / 2
    found = unit_ball(Cloud(points * size)).points
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted)


def test_one_point_lies_in_the_middle():
    one = torch.tensor([1])
    alone = PackedClouds(points=torch.ones(1, 3), ends=one, labels=one - 1, names=Names.of(["alone"]))
    batch = CloudSamples(alone, num_points=4).read(torch.tensor([0]), 0)
    assert batch["points"].abs().sum() == 0
    assert batch["mask"].tolist() == [[True, False, False, False]]


def test_what_a_cloud_does_not_have_is_told():
    plain = clouds(normals=False, parts=False)
    with pytest.raises(UserError, match="a has no normals"):
        CloudSamples(plain, features="xyz+normals").read(ALL, 0)
    with pytest.raises(UserError, match="a has no parts for its points"):
        CloudSamples(plain, want="parts").read(ALL, 0)
    plain.points[3, 1] = torch.nan
    with pytest.raises(UserError, match="point 4 of 40 is not finite"):
        CloudSamples(plain).read(ALL, 0)
