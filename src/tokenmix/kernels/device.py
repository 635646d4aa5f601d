"""What the kernels of external attention share: where a tile is, its logits, its map and the map's gradient.

A tile is some tokens of one head of one sample. Heads come first in the order of tiles: in a (B, N, H, d) layout the
tiles that are worked on together then lie side by side in memory. Offsets of tokens and columns are 64 bits wide, since
N * H * d passes 2^31 elements and the columns may be the outer axis.
"""

# A kernel's body is Triton's language, which a type checker reads as Python.
# pyrefly: ignore-errors[bad-index]

import triton
import triton.language as tl

# One program serves every number of tokens: nothing is gained from knowing that a count is 1 or a multiple of 16.
COUNTS = ["num_tokens", "num_heads", "num_blocks", "num_tiles"]


@triton.jit
def tile_place(tile, num_heads, num_blocks, BLOCK_N: tl.constexpr):
    """Sample, head, row of the (B * H, blocks, S) buffers, and the tokens of a tile."""
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
    """Which tokens of the tile are there and not masked."""
    there = tokens < num_tokens
    if mask is not None:
        there = there & (tl.load(mask + batch * strides[0] + head * strides[1] + tokens * strides[2], there, 0) != 0)
    return there


@triton.jit
def _products(
    left,
    strides,
    tokens,
    taking,
    memory,
    memory_strides,
    held,
    slots,
    S: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows of `left` times rows of a memory, (tokens, slots) in float32. `held` are the memory's first columns."""
    columns = tl.arange(0, BLOCK)
    tile = load_tile(left, tokens, columns, strides, taking, WIDTH)
    out = tl.dot(tile, tl.trans(held), input_precision=PRECISION)
    for start in tl.static_range(BLOCK, WIDTH, BLOCK):
        tile = load_tile(left, tokens, start + columns, strides, taking, WIDTH)
        part = load_tile(memory, slots, start + columns, memory_strides, slots < S, WIDTH)
        out = tl.dot(tile, tl.trans(part), out, input_precision=PRECISION)
    return out


@triton.jit
def logits_of(
    query,
    strides,
    tokens,
    taking,
    key,
    key_strides,
    held,
    bias,
    offset,
    slots,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a - L of a tile, or a where there is no offset; -inf in slots that are padding, finite in tokens left out."""
    logits = _products(query, strides, tokens, taking, key, key_strides, held, slots, S, D, BLOCK_D, PRECISION)
    if bias is not None:
        logits += tl.load(bias + slots, slots < S, 0.0).to(tl.float32)[None, :]
    if offset is not None:
        logits -= tl.load(offset + slots, slots < S, 0.0)[None, :]
    return tl.where((slots < S)[None, :], logits, float("-inf"))


@triton.jit
def shares_of(logits, taking):
    """The softmax over slots, 0 for tokens that take no part."""
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    return tl.where(taking[:, None], weights / tl.sum(weights, 1)[:, None], 0.0)


@triton.jit
def map_and_gradient(
    logits,
    taking,
    grad,
    strides,
    tokens,
    value,
    value_strides,
    held,
    slots,
    S: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """P, and dS = P * (dP - rowsum(dP * P)) with dP the output's gradient times the value memory."""
    shares = shares_of(logits, taking)
    through = _products(grad, strides, tokens, taking, value, value_strides, held, slots, S, DV, BLOCK_V, PRECISION)
    weighted = through * shares
    return shares, weighted - shares * tl.sum(weighted, 1)[:, None]
