"""Pairs of real items are a function of the seed, and neither half alone says anything of the answer."""

import torch

from recipes.datasets.images.fashion_pairs import draw_pairs


def test_pairs_are_what_their_labels_say_and_no_half_tells() -> None:
    labels = torch.randint(10, (3000,), generator=torch.Generator().manual_seed(0))
    (left, right), same = draw_pairs(labels, 20_000, seed=1)
    assert torch.equal((labels[left] == labels[right]).long(), same)
    for side in (left, right):
        shares = torch.stack([same[labels[side] == label].float().mean() for label in range(10)])
        assert ((shares - 0.5).abs() < 0.05).all()
    again, _ = draw_pairs(labels, 20_000, seed=1)
    assert torch.equal(again[0], left)
    other, _ = draw_pairs(labels, 20_000, seed=2)
    assert not torch.equal(other[0], left)
    assert len(left.unique()) > 2900
