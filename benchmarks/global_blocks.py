"""Parameters and multiply-adds of eight blocks with global context on a map of 512 x 128 x 128, the paper's table.

The blocks are written from their papers and public code for counting: `python benchmarks/global_blocks.py` prints the
table of dev/first_evidence.md. Nothing is computed; the map lies on the meta device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tokenmix.layers import ExternalAttention2d

DIM, SIDE, SLOTS, CLASSES = 512, 128, 64, 21


def conv(kernel_size: int = 1) -> nn.Sequential:
    """Convolution that keeps the width, norm and ReLU."""
    inner = nn.Conv2d(DIM, DIM, kernel_size, padding=kernel_size // 2, bias=False)
    return nn.Sequential(inner, nn.BatchNorm2d(DIM), nn.ReLU())


class SelfAttention(nn.Module):
    """Queries, keys, values and output, all of the full width; Wang et al., 2018, with one head."""

    def __init__(self, key_dim: int = DIM, output: bool = True) -> None:
        super().__init__()
        self.query, self.key = nn.Conv2d(DIM, key_dim, 1), nn.Conv2d(DIM, key_dim, 1)
        self.value = nn.Conv2d(DIM, DIM, 1)
        self.out = nn.Conv2d(DIM, DIM, 1) if output else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).flatten(2) for layer in (self.query, self.key, self.value))
        weights = (query.mT @ key).softmax(2)
        return x + self.out((value @ weights.mT).view_as(x))


class DualAttention(nn.Module):
    """DANet, Fu et al., 2019: attention over positions and over channels, each after a 3 x 3 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.positions = conv(3), conv(3), SelfAttention(DIM // 8, output=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(x).flatten(2)
        channels = (y @ y.mT).softmax(2) @ y
        return self.positions(self.first(x)) + channels.view_as(x)


class DoubleAttention(nn.Module):
    """A2-Net, Chen et al., 2018: features gathered in maps, and given out by other maps."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Conv2d(DIM, DIM, 1) for _ in range(3))
        self.out = nn.Conv2d(DIM, DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        features, gather, give = (part(x).flatten(2) for part in self.parts)
        return x + self.out((features @ gather.softmax(2).mT @ give.softmax(1)).view_as(x))


class AdaptiveContext(nn.Module):
    """APCNet, He et al., 2019: at each scale s, weights from local and global features for s x s pooled regions."""

    def __init__(self, scales: tuple[int, ...] = (3, 6)) -> None:
        super().__init__()
        self.scales = scales
        self.steps = nn.ModuleList(
            nn.ModuleDict({name: conv() for name in ("pooled", "local", "whole", "last")}) for _ in scales
        )
        self.weights = nn.ModuleList(nn.Conv2d(DIM, scale**2, 1) for scale in scales)

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for scale, step, weigh in zip(self.scales, self.steps, self.weights, strict=True):
            assert isinstance(step, nn.ModuleDict)
            pooled = step["pooled"](F.adaptive_avg_pool2d(x, scale)).flatten(2)
            local = step["local"](x)
            weights = weigh(local + step["whole"](F.adaptive_avg_pool2d(local, 1))).flatten(2).sigmoid()
            total = total + F.relu(step["last"]((pooled @ weights).view_as(x)) + local)
        return total


class DynamicFilters(nn.Module):
    """DMNet, He et al., 2019: depthwise convolutions whose kernels are made from the pooled map."""

    def __init__(self, sizes: tuple[int, ...] = (1, 3, 5, 7)) -> None:
        super().__init__()
        self.sizes = sizes
        self.filters = nn.ModuleList(nn.Conv2d(DIM, DIM, 1) for _ in sizes)
        self.first, self.last = nn.ModuleList(conv() for _ in sizes), nn.ModuleList(conv() for _ in sizes)

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for size, make, first, last in zip(self.sizes, self.filters, self.first, self.last, strict=True):
            kernel = make(F.adaptive_avg_pool2d(x, size)).transpose(0, 1)
            total = total + last(F.conv2d(first(x), kernel, padding=size // 2, groups=DIM).relu())
        return total


class ClassFeatures(nn.Module):
    """ACFNet, Zhang et al., 2019: centres of classes by a coarse prediction, which is given, and back to positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own, self.out = conv(), conv(), nn.Conv2d(DIM, DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        coarse = x.new_empty(1, CLASSES, SIDE * SIDE)
        centres = self.first(x).flatten(2) @ coarse.softmax(2).mT
        return self.own(x) + self.out((centres @ coarse.softmax(1)).view_as(x))


class Hamburger(nn.Module):
    """Hamburger, Geng et al., 2021: non-negative matrix factors of 64 bases between two convolutions, 7 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.Conv2d(DIM, DIM, 1), nn.Conv2d(DIM, DIM, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lower(x).relu().flatten(2)
        bases = y.new_empty(1, DIM, SLOTS)
        shares = (y.mT @ bases).softmax(2)
        for _ in range(7):
            shares = shares * (y.mT @ bases) / (shares @ (bases.mT @ bases) + 1e-6)
            bases = bases * (y @ shares) / (bases @ (shares.mT @ shares) + 1e-6)
        return x + self.upper((bases @ shares.mT).view_as(x))


@dataclass(frozen=True)
class Row:
    """One column of the paper's table: what is printed there, 10^6 or 2^20 parameters and 10^9 multiply-adds."""

    name: str
    build: Callable[[], nn.Module]
    parameters: float
    macs: float

    def count(self) -> tuple[int, int]:
        """Parameters and multiply-adds."""
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            block = self.build().eval()
            block(torch.empty(1, DIM, SIDE, SIDE))
        return sum(p.numel() for p in block.parameters()), counter.get_total_flops() // 2


ROWS = (
    Row("self-attention", SelfAttention, 1.00, 292),
    Row("DANet", DualAttention, 4.82, 79.5),
    Row("A²", DoubleAttention, 1.01, 25.7),
    Row("APC", AdaptiveContext, 2.03, 17.6),
    Row("DM", DynamicFilters, 3.00, 35.1),
    Row("ACF", ClassFeatures, 0.75, 79.5),
    Row("Hamburger", Hamburger, 0.50, 17.6),
    Row("external", lambda: ExternalAttention2d(DIM, num_slots=SLOTS, tie="hard"), 0.55, 9.2),
)


def table() -> str:
    """The table in Markdown; parameters in units of 2^20, as the paper's fit best."""
    lines = ["| block | parameters | printed | multiply-adds | printed |", "|---|---:|---:|---:|---:|"]
    for row in ROWS:
        parameters, macs = row.count()
        ours = f"{parameters / 2**20:.2f} Mi | {row.parameters:.2f} M | {macs / 1e9:.1f} G | {row.macs:g} G"
        lines.append(f"| {row.name} | {ours} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
