"""Ops that are called by themselves name an argument that is not a tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenmix import ops
from tokenmix.errors import UserError

HEADS, MAP = torch.rand(2, 2, 4, 3), torch.rand(2, 2, 4, 4)
MATRIX, ROW, KERNEL = torch.rand(4, 4), torch.rand(4), torch.rand(2, 2, 2)
SCORES = ops.Scores(HEADS, HEADS)
CALLS: dict[str, tuple[Any, ...]] = {
    "attention": (HEADS, HEADS, HEADS),
    "attention_from_scores": (SCORES, HEADS),
    "attention_probabilities": (HEADS, HEADS),
    "attention_residual": (
        SCORES,
        (2, 2),
        KERNEL,
        KERNEL,
        torch.rand(2),
        torch.rand(2),
        torch.rand(3, 2),
        torch.rand(3),
    ),
    "double_normalize": (MAP,),
    "external_attention": (HEADS, torch.rand(5, 3), torch.rand(5, 3)),
    "external_attention_map": (HEADS, torch.rand(5, 3)),
    "next_scores": (SCORES, MATRIX, ROW, MATRIX, ROW),
    "resize_gate": (MATRIX, ROW, (2, 2), (3, 3)),
    "resize_score_transform": (MATRIX, ROW, (2, 2), (3, 3)),
    "slot_offset": (MAP,),
    "spatial_gate": (torch.rand(2, 4, 6), MATRIX, ROW),
    "toeplitz_matrix": (torch.rand(7), 4),
    "transform_factored": (HEADS, HEADS, MATRIX, ROW, MATRIX, ROW),
    "transform_scores": (MAP, MATRIX, ROW, MATRIX, ROW),
}


def test_every_op_is_tried() -> None:
    assert {*CALLS, "Scores", "sharded_external_attention"} == {*ops.__all__}


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_is_no_tensor_is_named(name: str) -> None:
    op: Callable[..., object] = getattr(ops, name)
    given = CALLS[name]
    op(*given)
    for place, value in enumerate(given):
        if isinstance(value, torch.Tensor):
            for wrong in (value.numpy(), value.tolist()):
                with pytest.raises(UserError, match=r"must be a torch.Tensor, got .*; convert it with torch"):
                    op(*given[:place], wrong, *given[place + 1 :])
    with pytest.raises(UserError, match=r"must be (a torch.Tensor|the Scores that .*), got None"):
        op(None, *given[1:])
