"""Which parts of a map are worth a figure, each laid out on the grid of the tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmix.models import BlockMap

SIGNED = "coolwarm"
"""matplotlib's colours of signed numbers in every figure of maps and gates: positive red, negative blue."""


@dataclass(frozen=True)
class Tile:
    """One small figure.

    Attributes:
        label: what is seen.
        values: (h, w), on the tokens' grid, or a whole matrix.
        signed: has negative values, so that 0 is the neutral colour.
        mark: place of the token whose row this is, (row, column).
        on_image: `values` are drawn over the image.
    """

    label: str
    values: Tensor
    signed: bool = False
    mark: tuple[int, int] | None = None
    on_image: bool = True


def tiles_of(block: BlockMap, image: int = 0, limit: int = 8) -> list[Tile]:
    """At most `limit` tiles of one block's map on one image of the batch.

    Self-attention: what the centre token looks at, then what is looked at, for as many heads as fit. Slots: those
    whose share varies most over the image. Gates: the whole matrix, then rows on the grid, the centre token's first.
    A class token is left out: it has no place on the image.
    """
    values = (block.map if block.kind == "gate" else block.map[image]).detach().float().cpu()
    values = values[..., block.prefix :, :]
    if block.kind == "slots":
        return _slot_tiles(values, block.grid, limit)
    draw = _gate_tiles if block.kind == "gate" else _token_tiles
    return draw(values[..., block.prefix :], block.grid, limit)


def _token_tiles(values: Tensor, grid: tuple[int, int], limit: int) -> list[Tile]:
    """values (H, N, M): M may be a coarser grid than N, where keys are pooled."""
    heads = min(values.shape[0], max(1, limit // 2))
    row, column = grid[0] // 2, grid[1] // 2
    keys = _key_grid(values.shape[-1], grid)
    mark = (row, column) if keys == grid else None
    centre = values[:heads, row * grid[1] + column]
    received = values[:heads].mean(1)
    looks = [Tile(f"head {h}, centre token", centre[h].view(keys), mark=mark) for h in range(heads)]
    return (looks + [Tile(f"head {h}, received", received[h].view(keys)) for h in range(heads)])[:limit]


def _key_grid(num_keys: int, grid: tuple[int, int]) -> tuple[int, int]:
    """The grid of the keys: the tokens' own, or the same with both sides divided by one number."""
    factor = round((grid[0] * grid[1] / num_keys) ** 0.5)
    return grid[0] // factor, grid[1] // factor


def _slot_tiles(values: Tensor, grid: tuple[int, int], limit: int) -> list[Tile]:
    heads, _, slots = values.shape
    by_slot = values.permute(0, 2, 1).flatten(0, 1)
    chosen = by_slot.std(-1, correction=0).argsort(descending=True)[:limit].tolist()
    return [Tile(_slot_label(i, heads, slots), by_slot[i].view(grid)) for i in chosen]


def _slot_label(index: int, heads: int, slots: int) -> str:
    return f"slot {index % slots}" if heads == 1 else f"head {index // slots}, slot {index % slots}"


def _gate_tiles(matrix: Tensor, grid: tuple[int, int], limit: int) -> list[Tile]:
    """The gate (N, N) is the same for every image."""
    height, width = grid
    centre = (height // 2) * width + width // 2
    others = torch.linspace(0, height * width - 1, max(2, limit - 1)).long().tolist()
    chosen = list(dict.fromkeys([centre, *others]))[: limit - 1]
    rows = [Tile(f"row of token {i}", matrix[i].view(grid), signed=True, mark=(i // width, i % width)) for i in chosen]
    return [Tile("whole matrix", matrix, signed=True, on_image=False), *rows]
