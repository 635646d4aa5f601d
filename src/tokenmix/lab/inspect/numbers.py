"""Numbers that say how a map is used: spread, saturation, agreement with the layer before."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmix.models import BlockMap


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

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def map_numbers(maps: list[BlockMap]) -> list[MapNumbers]:
    """The numbers of each block's map, from the first block to the last."""
    before = [None, *maps[:-1]]
    return [_numbers(block, previous) for block, previous in zip(maps, before)]


def _numbers(block: BlockMap, previous: BlockMap | None) -> MapNumbers:
    rows = _rows(block)
    square = block.kind != "slots" and rows.shape[-1] == rows.shape[-2]
    return MapNumbers(
        name=block.name,
        kind=block.kind,
        shape=tuple(block.map.shape),
        entropy=_entropy(rows).mean().item() / math.log(max(2, rows.shape[-1])),
        effective_columns=_entropy(rows.mean(-2)).exp().mean().item(),
        saturation=rows.amax(-1).mean().item(),
        diagonality=rows.diagonal(dim1=-2, dim2=-1).mean().item() if square else None,
        distance=None if previous is None else _distance(rows, _rows(previous)),
    )


def _rows(block: BlockMap) -> Tensor:
    """(B, H, N, S) in float64, nonnegative, each row summing to 1 (a masked token's row of zeros stays)."""
    values = block.map.detach().double().abs()
    values = values.reshape(1, 1, *values.shape) if values.dim() == 2 else values
    total = values.sum(-1, keepdim=True)
    return values / total.where(total > 0, 1.0)


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


def _distance(rows: Tensor, previous: Tensor) -> float | None:
    """1 - CKA, the mean over images; the heads' columns are side by side as the features of a token."""
    size = max(rows.shape[0], previous.shape[0])
    mine, other = (_features(r).expand(size, -1, -1) for r in (rows, previous))
    if mine.shape[1] != other.shape[1]:
        return None
    shared = (mine.transpose(1, 2) @ other).square().sum((1, 2))
    norms = [(f.transpose(1, 2) @ f).square().sum((1, 2)).sqrt() for f in (mine, other)]
    scale = norms[0] * norms[1]
    # Rows that are all alike leave nothing after centring but rounding.
    if (scale < 1e-20).any():
        return None
    return (1 - shared / scale).mean().item()


def _features(rows: Tensor) -> Tensor:
    """(B, H, N, S) to (B, N, H*S), centred over the tokens."""
    flat = rows.permute(0, 2, 1, 3).flatten(2)
    return flat - flat.mean(1, keepdim=True)
