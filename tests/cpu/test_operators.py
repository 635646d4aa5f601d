"""PyTorch's private operators: there, or the version that lacks them is named."""

import pytest
import torch

from tokenmix.cpu import operators, quantize
from tokenmix.errors import UserError


def test_this_torch_has_the_operators() -> None:
    missing = operators.missing_operators()
    assert not missing, f"torch {torch.__version__} has no {', '.join(missing)}: see tokenmix/cpu/operators.py"


def test_a_torch_without_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "OPERATORS", ("onednn.qlinear_prepack", "onednn.gone"))
    with pytest.raises(UserError, match=rf"torch {torch.__version__.replace('+', '.')} has no operator onednn.gone"):
        quantize(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(1, 3, 4))
