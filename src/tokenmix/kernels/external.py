"""Fused external attention: two passes over the tokens forward, two backward, without a slot map in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import triton
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.kernels.external_kernels import (
    backward_emit_kernel,
    backward_sums_kernel,
    emit_kernel,
    merge_kernel,
    slot_sums_kernel,
)
from tokenmix.kernels.support import (
    MAX_SLOTS,
    Tiles,
    empty_like_heads,
    input_precision,
    num_programs,
    padded_size,
    shared_bytes,
    tiles_of,
)


def fused_external_attention(
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    mask: Tensor | None,
    *,
    double: bool,
) -> Tensor:
    """External attention by Triton kernels that keep the slot map in registers.

        L_j = logsumexp_i a_ij,   out = softmax_j (a - L) M_v + b_v,   a = F M_k^T + b_k

    The forward pass reads the query twice (once for L) and writes the output once. For H heads with d columns of b
    bytes, this is N * H * (2 d + d_v) * b bytes. Partial sums of L add 4 S bytes per tile of tokens. The backward pass
    reads query and gradient twice and writes the query's gradient once: N * H * (3 d + 2 d_v) * b, and one float32 copy
    of a memory's gradient per program. More columns than a tile has (64 in half precision) need further blocks, and
    backward reads the tokens once more for each. The goal is 70 % of the memory bandwidth forward from N = 16,384 on;
    not yet measured on a GPU.

    Without `double` normalisation, the softmax over slots has no L and one pass forward. Sums and normalisation are in
    float32; float32 products follow `torch.set_float32_matmul_precision`. Only first derivatives are supported.

    Shape: F (B, H, N, d) or other leading axes, any strides, such as a transposed (B, N, H, d), M_k (S, d) with S at
    most 256, M_v (S, d_v), the others as in `tokenmix.ops.external_blocks.Factors`; to (..., N, d_v) in the query's
    dtype and layout.
    """
    if key_memory.shape[0] > MAX_SLOTS:
        raise UserError(
            f"external_attention: backend='triton' holds at most {MAX_SLOTS} slots, got {key_memory.shape[0]}; "
            f"use backend='eager'"
        )
    leading = query.shape[:-2]
    full = query.reshape(-1, *query.shape[-3:]) if query.dim() > 4 else query[(None,) * (4 - query.dim())]
    if mask is not None:
        mask = mask.expand(query.shape[:-1]).reshape(full.shape[:-1])
    out, _ = external_forward(full, key_memory, value_memory, key_bias, value_bias, mask, double)
    return out.reshape(*leading, *out.shape[-2:])


@dataclass(frozen=True)
class _Walk:
    """Distribution of the tiles of a query (B, H, N, d) over programs."""

    query: Tensor
    tiles: Tiles

    @property
    def num_blocks(self) -> int:
        return triton.cdiv(self.query.shape[2], self.tiles.tokens)

    @property
    def num_tiles(self) -> int:
        return self.query.shape[0] * self.query.shape[1] * self.num_blocks

    def programs(self, column_blocks: int = 1) -> int:
        """Number of programs along the tiles, with one further program per column block for each."""
        resident = num_programs(self.query.device, self.tiles.programs)
        return min(self.num_tiles, max(1, resident // column_blocks))

    def counts(self) -> tuple[int, int, int, int]:
        """num_tokens, num_heads, num_blocks, num_tiles."""
        return self.query.shape[2], self.query.shape[1], self.num_blocks, self.num_tiles

    def parts(self, slots: int) -> Tensor:
        """A buffer with one number per slot and tile, (B, H, blocks, S)."""
        shape = (*self.query.shape[:2], self.num_blocks, slots)
        return torch.empty(shape, dtype=torch.float32, device=self.query.device)

    def options(self, slots: int) -> dict[str, int | str]:
        """Launch options for tiles and hardware."""
        return {
            "S": slots,
            "D": self.query.shape[-1],
            "BLOCK_N": self.tiles.tokens,
            "BLOCK_S": padded_size(slots, MAX_SLOTS),
            "BLOCK_D": padded_size(self.query.shape[-1], self.tiles.columns),
            "PRECISION": input_precision(self.query.dtype),
            "STAGES": self.tiles.stages,
            "num_warps": self.tiles.warps,
        }


class _Kernel(Protocol):
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


def _launch(kernel: _Kernel, grid: tuple[int, ...], *given: object, **options: object) -> None:
    kernel[grid](*given, **options)


def _strides(*tensors: Tensor | None) -> list[tuple[int, ...] | None]:
    return [None if t is None else t.stride() for t in tensors]


@torch.library.custom_op("tokenmix::external_forward", mutates_args=())
def external_forward(
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    mask: Tensor | None,
    double: bool,
) -> tuple[Tensor, Tensor]:
    """The output (B, H, N, d_v) for a query (B, H, N, d) and a mask (B, H, N), and L (B, H, S), empty if not double."""
    slots, width = value_memory.shape
    out = empty_like_heads(query, width)
    offset = query.new_empty((query.shape[0] if double else 0, query.shape[1], slots), dtype=torch.float32)
    if query.numel() == 0:
        return out, offset.zero_()
    with torch.cuda.device_of(query):
        if double:
            walk = _Walk(query, tiles_of(key_memory.shape[1], slots, query.element_size()))
            partial = walk.parts(slots)
            given = (query, key_memory, key_bias, mask, partial, *walk.counts(), *_strides(query, key_memory, mask))
            _launch(slot_sums_kernel, (walk.programs(),), *given, **walk.options(slots))
            grid = (query.shape[0] * query.shape[1], triton.cdiv(slots, 16))
            _launch(merge_kernel, grid, partial, offset, walk.num_blocks, S=slots, BLOCK_R=64, BLOCK_S=16)
        walk = _Walk(query, tiles_of(max(query.shape[-1], width), slots, query.element_size()))
        _launch(
            emit_kernel,
            (walk.programs(),),
            query,
            key_memory,
            value_memory,
            key_bias,
            value_bias,
            mask,
            offset if double else None,
            out,
            *walk.counts(),
            *_strides(query, key_memory, value_memory, mask, out),
            **walk.options(slots),
            DV=width,
            BLOCK_V=padded_size(width, walk.tiles.columns),
        )
    return out, offset


@torch.library.custom_op("tokenmix::external_backward", mutates_args=())
def external_backward(
    grad: Tensor,
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    key_bias: Tensor | None,
    mask: Tensor | None,
    offset: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the query, both memories and both biases.

    b_k shifts a and L alike, so its gradient is exactly 0 under double normalisation. Rows of the map sum to 1 (or 0),
    so the gradient of b_v is the sum of dM_v over its slots.
    """
    slots, width = value_memory.shape
    double = offset.shape[0] > 0
    grad_query = empty_like_heads(query, query.shape[-1])
    if query.numel() == 0:
        zeros = [torch.zeros_like(t) for t in (key_memory, value_memory, key_memory[:, 0], value_memory[0])]
        return grad_query, zeros[0], zeros[1], zeros[2], zeros[3]
    shared = shared_bytes(query.device)
    widest, itemsize = max(query.shape[-1], width), query.element_size()
    walk = _Walk(query, tiles_of(widest, slots, itemsize, backward=True, shared=shared))
    options = {**walk.options(slots), "DV": width, "BLOCK_V": padded_size(width, walk.tiles.columns)}
    common = (*walk.counts(), *_strides(grad, query, key_memory, value_memory, mask))
    given = (grad, query, key_memory, value_memory, key_bias, mask, offset if double else None)
    with torch.cuda.device_of(query):
        partial = walk.parts(slots)
        grid, grad_value = _memory_parts(walk, slots, width)
        _launch(backward_sums_kernel, grid, *given, partial, grad_value, *common, **options)
        sums = partial.sum(2)
        grid, grad_key = _memory_parts(walk, slots, query.shape[-1])
        given = (*given, sums if double else None, grad_query, grad_key)
        _launch(backward_emit_kernel, grid, *given, *common, grad_query.stride(), **options)
    grad_key, grad_value = grad_key.sum(0), grad_value.sum(0)
    key_shift = torch.zeros_like(sums[0, 0]) if double else sums.sum((0, 1))
    small = (grad_key, grad_value, key_shift, grad_value.sum(0))
    return grad_query, *(g.to(query.dtype) for g in small)  # pyrefly: ignore[bad-return]


