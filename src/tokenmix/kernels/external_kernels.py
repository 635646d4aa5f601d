"""Triton kernels of external attention: two passes over the tokens forward, two backward.

A tile is a block of tokens of one head of one sample. Tiles are ordered by head first, so that in a (B, N, H, d) layout
concurrent tiles are adjacent in memory. Offsets of tokens and columns are 64-bit, because N * H * d can exceed 2^31
elements and the columns may be the outer axis.

Each program processes every `num_programs`-th tile and keeps the first columns of the memories in registers. The map
stays in registers; each backward pass recomputes it. Wide memories do not fit a program's registers. The backward
kernels therefore have a second grid axis, with one program per column block of the memory. Each program writes its part
of the memory's gradient, and the caller adds the parts in a fixed order. Equal inputs thus give bitwise equal results.
"""

# A kernel's body is in Triton's language, which a type checker reads as Python.
# pyrefly: ignore-errors[bad-index]

import triton
import triton.language as tl

# One program for every number of tokens: specializing on 1 or on multiples of 16 gains nothing.
COUNTS = ["num_tokens", "num_heads", "num_blocks", "num_tiles"]


@triton.jit
def tile_place(tile, num_heads, num_blocks, BLOCK_N: tl.constexpr):
    """Sample, head, row in the (B * H, blocks, S) buffers, and tokens of a tile."""
    head = tile % num_heads
    rest = tile // num_heads
    block = rest % num_blocks
    batch = rest // num_blocks
    row = ((batch * num_heads + head) * num_blocks + block).to(tl.int64)
    tokens = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    return batch.to(tl.int64), head.to(tl.int64), row, tokens


@triton.jit
def load_tile(base, rows, columns, strides, keep, NUM: tl.constexpr):
    """Rows x columns from `base`; 0 in rows that are not kept and columns from NUM on."""
    place = base + rows[:, None] * strides[0] + columns[None, :].to(tl.int64) * strides[1]
    return tl.load(place, mask=keep[:, None] & (columns < NUM)[None, :], other=0.0)


@triton.jit
def take_part(mask, strides, batch, head, tokens, num_tokens):
    """Which tokens of the tile exist and are not masked."""
    there = tokens < num_tokens
    if mask is not None:
        there = there & (tl.load(mask + batch * strides[0] + head * strides[1] + tokens * strides[2], there, 0) != 0)
    return there


@triton.jit
def _products(rows, memory, slots, S: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Tokens `rows` (base, strides, tokens, mask) times rows of `memory` (pointer, strides, columns), in float32."""
    columns = tl.arange(0, BLOCK)
    tile = load_tile(rows[0], rows[2], columns, rows[1], rows[3], WIDTH)
    out = tl.dot(tile, tl.trans(memory[2]), input_precision=PRECISION)
    for start in tl.static_range(BLOCK, WIDTH, BLOCK):
        tile = load_tile(rows[0], rows[2], start + columns, rows[1], rows[3], WIDTH)
        part = load_tile(memory[0], slots, start + columns, memory[1], slots < S, WIDTH)
        out = tl.dot(tile, tl.trans(part), out, input_precision=PRECISION)
    return out


@triton.jit
def logits_of(
    rows, keys, bias, offset, slots, S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr
):
    """a - L of a tile, or a without an offset; -inf in padding slots, finite in masked tokens."""
    logits = _products(rows, keys, slots, S, D, BLOCK_D, PRECISION)
    if bias is not None:
        logits += tl.load(bias + slots, slots < S, 0.0).to(tl.float32)[None, :]
    if offset is not None:
        logits -= tl.load(offset + slots, slots < S, 0.0)[None, :]
    return tl.where((slots < S)[None, :], logits, float("-inf"))


@triton.jit
def weights_of(logits, taking):
    """The softmax over slots, 0 for masked tokens."""
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    return tl.where(taking[:, None], weights / tl.sum(weights, 1)[:, None], 0.0)


@triton.jit
def map_and_gradient(
    logits, above, values, slots, S: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr
):
    """P, and dS = P * (dP - rowsum(dP * P)) with dP the output's gradient times the value memory."""
    weights = weights_of(logits, above[3])
    weighted = _products(above, values, slots, S, DV, BLOCK_V, PRECISION) * weights
    return weights, weighted - weights * tl.sum(weighted, 1)[:, None]


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
    """Per tile and slot, log sum_i exp(a_ij) over the tile's tokens; -inf if all are masked."""
    slots = tl.arange(0, BLOCK_S)
    held = load_tile(key, slots, tl.arange(0, BLOCK_D), key_strides, slots < S, D)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        batch, head, row, tokens = tile_place(tile, num_heads, num_blocks, BLOCK_N)
        taking = take_part(mask, mask_strides, batch, head, tokens, num_tokens)
        base = query + batch * query_strides[0] + head * query_strides[1]
        rows = (base, (query_strides[2], query_strides[3]), tokens, taking)
        keys = (key, key_strides, held)
        logits = logits_of(rows, keys, key_bias, None, slots, S, D, BLOCK_D, PRECISION)
        logits = tl.where(taking[:, None], logits, float("-inf"))
        top = tl.max(logits, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp(logits - top[None, :]), 0)
        # log(1) replaces log(0), which the interpreter reports as a fault. The test is for 0, so that NaN propagates.
        sums = tl.where(total == 0.0, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total)))
        tl.store(partial + row * S + slots, sums, slots < S)


