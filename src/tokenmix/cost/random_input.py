"""One mixer with the input that it would get inside a stack, ready to be counted, timed and watched."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmix.layers.base import Mixer, count_parameters, near_square
from tokenmix.layers.table import build_mixer, create_mixer, get_spec
from tokenmix.ops.less import Scores


@dataclass(frozen=True)
class MixerWithInput:
    """A layer, tokens or a map that it takes, and the scores that the layer before would pass it."""

    layer: Mixer
    x: Tensor
    carry: Scores | None

    @torch.no_grad()
    def forward(self) -> Tensor:
        """One pass without gradients."""
        return self.layer.mix(self.x, self.carry)[0]

    def step(self) -> None:
        """One pass forward and back, to the weights and to the input; the gradients are dropped."""
        x = self.x.detach().requires_grad_()
        self.layer.mix(x, self.carry)[0].float().square().mean().backward()
        self.layer.zero_grad(set_to_none=True)

    def parameters(self) -> int:
        """Learned numbers."""
        return count_parameters(self.layer)

    def macs(self) -> int:
        """Multiply-adds, from the equation."""
        return self.layer.macs(self.x.numel() // self.x.shape[0] // self.layer.dim)

    def traffic(self) -> int:
        """The least number of bytes that must move: input, weights and output once, and the scores passed on."""
        weights = sum(p.nbytes for p in self.layer.parameters())
        handed_on = 0 if self.carry is None else self.carry.query.nbytes + self.carry.key.nbytes
        return 2 * self.x.nbytes + weights + handed_on


def layer_for(name: str, dim: int, num_tokens: int, **kwargs: Any) -> Mixer:
    """The mixer as it is used inside a stack; `kwargs` go to the layers that have such arguments."""
    spec = get_spec(name)
    known = {**_known(spec.layer, kwargs), **spec.later}
    return create_mixer(name, dim, num_tokens=num_tokens, **known)


def mixer_with_input(
    name: str,
    dim: int,
    num_tokens: int,
    *,
    batch_size: int = 1,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> MixerWithInput:
    """Build a mixer and random input for it. In a stack whose layers pass scores on, the layer before is run once."""
    kwargs = {**kwargs, "device": device, "dtype": dtype}
    spec, layer = get_spec(name), layer_for(name, dim, num_tokens, **kwargs)
    x = torch.randn(batch_size, num_tokens, dim, device=device, dtype=dtype)
    if layer.capabilities.layout == "2d":
        x = x.transpose(1, 2).unflatten(2, near_square(num_tokens)).contiguous()
    carry = None
    if spec.leader is not None:
        leader = build_mixer(spec.leader, f"the leader of {name!r}", dim, num_tokens, _known(spec.leader, kwargs))
        with torch.no_grad():
            carry = leader.mix(x)[1]
    return MixerWithInput(layer, x, carry)


def _known(layer: type[Mixer], offered: Mapping[str, Any]) -> dict[str, Any]:
    accepted = inspect.signature(layer).parameters
    return {name: value for name, value in offered.items() if name in accepted and value is not None}
