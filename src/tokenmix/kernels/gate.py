"""The gating unit without copies of layout: halves of one tensor are read in place."""

from typing import Any

import torch
import triton
from torch import Tensor

from tokenmix.kernels.gate_kernel import gate_kernel
from tokenmix.kernels.support import autocast_inputs, input_precision, require_triton


def fused_gate(
    content: Tensor,
    gated: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    addend: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """A multiplicative gate by one Triton kernel forward.

        s = content * (W gated + b 1^T + addend)

    Each of content, gated and addend is read once and the output is written once, and W by every sample from the cache:
    3 B N C numbers, where a product, its bias and a multiplication move 7. Backward reuses the kernel with the
    output's gradient in place of content; the gate is made again and not kept. The rest are plain products.

    Args:
        content: Z_1, (B, N, C), any strides.
        gated: Z_2, (B, N, C), any strides, normalised by the caller.
        weight: W, (N, N).
        bias: b, (N,).
        addend: (B, N, C) or None.
        mask: (B, N) bool, True = the token takes part; the others count as 0 under W and are 0 in the output.

    Returns:
        (B, N, C), contiguous. Sums are in float32. A first derivative only.

    Raises:
        UserError: no CUDA device and no interpreter, several devices, types that the kernel does not take.
    """
    content, gated, weight, bias, addend = autocast_inputs(content, gated, weight, bias, addend)
    require_triton("spatial_gate", content, gated, weight, bias, addend, mask=mask)
    return gate_forward(content, gated, weight, bias, addend, mask)


@torch.library.custom_op("tokenmix::gate_forward", mutates_args=())
def gate_forward(
    content: Tensor, gated: Tensor, weight: Tensor, bias: Tensor, addend: Tensor | None, mask: Tensor | None
) -> Tensor:
    """The kernel over blocks of tokens and channels; `mask` is (B, N)."""
    size, n, channels = content.shape
    out = content.new_empty((size, n, channels))
    if out.numel() == 0:
        return out
    options = launch_options(content, weight)
    strides = [None if t is None else t.stride() for t in (content, gated, weight, addend, mask, out)]
    with torch.cuda.device_of(content):
        grid = (triton.cdiv(n, options["BLOCK_N"]) * size, triton.cdiv(channels, options["BLOCK_C"]))
        kernel: Any = gate_kernel[grid]
        kernel(content, gated, weight, bias, addend, mask, out, n, channels, *strides, **options)
    return out


def launch_options(content: Tensor, weight: Tensor) -> dict[str, Any]:
    """The kernel's blocks. Those of float32 are small, since its products have no tensor cores."""
    n = content.shape[1]
    if content.element_size() == 4:
        block, depth, warps = 32, 32, 4
    else:
        # With few tokens large blocks would be few, and much of them beyond the last token.
        block, depth, warps = (128, 64, 8) if n >= 512 else (64, 32, 4)
    return {
        "BLOCK_N": block,
        "BLOCK_C": block,
        "BLOCK_K": depth,
        "ALIGN": next(a for a in (8, 4, 1) if n % a == 0 and weight.stride(0) % a == 0),
        "PRECISION": input_precision(content.dtype),
        "STAGES": 3,
        "num_warps": warps,
    }


@gate_forward.register_fake
def _(content: Tensor, *_: Any) -> Tensor:
    return content.new_empty(content.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    content, gated, weight, bias, addend, mask = ctx.saved_tensors
    grad_content = gate_forward(grad, gated, weight, bias, addend, mask)
    grad_gate = grad * content
    if mask is not None:
        left_out = ~mask.unsqueeze(-1)
        grad_gate, gated = grad_gate.masked_fill(left_out, 0.0), gated.masked_fill(left_out, 0.0)
    grad_gated = torch.bmm(weight.mT.expand(len(gated), *weight.shape), grad_gate)
    if mask is not None:
        grad_gated = grad_gated.masked_fill(~mask.unsqueeze(-1), 0.0)
    wide = torch.promote_types(grad.dtype, torch.float32)
    grad_weight = torch.bmm(grad_gate, gated.mT).sum(0, dtype=wide).to(weight.dtype)
    grad_bias = grad_gate.sum((0, 2), dtype=wide).to(bias.dtype)
    return grad_content, grad_gated, grad_weight, grad_bias, None if addend is None else grad_gate, None


gate_forward.register_autograd(_differentiate, setup_context=_save)