def _memory_parts(walk: _Walk, slots: int, width: int) -> tuple[tuple[int, int], Tensor]:
    """A grid with programs per column block, and a buffer for their parts of a memory's gradient."""
    blocks = triton.cdiv(width, padded_size(width, walk.tiles.columns))
    grid = (walk.programs(blocks), blocks)
    return grid, walk.query.new_empty((grid[0], slots, width), dtype=torch.float32)


@external_forward.register_fake
def _(query: Tensor, key_memory: Tensor, value_memory: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    offset = query.new_empty((query.shape[0] if rest[3] else 0, query.shape[1], key_memory.shape[0]))
    return empty_like_heads(query, value_memory.shape[1]), offset.float()


@external_backward.register_fake
def _(grad: Tensor, query: Tensor, key_memory: Tensor, value_memory: Tensor, *rest: object) -> tuple[Tensor, ...]:
    slots, width = value_memory.shape
    memories = query.new_empty((slots, query.shape[-1])), query.new_empty((slots, width))
    return empty_like_heads(query, query.shape[-1]), *memories, query.new_empty(slots), query.new_empty(width)


Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, bool]


class _Context(Protocol):
    biased: tuple[bool, bool]
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


def _save(ctx: _Context, inputs: Inputs, output: tuple[Tensor, Tensor]) -> None:
    query, key_memory, value_memory, key_bias, value_bias, mask, _ = inputs
    ctx.biased = key_bias is not None, value_bias is not None
    ctx.save_for_backward(query, key_memory, value_memory, key_bias, mask, output[1])


def _differentiate(ctx: _Context, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = external_backward(grad, *ctx.saved_tensors)
    key_bias, value_bias = (g if there else None for g, there in zip(grads[3:], ctx.biased, strict=True))
    return *grads[:3], key_bias, value_bias, None, None


external_forward.register_autograd(_differentiate, setup_context=_save)
