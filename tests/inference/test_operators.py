"""PyTorch's private operators: there, or the version that lacks them is named."""

from typing import Any

import pytest
import torch

import tokenmix
from tokenmix.errors import UserError
from tokenmix.inference import operators


@pytest.mark.parametrize("dtype", operators.OPERATORS)
def test_this_torch_has_the_operators(dtype: Any) -> None:
    operators.require_operators(dtype)


@pytest.mark.parametrize(("dtype", "library"), [("float32", "mkldnn"), ("int8", "onednn")])
def test_a_torch_without_one_is_named(dtype: Any, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operators.OPERATORS, dtype, ("onednn.qlinear_prepack", f"{library}.gone"))
    name = rf"torch {torch.__version__.replace('+', '.')} has no operator {library}.gone, which {dtype} needs"
    with pytest.raises(UserError, match=name):
        tokenmix.optimize(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(1, 3, 4), dtype=dtype, measure=False)
