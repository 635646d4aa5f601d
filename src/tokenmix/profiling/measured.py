"""What is timed and counted: a layer or a model with its input."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.layers.base import Mixer, count_parameters
from tokenmix.ops.less import Scores


@dataclass(frozen=True)
class Measured:
    """Something built, with its input, and for a layer the scores that the layer before would pass it."""

    module: nn.Module
    x: Tensor
    carry: Scores | None = None

    def _run(self, x: Tensor) -> Tensor:
        return self.module.mix(x, self.carry)[0] if isinstance(self.module, Mixer) else self.module(x)

    @torch.no_grad()
    def forward(self) -> Tensor:
        """One pass without gradients."""
        return self._run(self.x)

    def step(self) -> None:
        """One pass forward and back, to the weights, and to tokens but not to images; the gradients are dropped."""
        x = self.x.detach().requires_grad_(isinstance(self.module, Mixer))
        self._run(x).float().square().mean().backward()
        self.module.zero_grad(set_to_none=True)

    def parameters(self) -> int:
        """Learned numbers."""
        return count_parameters(self.module)

    def macs(self) -> int:
        """Multiply-adds, from the equations; of another's model counted."""
        if isinstance(self.module, Mixer):
            return self.module.macs(self.x.numel() // self.x.shape[0] // self.module.dim)
        from tokenmix.swap.probe import model_macs

        macs: Any = getattr(self.module, "macs", None)
        return model_macs(self.module, (self.x,)) if macs is None else macs()

    def traffic(self) -> int:
        """The least number of bytes that must move: input, weights, output and the scores passed on, each once."""
        out = self.x if isinstance(self.module, Mixer) else self.forward()
        scores = 0 if self.carry is None else self.carry.query.nbytes + self.carry.key.nbytes
        return self.x.nbytes + out.nbytes + sum(p.nbytes for p in self.module.parameters()) + scores
