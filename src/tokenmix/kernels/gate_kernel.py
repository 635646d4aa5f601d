"""The gating unit in Triton: the product over tokens, its bias, its addend and the gating in one kernel."""

import triton
import triton.language as tl


@triton.jit
def gate_kernel(
    content, gated, weight, bias, addend, mask, out, num_tokens, channels, content_strides, gated_strides,
    weight_strides, addend_strides, mask_strides, out_strides, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
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
