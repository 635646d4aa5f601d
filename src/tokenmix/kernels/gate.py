"""The gating unit without copies of layout: halves of one tensor are read in place."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    """
    content, gated, weight, bias, addend = autocast_inputs(content, gated, weight, bias, addend)
    require_triton("spatial_gate", content, gated, weight, bias, addend, mask=mask)
    return gate_forward(content, gated, weight, bias, addend, mask)


@triton.jit
def gate_kernel(
    content,
    gated,
    weight,
    bias,
    addend,
    mask,
    out,
    num_tokens,
    channels,
    content_strides,
    gated_strides,
    weight_strides,
    addend_strides,
    mask_strides,
    out_strides,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out = content * (W gated + b + addend) for one block of tokens and channels of one sample; 0 where masked.

    ALIGN divides the number of tokens and the stride of W's rows. Triton sees no divisor but 16, and would load W
    number by number where N is 196.
    """
    # Blocks of tokens first: those that run together share the columns of `gated`.
    blocks = tl.cdiv(num_tokens, BLOCK_N)
    tokens = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    inside = lanes < channels
    rows = tl.multiple_of(tokens * weight_strides[0], ALIGN)
    source = gated + batch * gated_strides[0] + lanes[None, :] * gated_strides[2]
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for start in tl.range(0, num_tokens, BLOCK_K, num_stages=STAGES):
        others = start + tl.arange(0, BLOCK_K)
        there = others < num_tokens
        if mask is not None:
            there = there & (tl.load(mask + batch * mask_strides[0] + others * mask_strides[1], there, 0) != 0)
        place = weight + rows[:, None] + others[None, :] * weight_strides[1]
        inner = tl.max_constancy(others < num_tokens, ALIGN)
        part = tl.load(place, (tokens < num_tokens)[:, None] & inner[None, :], 0.0)
        values = tl.load(source + others[:, None] * gated_strides[1], there[:, None] & inside[None, :], 0.0)
        total = tl.dot(part, values, total, input_precision=PRECISION)
    keep = tokens < num_tokens
    total += tl.load(bias + tokens, keep, 0.0).to(tl.float32)[:, None]
    if mask is not None:
        keep = keep & (tl.load(mask + batch * mask_strides[0] + tokens * mask_strides[1], keep, 0) != 0)
    both = keep[:, None] & inside[None, :]
    if addend is not None:
        place = addend + batch * addend_strides[0] + tokens[:, None] * addend_strides[1]
        total += tl.load(place + lanes[None, :] * addend_strides[2], both, 0.0).to(tl.float32)
    place = content + batch * content_strides[0] + tokens[:, None] * content_strides[1]
    result = tl.load(place + lanes[None, :] * content_strides[2], both, 0.0).to(tl.float32) * total
    place = out + batch * out_strides[0] + tokens[:, None] * out_strides[1] + lanes[None, :] * out_strides[2]
    tl.store(place, result.to(out.dtype.element_ty), (tokens < num_tokens)[:, None] & inside[None, :])


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
def _(content: Tensor, *_: object) -> Tensor:
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
