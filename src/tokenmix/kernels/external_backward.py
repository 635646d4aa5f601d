"""External attention backward in Triton: the map is made again in each pass, nothing of size N x S is written.

Both kernels have a second axis of programs, one for each block of columns of the memory whose gradient they hold: wide
memories do not fit a program's registers. Each program writes its own part of that gradient and the caller adds the
parts in a fixed order, so the same inputs give the same bits.
"""

import triton
import triton.language as tl

from tokenmix.kernels.device import COUNTS, load_tile, logits_of, map_and_gradient, take_part, tile_place


@triton.jit(do_not_specialize=COUNTS)
def backward_sums_kernel(
    grad,
    query,
    key,
    value,
    key_bias,
    mask,
    offset,
    partial,
    grad_value,
    num_tokens,
    num_heads,
    num_blocks,
    num_tiles,
    grad_strides,
    query_strides,
    key_strides,
    value_strides,
    mask_strides,
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
    """Per tile sum_i dS_ij, and per program its part of dM_v = P^T grad."""
    slots, columns = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    mine = tl.program_id(1) * BLOCK_V + columns
    held = load_tile(key, slots, tl.arange(0, BLOCK_D), key_strides, slots < S, D)
    held_value = load_tile(value, slots, columns, value_strides, slots < S, DV)
    total = tl.zeros((BLOCK_S, BLOCK_V), tl.float32)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        batch, head, row, tokens = tile_place(tile, num_heads, num_blocks, BLOCK_N)
        taking = take_part(mask, mask_strides, batch, head, tokens, num_tokens)
        base = query + batch * query_strides[0] + head * query_strides[1]
        strides = (query_strides[2], query_strides[3])
        here = None if offset is None else offset + (batch * num_heads + head) * S
        logits = logits_of(
            base, strides, tokens, taking, key, key_strides, held, key_bias, here, slots, S, D, BLOCK_D, PRECISION
        )
        from_above = grad + batch * grad_strides[0] + head * grad_strides[1]
        strides = (grad_strides[2], grad_strides[3])
        shares, through = map_and_gradient(
            logits,
            taking,
            from_above,
            strides,
            tokens,
            value,
            value_strides,
            held_value,
            slots,
            S,
            DV,
            BLOCK_V,
            PRECISION,
        )
        part = load_tile(from_above, tokens, mine, strides, taking, DV)
        total = tl.dot(tl.trans(shares).to(part.dtype), part, total, input_precision=PRECISION)
        if tl.program_id(1) == 0:
            tl.store(partial + row * S + slots, tl.sum(through, 0), slots < S)
    place = grad_value + (tl.program_id(0).to(tl.int64) * S + slots[:, None]) * DV + mine[None, :]
    tl.store(place, total, (slots < S)[:, None] & (mine < DV)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def backward_emit_kernel(
    grad,
    query,
    key,
    value,
    key_bias,
    mask,
    offset,
    sums,
    grad_query,
    grad_key,
    num_tokens,
    num_heads,
    num_blocks,
    num_tiles,
    grad_strides,
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
    """da = dS - exp(a - L) * c, its product with M_k into grad_query, and per program its part of dM_k = da^T F."""
    slots, columns = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    mine = tl.program_id(1) * BLOCK_D + columns
    held = load_tile(key, slots, columns, key_strides, slots < S, D)
    held_value = load_tile(value, slots, tl.arange(0, BLOCK_V), value_strides, slots < S, DV)
    own = load_tile(key, slots, mine, key_strides, slots < S, D)
    total = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        batch, head, _row, tokens = tile_place(tile, num_heads, num_blocks, BLOCK_N)
        taking = take_part(mask, mask_strides, batch, head, tokens, num_tokens)
        base = query + batch * query_strides[0] + head * query_strides[1]
        query_tile = (query_strides[2], query_strides[3])
        here = None if offset is None else offset + (batch * num_heads + head) * S
        logits = logits_of(
            base, query_tile, tokens, taking, key, key_strides, held, key_bias, here, slots, S, D, BLOCK_D, PRECISION
        )
        from_above = grad + batch * grad_strides[0] + head * grad_strides[1]
        strides = (grad_strides[2], grad_strides[3])
        _shares, through = map_and_gradient(
            logits,
            taking,
            from_above,
            strides,
            tokens,
            value,
            value_strides,
            held_value,
            slots,
            S,
            DV,
            BLOCK_V,
            PRECISION,
        )
        if sums is not None:
            collected = tl.load(sums + (batch * num_heads + head) * S + slots, slots < S, 0.0)
            # A token that takes no part is in no column; its logits may lie above the offset, so not exp(.) * 0.
            inside = tl.where(taking[:, None], logits, float("-inf"))
            through -= tl.exp(inside) * collected[None, :]
        narrow = through.to(own.dtype)
        result = tl.dot(narrow, own, input_precision=PRECISION)
        target = grad_query + batch * out_strides[0] + head * out_strides[1] + tokens[:, None] * out_strides[2]
        there = (tokens < num_tokens)[:, None] & (mine < D)[None, :]
        tl.store(target + mine[None, :].to(tl.int64) * out_strides[3], result.to(grad_query.dtype.element_ty), there)
        part = load_tile(base, tokens, mine, query_tile, taking, D)
        total = tl.dot(tl.trans(narrow), part, total, input_precision=PRECISION)
    place = grad_key + (tl.program_id(0).to(tl.int64) * S + slots[:, None]) * D + mine[None, :]
    tl.store(place, total, (slots < S)[:, None] & (mine < D)[None, :])
