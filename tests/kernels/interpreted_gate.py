"""The fused gate against the plain equation in float64: outputs and gradients. See test_in_interpreter.py."""

from typing import Any

import pytest
import torch
from comparison import assert_as_good_as, gate_inputs, outputs, poisoned
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.kernels import gate as kernels
from tokenmix.ops.gating import spatial_gate


def eager(z: Tensor, weight: Tensor, bias: Tensor, addend: Tensor, mask: Tensor | None = None) -> Tensor:
    return spatial_gate(z, weight, bias, addend=addend, mask=mask)


def fused(z: Tensor, weight: Tensor, bias: Tensor, addend: Tensor, mask: Tensor | None = None) -> Tensor:
    return spatial_gate(z, weight, bias, addend=addend, mask=mask, backend="triton")


@pytest.mark.parametrize(
    ("n", "channels"),
    [(1, 3), (37, 24), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((36, 24), (40, 24), (70, 65)))],
)
def test_equals_the_plain_op(n: int, channels: int) -> None:
    with poisoned():
        assert_as_good_as(fused, eager, gate_inputs(2, n, channels, dtype=torch.float32))


def test_half_type() -> None:
    with poisoned():
        assert_as_good_as(fused, eager, gate_inputs(2, 70, 24, dtype=torch.float16))


def test_masks_and_a_row_without_tokens() -> None:
    inputs = gate_inputs(3, 37, 8, dtype=torch.float32)
    mask = torch.rand(3, 37, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[1] = False
    with poisoned():
        assert_as_good_as(fused, eager, inputs, mask=mask)
    assert fused(**inputs, mask=mask)[1].abs().max() == 0.0


def test_a_slice_of_a_larger_matrix_and_no_addend() -> None:
    inputs = gate_inputs(2, 20, 8, dtype=torch.float32)
    weight, bias = inputs["weight"][:11, :11], inputs["bias"][:11]
    content, gated = inputs["z"][:, 3:14].chunk(2, dim=-1)
    expected = content * (weight @ gated + bias[:, None])
    torch.testing.assert_close(kernels.fused_gate(content, gated, weight, bias), expected)


def test_causal_and_toeplitz_and_multiplicative() -> None:
    inputs = gate_inputs(2, 11, 8, dtype=torch.float32)
    options: dict[str, Any] = {"causal": True, "variant": "multiplicative"}
    weight = torch.randn(2 * 20 - 1, generator=torch.Generator().manual_seed(3))
    z, bias = inputs["z"], inputs["bias"]
    torch.testing.assert_close(
        spatial_gate(z, weight, bias, **options, backend="triton"), spatial_gate(z, weight, bias, **options)
    )


def test_refuses_what_it_cannot_do() -> None:
    inputs = gate_inputs(2, 11, 8, dtype=torch.float32)
    with pytest.raises(UserError, match="got variant='additive'"):
        spatial_gate(inputs["z"], inputs["weight"], inputs["bias"], variant="additive", backend="triton")
    with pytest.raises(UserError, match="one device, got cpu, meta"):
        fused(**inputs, mask=torch.ones(2, 11, dtype=torch.bool, device="meta"))


@pytest.mark.slow
def test_the_operator_is_registered_as_torch_wants_and_compiles() -> None:
    inputs = gate_inputs(2, 11, 6, dtype=torch.float32)
    content, gated = (half.detach().requires_grad_() for half in inputs["z"].chunk(2, dim=-1))
    weight, bias, addend = (inputs[name] for name in ("weight", "bias", "addend"))
    torch.library.opcheck(kernels.gate_forward, (content, gated, weight, bias, addend, torch.ones(2, 11).bool()))
    expected = outputs(fused, inputs)
    for name, tensor in outputs(torch.compile(fused, fullgraph=True, backend="aot_eager"), inputs).items():
        torch.testing.assert_close(tensor, expected[name])
