"""The map that every mixer of a model used on given images: numbers, and parts worth a figure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Mixer, near_square
from tokenmix.models import BlockMap


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor) -> list[BlockMap]:
    """The maps of a model's mixers on images, from the first block to the last, in the model's present mode.

    They are computed by each layer's own `attention_map` from the input that it got, so it works with fused attention.

    Args:
        model: one of ours, or any module that calls tokenmix mixers.
        images: what the model takes.

    Raises:
        UserError: the model has no token mixer, or called none of them; the answer is never empty.
    """
    own = getattr(model, "attention_maps", None)
    maps: list[BlockMap] = own(images) if callable(own) else _watched(model, images)
    if not maps:
        raise UserError(
            f"{type(model).__name__} has no token mixer with a map that was called, so there is none to show; "
            "take a model of `tokenmix list models`, put a layer of tokenmix.layers into yours, or give a mixer of "
            "yours whose capabilities say map=None an attention_map"
        )
    return maps


def _watched(model: nn.Module, images: Tensor) -> list[BlockMap]:
    """Run a model that is not ours and ask every mixer, in the order of the calls, about the input that it got."""
    mixers = {module: name for name, module in model.named_modules() if isinstance(module, Mixer)}
    inside = {inner for outer in mixers for inner in outer.modules() if inner is not outer}
    found: list[BlockMap] = []

    def note(mixer: Mixer, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], _out: Tensor) -> None:
        given, kind = {**dict(zip(("x", "mask"), args)), **kwargs}, mixer.capabilities.map
        if kind is not None:
            x = given["x"]
            used = mixer.attention_map(x, given.get("mask"))
            grid = (int(x.shape[-2]), int(x.shape[-1])) if x.dim() == 4 else near_square(used.shape[-2])
            found.append(BlockMap(mixers[mixer], kind, used, grid))

    hooks = [mixer.register_forward_hook(note, with_kwargs=True) for mixer in mixers if mixer not in inside]
    try:
        if hooks:
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@dataclass(frozen=True)
class MapNumbers:
    """One block's map in numbers, means over images, heads and tokens. Gates are read as |W| with rows summing to 1.

    Attributes:
        name: the mixer's path in the model.
        kind: slots, tokens or gate.
        shape: of the map.
        entropy: of a row over its logarithm's bound: 0 = one column takes all, 1 = all columns alike.
        effective_columns: exp(entropy of the mean row): how many slots (or tokens) are in use.
        saturation: share of a row's mass on its largest column.
        diagonality: share of a row's mass on the token itself; None for slots.
        distance: 1 - linear CKA with the map of the block before: 0 = tokens are distinguished in the same way, 1 =
            unrelated; None for the first block and for a map whose rows are all alike.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    entropy: float
    effective_columns: float
    saturation: float
    diagonality: float | None
    distance: float | None


def map_numbers(maps: list[BlockMap]) -> list[MapNumbers]:
    """The numbers of each block's map, from the first block to the last."""
    found: list[MapNumbers] = []
    previous: Tensor | None = None
    for block in maps:
        rows = _rows(block)
        square = block.kind != "slots" and rows.shape[-1] == rows.shape[-2]
        numbers = MapNumbers(
            name=block.name,
            kind=block.kind,
            shape=tuple(block.map.shape),
            entropy=_entropy(rows).mean().item() / math.log(max(2, rows.shape[-1])),
            effective_columns=_entropy(rows.mean(-2)).exp().mean().item(),
            saturation=rows.amax(-1).mean().item(),
            diagonality=rows.diagonal(dim1=-2, dim2=-1).mean().item() if square else None,
            distance=None if previous is None else _distance(rows, previous),
        )
        found.append(numbers)
        previous = rows
    return found


def _rows(block: BlockMap) -> Tensor:
    """(B, H, N, S) in float64, nonnegative, each row summing to 1 (a masked token's row of zeros stays)."""
    values = block.map.detach().double().abs()
    values = values[None, None] if values.dim() == 2 else values
    total = values.sum(-1, keepdim=True)
    return values / total.where(total > 0, 1.0)


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


def _distance(rows: Tensor, previous: Tensor) -> float | None:
    """1 - CKA, the mean over images; the heads' columns are side by side as the features of a token."""
    size = max(rows.shape[0], previous.shape[0])
    flat = (r.permute(0, 2, 1, 3).flatten(2) for r in (rows, previous))
    mine, other = ((f - f.mean(1, keepdim=True)).expand(size, -1, -1) for f in flat)
    if mine.shape[1] != other.shape[1]:
        return None
    shared = (mine.transpose(1, 2) @ other).square().sum((1, 2))
    norms = [(f.transpose(1, 2) @ f).square().sum((1, 2)).sqrt() for f in (mine, other)]
    scale = norms[0] * norms[1]
    # Rows that are all alike leave nothing after centring but rounding.
    if (scale < 1e-20).any():
        return None
    return (1 - shared / scale).mean().item()


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
    # The grid of the keys: the tokens' own, or the same with both sides divided by one number.
    factor = round((grid[0] * grid[1] / values.shape[-1]) ** 0.5)
    keys = grid[0] // factor, grid[1] // factor
    mark = (row, column) if keys == grid else None
    centre = values[:heads, row * grid[1] + column]
    received = values[:heads].mean(1)
    looks = [Tile(f"head {h}, centre token", centre[h].view(keys), mark=mark) for h in range(heads)]
    return (looks + [Tile(f"head {h}, received", received[h].view(keys)) for h in range(heads)])[:limit]


def _slot_tiles(values: Tensor, grid: tuple[int, int], limit: int) -> list[Tile]:
    heads, _, slots = values.shape
    by_slot = values.permute(0, 2, 1).flatten(0, 1)
    chosen = by_slot.std(-1, correction=0).argsort(descending=True)[:limit].tolist()
    return [Tile(f"head {i // slots}, " * (heads > 1) + f"slot {i % slots}", by_slot[i].view(grid)) for i in chosen]


def _gate_tiles(matrix: Tensor, grid: tuple[int, int], limit: int) -> list[Tile]:
    """The gate (N, N) is the same for every image."""
    height, width = grid
    centre = (height // 2) * width + width // 2
    others = torch.linspace(0, height * width - 1, max(2, limit - 1)).long().tolist()
    chosen = list(dict.fromkeys([centre, *others]))[: limit - 1]
    rows = [Tile(f"row of token {i}", matrix[i].view(grid), signed=True, mark=(i // width, i % width)) for i in chosen]
    return [Tile("whole matrix", matrix, signed=True, on_image=False), *rows]
