"""The equations of external attention on a tile: some heads, some of their tokens.

Per Sinkhorn step k = 1..K, with r^0 = 0 and P the map:

    L^k_j = logsumexp_i (a_ij - r^(k-1)_i)      one number per slot, merged over tiles
    r^k_i = logsumexp_j (a_ij - L^k_j)          one number per token, made again in each tile
    P_ij  = exp(a_ij - L^K_j - r^K_i)

and back, with g^k the gradient of L^k, C^k_ij = exp(a_ij - r^(k-1)_i - L^k_j) and R^k_ij = exp(a_ij - L^k_j - r^k_i):

    u^K = P * (dP - rowsum(dP * P))             what reaches a through a - L^K
    u^k = -R^k * rowsum(g^(k+1) * C^(k+1))      what reaches a through r^k
    g^k = -sum_i u^k_i
    da  = sum_k (u^k + g^k * C^k)

So K passes over the tokens collect the sums over i, and one more emits. K = 0 is the plain softmax over slots. Where
one tile holds all tokens, its logits are made once and serve every pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Heads", "HeadsBackward", "Tile", "project"]


@dataclass(frozen=True)
class Tile:
    """Some tokens of some heads: their place in the sequence, wide logits (g, n, S), who takes part (g, n, 1)."""

    place: slice
    logits: Tensor
    mask: Tensor | None
    through_map: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """What `HeadsBackward.through_map` found; it is asked for twice, and lives as long as the tile."""

    def keep(self, values: Tensor, filler: float = 0.0) -> Tensor:
        return values if self.mask is None else values.masked_fill(~self.mask, filler)

    def rows(self, offset: Tensor) -> Tensor:
        """r^k of the tokens, (g, n, 1), from L^k."""
        return torch.logsumexp(self.logits - offset, dim=-1, keepdim=True)

    def shares(self, offset: Tensor | None) -> Tensor:
        """R^k of the tokens, from L^k; the map P from L^K."""
        if offset is None:
            return self.keep(torch.softmax(self.logits, dim=-1))
        shifted = self.logits - offset
        return self.keep(torch.softmax(shifted, dim=-1, out=shifted))

    def last_shares(self, offset: Tensor | None) -> Tensor:
        """The same in place of the logits, which are gone then: one buffer less in the cache."""
        if offset is not None:
            self.logits.sub_(offset)
        return self.keep(torch.softmax(self.logits, dim=-1, out=self.logits))

    def columns(self, before: Tensor | None, offset: Tensor) -> Tensor:
        """C^k of the tokens, from L^(k-1) and L^k."""
        shifted = self.logits - offset
        if before is not None:
            shifted -= self.rows(before)
        return self.keep(shifted.exp_())

    def offset(self, before: Tensor | None) -> Tensor:
        """The tile's part of L^k, (g, 1, S), from L^(k-1)."""
        logits = self.logits if before is None else self.logits - self.rows(before)
        return _sum_of_exponentials(self.keep(logits, -torch.inf))


@dataclass(frozen=True)
class Heads:
    """Some heads, `query` (g, N, d), in tiles of `size` tokens. `mask` is (g, N)."""

    query: Tensor
    key_memory: Tensor
    key_bias: Tensor | None
    mask: Tensor | None
    size: int

    def __iter__(self) -> Iterator[Tile]:
        num_tokens = self.query.shape[1]
        if num_tokens <= self.size:
            yield self._whole
            return
        for start in range(0, num_tokens, self.size):
            yield self._tile(slice(start, min(start + self.size, num_tokens)))

    @cached_property
    def _whole(self) -> Tile:
        return self._tile(slice(0, self.query.shape[1]))

    def _tile(self, place: slice) -> Tile:
        logits = project(self.query[:, place], self.key_memory.mT, self.key_bias)
        mask = None if self.mask is None else self.mask[:, place].unsqueeze(-1)
        return Tile(place, logits.to(torch.promote_types(logits.dtype, torch.float32)), mask)

    def offsets(self, num_steps: int) -> list[Tensor]:
        """L^1 .. L^K, (g, 1, S) each, one pass over the tokens for each."""
        offsets: list[Tensor] = []
        for _ in range(num_steps):
            before = offsets[-1] if offsets else None
            total = None
            for tile in self:
                part = tile.offset(before)
                total = part if total is None else torch.logaddexp(total, part)
            assert total is not None
            # Where no token takes part any finite number will do.
            offsets.append(total.masked_fill(torch.isneginf(total), 0.0))
        return offsets


@dataclass(frozen=True)
class HeadsBackward:
    """The gradient of a tile's logits, given the sums over tokens so far: sums[k] is g^(k+1)."""

    heads: Heads
    value_memory: Tensor
    grad: Tensor
    offsets: list[Tensor]

    def through_map(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """P, u^K and the output's gradient where it counts."""
        if not tile.through_map:
            shares = tile.shares(self.offsets[-1] if self.offsets else None)
            grad = tile.keep(self.grad[:, tile.place])
            weighted = project(grad, self.value_memory.mT, None).to(shares.dtype).mul_(shares)
            through = weighted.addcmul_(shares, weighted.sum(-1, keepdim=True), value=-1.0)
            tile.through_map.append((shares, through, grad))
        return tile.through_map[0]

    def columns(self, tile: Tile, k: int) -> Tensor:
        return tile.columns(self.offsets[k - 1] if k else None, self.offsets[k])

    def through_rows(self, tile: Tile, k: int, sums: dict[int, Tensor]) -> Tensor:
        grad_rows = (sums[k + 1] * self.columns(tile, k + 1)).sum(-1, keepdim=True)
        return tile.shares(self.offsets[k]) * -grad_rows

    def sums(self) -> dict[int, Tensor]:
        """g of every step, the last step first, one pass over the tokens for each."""
        sums: dict[int, Tensor] = {}
        last = len(self.offsets) - 1
        for k in range(last, -1, -1):
            total = torch.zeros_like(self.offsets[k])
            for tile in self.heads:
                up = self.through_map(tile)[1] if k == last else self.through_rows(tile, k, sums)
                total -= up.sum(-2, keepdim=True)
            sums[k] = total
        return sums

    def logits(self, tile: Tile, through_map: Tensor, sums: dict[int, Tensor]) -> Tensor:
        """da of the tile, in place of `through_map`."""
        grad = through_map
        for k in range(len(self.offsets)):
            grad.addcmul_(sums[k], self.columns(tile, k))
            if k + 1 < len(self.offsets):
                grad += self.through_rows(tile, k, sums)
        return grad


def project(rows: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """rows (g, n, a) matrix (a, b) + bias (b,), without a copy of rows or out that are views of interleaved heads."""
    every = matrix.expand(rows.shape[0], -1, -1)
    if bias is None:
        return torch.bmm(rows, every, out=out)
    return torch.baddbmm(bias.expand(1, 1, -1), rows, every, out=out)


def _sum_of_exponentials(logits: Tensor) -> Tensor:
    """logsumexp over the tokens, (g, 1, S).

    On a CPU first without the shift by the largest, which costs two passes of its own: right to the last bits where
    no sum comes near the ends of the number range. Elsewhere looking at the sums would cost more than it saves.
    """
    if logits.device.type == "cpu":
        sums = torch.exp(logits).sum(-2, keepdim=True)
        low, high = torch.aminmax(sums)
        if low > torch.finfo(sums.dtype).tiny ** 0.5 and high.isfinite():
            return sums.log_()
    return torch.logsumexp(logits, dim=-2, keepdim=True)
