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

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class MapGradient(NamedTuple):
    """C^K, P, u^K and the output's gradient where it counts."""

    columns: Tensor | None
    shares: Tensor
    through: Tensor
    grad: Tensor


@dataclass(frozen=True)
class TokenTile:
    """Some tokens of some heads: their place in the sequence, wide logits (b, g, n, S), who takes part (b, g, n, 1)."""

    place: slice
    logits: Tensor
    mask: Tensor | None
    map_gradient: list[MapGradient] = field(default_factory=list)
    """What `HeadsBackward.map_gradient` found; it is asked for twice, and lives as long as the tile."""

    def keep(self, values: Tensor, filler: float = 0.0) -> Tensor:
        return values if self.mask is None else values.masked_fill(~self.mask, filler)

    def rows(self, offset: Tensor) -> Tensor:
        """r^k of the tokens, (b, g, n, 1), from L^k."""
        return torch.logsumexp(self.logits - offset, dim=-1, keepdim=True)

    def shares(self, offset: Tensor | None) -> Tensor:
        """R^k of the tokens, from L^k; the map P from L^K."""
        return self.keep(_softmax_(self.logits.clone() if offset is None else self.logits - offset))

    def last_shares(self, offset: Tensor | None) -> Tensor:
        """The same in place of the logits, which are gone then: one buffer less in the cache."""
        if offset is not None:
            self.logits.sub_(offset)
        return self.keep(_softmax_(self.logits))

    def only_step(self) -> tuple[Tensor, Tensor] | None:
        """P and L^1 of a tile that holds all tokens, in place of the logits, which are gone then.

        One exponential an entry, without shift: right to the last bits where no sum comes near the ends of the number
        range, else None.
        """
        exponentials = self._kept(self.logits.exp_())
        sums = exponentials.sum(-2, keepdim=True)
        if not _in_range(sums):
            return None
        shares = self.shares_of_columns(exponentials.div_(sums), into=exponentials)
        return None if shares is None else (shares, sums.log_())

    def columns(self, before: Tensor | None, offset: Tensor) -> Tensor:
        """C^k of the tokens, from L^(k-1) and L^k."""
        shifted = self.logits - offset
        if before is not None:
            shifted -= self.rows(before)
        return self._kept(shifted.exp_())

    def shares_of_columns(self, columns: Tensor, into: Tensor | None = None) -> Tensor | None:
        """R^k from C^k, which differ by a factor for each row; None where a row has underflown, or nearly."""
        rows = self.keep(columns.sum(-1, keepdim=True), 1.0)
        # With columns' sums of at least tiny^(1/2), what underflows in a row is less than tiny^(1/4) of it.
        if rows.numel() and not rows.amin().item() > torch.finfo(rows.dtype).tiny ** 0.25:
            return None
        return torch.div(columns, rows, out=into)

    def offset(self, before: Tensor | None) -> Tensor:
        """The tile's part of L^k, (b, g, 1, S), from L^(k-1)."""
        logits = self.logits if before is None else self.logits - self.rows(before)
        return _sum_of_exponentials(self.keep(logits, -torch.inf))

    def _kept(self, values: Tensor) -> Tensor:
        """`keep` in place."""
        return values if self.mask is None else values.masked_fill_(~self.mask, 0.0)