@triton.jit(do_not_specialize=["num_blocks"])
def merge_kernel(partial, offset, num_blocks, S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr):
    """L from the tiles' partial sums, one program per block of slots of one head; 0 for slots without tokens."""
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
    """out = softmax_j(a - L) M_v + b_v, 0 for masked tokens."""
    slots, columns = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    held = load_tile(key, slots, tl.arange(0, BLOCK_D), key_strides, slots < S, D)
    held_value = load_tile(value, slots, columns, value_strides, slots < S, DV)
    for step in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
        # In reverse order: tiles read last by the first pass may still be in the cache.
        tile = num_tiles - 1 - step
        batch, head, _row, tokens = tile_place(tile, num_heads, num_blocks, BLOCK_N)
        taking = take_part(mask, mask_strides, batch, head, tokens, num_tokens)
        base = query + batch * query_strides[0] + head * query_strides[1]
        here = None if offset is None else offset + (batch * num_heads + head) * S
        rows = (base, (query_strides[2], query_strides[3]), tokens, taking)
        keys = (key, key_strides, held)
        logits = logits_of(rows, keys, key_bias, here, slots, S, D, BLOCK_D, PRECISION)
        weights = weights_of(logits, taking).to(held_value.dtype)
        target = out + batch * out_strides[0] + head * out_strides[1] + tokens[:, None] * out_strides[2]
        for start in tl.static_range(0, DV, BLOCK_V):
            part = held_value
            if start > 0:
                part = load_tile(value, slots, start + columns, value_strides, slots < S, DV)
            result = tl.dot(weights, part, input_precision=PRECISION)
            if value_bias is not None:
                bias = tl.load(value_bias + start + columns, start + columns < DV, 0.0).to(tl.float32)
                result += tl.where(taking[:, None], bias[None, :], 0.0)
            there = (tokens < num_tokens)[:, None] & (start + columns < DV)[None, :]
            place = target + (start + columns)[None, :].to(tl.int64) * out_strides[3]
            tl.store(place, result.to(out.dtype.element_ty), there)


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
        here = None if offset is None else offset + (batch * num_heads + head) * S
        rows = (base, (query_strides[2], query_strides[3]), tokens, taking)
        keys = (key, key_strides, held)
        logits = logits_of(rows, keys, key_bias, here, slots, S, D, BLOCK_D, PRECISION)
        from_above = grad + batch * grad_strides[0] + head * grad_strides[1]
        above = (from_above, (grad_strides[2], grad_strides[3]), tokens, taking)
        values = (value, value_strides, held_value)
        weights, through = map_and_gradient(logits, above, values, slots, S, DV, BLOCK_V, PRECISION)
        part = load_tile(from_above, tokens, mine, above[1], taking, DV)
        total = tl.dot(tl.trans(weights).to(part.dtype), part, total, input_precision=PRECISION)
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
        here = None if offset is None else offset + (batch * num_heads + head) * S
        rows = (base, (query_strides[2], query_strides[3]), tokens, taking)
        keys = (key, key_strides, held)
        logits = logits_of(rows, keys, key_bias, here, slots, S, D, BLOCK_D, PRECISION)
        from_above = grad + batch * grad_strides[0] + head * grad_strides[1]
        above = (from_above, (grad_strides[2], grad_strides[3]), tokens, taking)
        values = (value, value_strides, held_value)
        _weights, through = map_and_gradient(logits, above, values, slots, S, DV, BLOCK_V, PRECISION)
        if sums is not None:
            collected = tl.load(sums + (batch * num_heads + head) * S + slots, slots < S, 0.0)
            # Masked tokens are in no column. Their logits may exceed the offset, so exp(.) * 0 could be NaN.
            inside = tl.where(taking[:, None], logits, float("-inf"))
            through -= tl.exp(inside) * collected[None, :]
        narrow = through.to(own.dtype)
        result = tl.dot(narrow, own, input_precision=PRECISION)
        target = grad_query + batch * out_strides[0] + head * out_strides[1] + tokens[:, None] * out_strides[2]
        there = (tokens < num_tokens)[:, None] & (mine < D)[None, :]
        tl.store(target + mine[None, :].to(tl.int64) * out_strides[3], result.to(grad_query.dtype.element_ty), there)
        part = load_tile(base, tokens, mine, rows[1], taking, D)
        total = tl.dot(tl.trans(narrow), part, total, input_precision=PRECISION)
    place = grad_key + (tl.program_id(0).to(tl.int64) * S + slots[:, None]) * D + mine[None, :]
    tl.store(place, total, (slots < S)[:, None] & (mine < D)[None, :])
