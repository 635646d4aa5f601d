"""External attention forward in Triton: the slots' sums over tokens, then the output; the map stays in registers.

Each program walks over tiles that lie `num_programs` apart, with the first columns of the memories in its hands.
"""

import triton
import triton.language as tl

from tokenmix.kernels.device import COUNTS, load_tile, logits_of, shares_of, take_part, tile_place


@triton.jit(do_not_specialize=COUNTS)
def slot_sums_kernel(
    query,
    key,
    key_bias,
    mask,
    partial,
    num_tokens,
    num_heads,
    num_blocks,
    num_tiles,
    query_strides,
    key_strides,
    mask_strides,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Per tile and slot, log sum_i exp(a_ij) over the tile's tokens; -inf where none takes part."""
    slots = tl.arange(0, BLOCK_S)
    held = load_tile(key, slots, tl.arange(0, BLOCK_D), key_strides, slots < S, D)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        batch, head, row, tokens = tile_place(tile, num_heads, num_blocks, BLOCK_N)
        taking = take_part(mask, mask_strides, batch, head, tokens, num_tokens)
        base = query + batch * query_strides[0] + head * query_strides[1]
        strides = (query_strides[2], query_strides[3])
        logits = logits_of(
            base, strides, tokens, taking, key, key_strides, held, key_bias, None, slots, S, D, BLOCK_D, PRECISION
        )
        logits = tl.where(taking[:, None], logits, float("-inf"))
        top = tl.max(logits, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp(logits - top[None, :]), 0)
        # The logarithm of 1 stands in where there is nothing: the interpreter reports log(0) as a fault. NaN is not
        # nothing, so the test is for 0.
        sums = tl.where(total == 0.0, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total)))
        tl.store(partial + row * S + slots, sums, slots < S)


@triton.jit(do_not_specialize=["num_blocks"])
def merge_kernel(partial, offset, num_blocks, S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr):
    """L from the tiles' parts: one program for some slots of one head. 0 for a slot that no token reaches."""
    row = tl.program_id(0).to(tl.int64)
    slots = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    top = tl.full((BLOCK_S,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_S,), tl.float32)
    for start in range(0, num_blocks, BLOCK_R):
        blocks = start + tl.arange(0, BLOCK_R)
        keep = (blocks < num_blocks)[:, None] & (slots < S)[None, :]
        parts = tl.load(partial + (row * num_blocks + blocks[:, None]) * S + slots[None, :], keep, float("-inf"))
        new = tl.maximum(top, tl.max(parts, 0))
        finite = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - finite) + tl.sum(tl.exp(parts - finite[None, :]), 0)
        top = new
    merged = tl.where(total == 0.0, 0.0, top + tl.log(tl.where(total == 0.0, 1.0, total)))
    tl.store(offset + row * S + slots, merged, slots < S)


@triton.jit(do_not_specialize=COUNTS)
def emit_kernel(
    query,
    key,
    value,
    key_bias,
    value_bias,
    mask,
    offset,
    out,
    num_tokens,
    num_heads,
    num_blocks,
    num_tiles,
    query_strides,
    key_strides,
    value_strides,
    mask_strides,
    out_strides,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out = softmax_j(a - L) M_v + b_v, 0 for tokens that take no part."""
    slots, columns = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    held = load_tile(key, slots, tl.arange(0, BLOCK_D), key_strides, slots < S, D)
    held_value = load_tile(value, slots, columns, value_strides, slots < S, DV)
    for step in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        # From the end: what the first pass read last may still lie in the cache.
        tile = num_tiles - 1 - step
        batch, head, _row, tokens = tile_place(tile, num_heads, num_blocks, BLOCK_N)
        taking = take_part(mask, mask_strides, batch, head, tokens, num_tokens)
        base = query + batch * query_strides[0] + head * query_strides[1]
        strides = (query_strides[2], query_strides[3])
        here = None if offset is None else offset + (batch * num_heads + head) * S
        logits = logits_of(
            base, strides, tokens, taking, key, key_strides, held, key_bias, here, slots, S, D, BLOCK_D, PRECISION
        )
        shares = shares_of(logits, taking).to(held_value.dtype)
        target = out + batch * out_strides[0] + head * out_strides[1] + tokens[:, None] * out_strides[2]
        for start in tl.static_range(0, DV, BLOCK_V):
            part = held_value
            if start > 0:
                part = load_tile(value, slots, start + columns, value_strides, slots < S, DV)
            result = tl.dot(shares, part, input_precision=PRECISION)
            if value_bias is not None:
                bias = tl.load(value_bias + start + columns, start + columns < DV, 0.0).to(tl.float32)
                result += tl.where(taking[:, None], bias[None, :], 0.0)
            there = (tokens < num_tokens)[:, None] & (start + columns < DV)[None, :]
            place = target + (start + columns)[None, :].to(tl.int64) * out_strides[3]
            tl.store(place, result.to(out.dtype.element_ty), there)