@dataclass(frozen=True)
class Heads:
    """Some heads, `query` (b, g, N, d), in tiles of `size` tokens. `mask` is (b, g, N).

    `interleaved` says that the numbers lie as (b, N, g, d) does, and that what is made from them should as well.
    """

    query: Tensor
    key_memory: Tensor
    key_bias: Tensor | None
    mask: Tensor | None
    size: int
    interleaved: bool

    def __iter__(self) -> Iterator[TokenTile]:
        if self.is_one_tile:
            yield self._whole
            return
        for start in range(0, self.num_tokens, self.size):
            yield self.tile(slice(start, min(start + self.size, self.num_tokens)))

    @property
    def num_tokens(self) -> int:
        return self.query.shape[2]

    @property
    def is_one_tile(self) -> bool:
        return self.num_tokens <= self.size

    @cached_property
    def _whole(self) -> TokenTile:
        return self.tile(slice(0, self.num_tokens))

    def tile(self, place: slice) -> TokenTile:
        logits = self.project(self.query[:, :, place], self.key_memory, self.key_bias)
        mask = None if self.mask is None else self.mask[:, :, place].unsqueeze(-1)
        return TokenTile(place, logits.to(torch.promote_types(logits.dtype, torch.float32)), mask)

    def project(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """rows (b, g, n, a) weight^T (a, c) + bias (c,)."""
        found, width = F.linear(self._list(rows), weight, bias), weight.shape[0]
        if not self.interleaved:
            return found.view(*rows.shape[:3], width)
        return found.view(rows.shape[0], rows.shape[2], rows.shape[1], width).transpose(1, 2)

    def project_into(self, out: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """`project`, written into `out` (b, g, n, c)."""
        flat = out.transpose(1, 2) if self.interleaved else out
        if not flat.is_contiguous():
            out.copy_(self.project(rows, weight, bias))
        elif bias is None:
            torch.mm(self._list(rows), weight.mT, out=flat.view(-1, out.shape[-1]))
        else:
            torch.addmm(bias, self._list(rows), weight.mT, out=flat.view(-1, out.shape[-1]))

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """The sum over heads and tokens (b, g, n, a)^T (b, g, n, c), (a, c)."""
        return self._list(left).mT @ self._list(right)

    def _list(self, rows: Tensor) -> Tensor:
        """All heads' tokens one after the other (b g n, a), without a copy if they are stored like that."""
        count = rows.shape[:3].numel()
        return (rows.transpose(1, 2) if self.interleaved else rows).reshape(count, rows.shape[-1])

    def only_step(self) -> tuple[Tensor, Tensor] | None:
        """P and L^1 of all tokens, if that can be had in one go, see `TokenTile.only_step`."""
        # Elsewhere than on a CPU looking at the sums would cost more than it saves.
        if self.query.device.type != "cpu" or not self.is_one_tile:
            return None
        return self.tile(slice(0, self.num_tokens)).only_step()

    def offsets(self, num_steps: int) -> list[Tensor]:
        """L^1 .. L^K, (b, g, 1, S) each, one pass over the tokens for each."""
        offsets: list[Tensor] = []
        for _ in range(num_steps):
            before = offsets[-1] if offsets else None
            total = None
            for tile in self:
                total = tile.offset(before) if total is None else torch.logaddexp(total, tile.offset(before))
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

    def map_gradient(self, tile: TokenTile) -> MapGradient:
        if not tile.map_gradient:
            columns, shares = self._columns_and_shares(tile)
            grad = tile.keep(self.grad[:, :, tile.place])
            weighted = self.heads.project(grad, self.value_memory).to(shares.dtype).mul_(shares)
            through = weighted.addcmul_(shares, weighted.sum(-1, keepdim=True), value=-1.0)
            tile.map_gradient.append(MapGradient(columns, shares, through, grad))
        return tile.map_gradient[0]

    def _columns_and_shares(self, tile: TokenTile) -> tuple[Tensor | None, Tensor]:
        if not self.offsets:
            return None, tile.shares(None)
        columns = self.columns(tile, len(self.offsets) - 1)
        shares = tile.shares_of_columns(columns) if columns.device.type == "cpu" else None
        return columns, tile.shares(self.offsets[-1]) if shares is None else shares

    def columns(self, tile: TokenTile, k: int) -> Tensor:
        return tile.columns(self.offsets[k - 1] if k else None, self.offsets[k])

    def through_rows(self, tile: TokenTile, k: int, sums: dict[int, Tensor]) -> Tensor:
        grad_rows = (sums[k + 1] * self.columns(tile, k + 1)).sum(-1, keepdim=True)
        return tile.shares(self.offsets[k]) * -grad_rows

    def sums(self) -> dict[int, Tensor]:
        """g of every step, the last step first, one pass over the tokens for each."""
        sums: dict[int, Tensor] = {}
        last = len(self.offsets) - 1
        for k in range(last, -1, -1):
            total = torch.zeros_like(self.offsets[k])
            for tile in self.heads:
                up = self.map_gradient(tile).through if k == last else self.through_rows(tile, k, sums)
                total -= up.sum(-2, keepdim=True)
            sums[k] = total
        return sums

    def logits(self, tile: TokenTile, sums: dict[int, Tensor]) -> Tensor:
        """da of the tile, in place of u^K."""
        columns, _, grad, _ = self.map_gradient(tile)
        if columns is not None:
            grad.addcmul_(sums[len(self.offsets) - 1], columns)
        for k in range(len(self.offsets) - 1):
            grad.addcmul_(sums[k], self.columns(tile, k))
            grad += self.through_rows(tile, k, sums)
        return grad


def _softmax_(logits: Tensor) -> Tensor:
    """The softmax over slots in place, which PyTorch computes only of what lies in order."""
    ordered = logits if logits.is_contiguous() else logits.transpose(1, 2)
    torch.softmax(ordered, dim=-1, out=ordered)
    return logits


def _in_range(sums: Tensor) -> bool:
    if sums.numel() == 0:
        return True
    low, high = (end.item() for end in torch.aminmax(sums))
    return low > torch.finfo(sums.dtype).tiny ** 0.5 and high < math.inf


def _sum_of_exponentials(logits: Tensor) -> Tensor:
    """logsumexp over the tokens, (b, g, 1, S).

    On a CPU first without the shift by the largest, which costs two passes of its own: right to the last bits where
    no sum comes near the ends of the number range. Elsewhere looking at the sums would cost more than it saves.
    """
    if logits.device.type == "cpu":
        sums = torch.exp(logits).sum(-2, keepdim=True)
        if _in_range(sums):
            return sums.log_()
    return torch.logsumexp(logits, dim=-2, keepdim=True)
