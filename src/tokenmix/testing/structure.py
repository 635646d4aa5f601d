"""What one layer with random weights depends on: the measured reasons for what a mixer cannot do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tokenmix.errors import UserError
from tokenmix.testing.harness import Builder, awake
from tokenmix.testing.properties.tokens import influence

HARDLY = 1e-3
"""Share of the other tokens in an output's changes below which a layer hardly mixes."""
_FEW = f"the other tokens make up less than {HARDLY:.1%} of what changes an output"
NARROW = 0.5
"""Share of the numbers that half of the tokens hold below which little passes to the other half."""


@dataclass(frozen=True)
class Structure:
    """What an output of one layer depends on, of tokens of random numbers.

    Attributes:
        tokens: number of tokens that the layer was tried with.
        reach: largest distance between two tokens of which one changes the other's output; 0 mixes nothing.
        others: share of the other tokens in what changes an output.
        passed: numbers that pass from the second half of the tokens to the first: rank of the derivative.
        held: numbers that half of the tokens hold.
        follows: `"content"` if the influence of tokens that change places goes with them, else `"place"`; None for a
            layer that mixes nothing.
        slots: the layer declares that tokens attend to slots.
        leaks: a sample's output changes with the other samples of the batch, in evaluation mode.
    """

    tokens: int
    reach: int
    others: float
    passed: int
    held: int
    follows: Literal["place", "content"] | None
    slots: bool
    leaks: bool

    def sentence(self) -> str:
        """What is wrong or special; empty if each token can see all others."""
        if self.leaks:
            return "leaks across samples: an output changes with the other samples of the batch"
        if self.reach == 0:
            return "mixes nothing: each output depends on its own token alone"
        if self.others < HARDLY:
            return f"hardly mixes: {_FEW}"
        if self.reach < self.tokens - 1:
            return f"sees only neighbours: one layer reaches {self.reach} of {self.tokens - 1} tokens"
        return ""

    def reason(self, distance: int, needs: str, depth: int) -> str:
        """Why `depth` such layers fail at a task with this `distance` and `needs`; empty if nothing measured tells."""
        if self.reach == 0:
            return "each output depends on its own token alone"
        if self.others < HARDLY:
            return _FEW
        if self.reach < self.tokens - 1 and self.reach * depth < distance:
            return f"{depth} layers reach {self.reach * depth} tokens far, and {distance} are asked for"
        if needs == "content" and self.passed < NARROW * self.held:
            memory = "its memory is the same for every sample" if self.slots else "its passage is narrow"
            return f"{memory} ({self.passed} of {self.held} numbers pass from one half of the tokens to the other)"
        if needs == "content" and self.follows == "place":
            return "which tokens an output listens to depends on their places"
        if needs == "place" and self.follows == "content":
            return "which tokens an output listens to depends on what they hold, not on their places"
        return ""


def look(build: Callable[[], nn.Module], label: str, num_tokens: int, dim: int) -> Structure:
    """Change one token, the order of the tokens, or another sample, and see which outputs change."""
    layer = awake(Builder(build)).double().requires_grad_(False)
    x, other, third = torch.randn(3, 1, num_tokens, dim, generator=torch.Generator().manual_seed(0)).double()
    if (found := layer(x)).shape != x.shape:
        raise UserError(f"{label} gives {tuple(found.shape)} for tokens {tuple(x.shape)}; a mixer keeps the shape")
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(1))
    seen, moved = influence(layer, x), influence(layer, x[:, order])
    distance = (torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)).abs()
    apart = distance > 0
    stays, goes = ((moved - seen) * apart).norm(), ((moved - seen[order][:, order]) * apart).norm()
    reach, half = int((distance * (seen > 0)).max()), num_tokens // 2
    passed = torch.autograd.functional.jacobian(
        lambda late: layer(torch.cat([x[:, :half], late], 1))[:, :half].flatten(), x[:, half:]
    )
    declared = getattr(layer, "capabilities", None)
    return Structure(
        tokens=num_tokens,
        reach=reach,
        others=float((seen * apart).sum() / seen.sum().clamp_min(1e-300)),
        passed=int(torch.linalg.matrix_rank(passed.flatten(1), rtol=1e-9)) if reach else 0,
        held=half * dim,
        follows=None if reach == 0 else "content" if goes < stays / 4 else "place",
        slots=getattr(declared, "map", None) == "slots",
        leaks=not torch.allclose(layer(torch.cat([x, other]))[0], layer(torch.cat([x, third]))[0], atol=1e-9),
    )
