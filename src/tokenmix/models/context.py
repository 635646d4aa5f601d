"""The attention block on a backbone's last map: the EANet block, the same with another mixer, or none."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Mixer, zero_masked
from tokenmix.layers.external import ExternalAttention2d
from tokenmix.layers.table import create_mixer, get_spec
from tokenmix.ops.attention import attention, attention_probabilities


class SelfAttention2d(Mixer):
    """The EANet block with self-attention in place of external attention.

        Q, K, V = conv1(X)                                      1 x 1, with bias
        out     = relu(X + BN(conv2(softmax(Q K^T / sqrt(D)) V)))   1 x 1, without bias

    Paper: the "self-attention" row in Guo et al., arXiv 2105.02358, has four projections of D x D; so has this.
    Residual, norm and ReLU are the block's, so that the variants only differ in their attention. One head, as there.

    Shapes: x (B, dim, H, W); mask (B, H * W) bool; map (B, 1, H * W, H * W), which `forward` never writes.

    Raises:
        UserError: input that does not fit.
    """

    capabilities = Capabilities(layout="2d", map="tokens", independent=False)

    def __init__(self, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.conv1 = nn.Conv2d(dim, 3 * dim, 1, device=device, dtype=dtype)
        self.conv2 = nn.Conv2d(dim, dim, 1, bias=False, device=device, dtype=dtype)
        self.norm = nn.BatchNorm2d(dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, dim, H, W) to (B, dim, H, W)."""
        x, mask = self.checked(x, mask)
        mixed = attention(*self._pixels(x), mask=mask).squeeze(1).transpose(1, 2).unflatten(2, x.shape[2:])
        return zero_masked(F.relu(x + self.norm(self.conv2(mixed))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """A (B, 1, H * W, H * W)."""
        x, mask = self.checked(x, mask)
        query, key, _ = self._pixels(x)
        return attention_probabilities(query, key, mask=mask)

    def macs(self, num_tokens: int) -> int:
        """4 N D^2 + 2 N^2 D for N = H * W pixels."""
        return 4 * num_tokens * self.dim**2 + 2 * num_tokens**2 * self.dim

    def _pixels(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.conv1(x).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)
        return query, key, value


class MixerBlock2d(Mixer):
    """The EANet block with any mixer in place of external attention.

        out = relu(X + BN(conv(mixer(X))))   1 x 1, without bias

    The mixer gets the pixels as tokens, row by row, or the map itself if it takes maps. With `identity` this is the
    block without mixing.

    Args:
        mixer: a mixer that learns no matrix over tokens, since maps differ in size.

    Shapes: x (B, dim, H, W); mask (B, H * W) bool.
    """

    def __init__(self, mixer: Mixer, *, device: torch.device | str | None = None, dtype: Any = None) -> None:
        super().__init__()
        self.dim, self.mixer = mixer.dim, mixer
        self.conv = nn.Conv2d(self.dim, self.dim, 1, bias=False, device=device, dtype=dtype)
        self.norm = nn.BatchNorm2d(self.dim, device=device, dtype=dtype)

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """The mixer's, on maps and with BatchNorm."""
        return replace(self.mixer.capabilities, layout="2d", independent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, dim, H, W) to (B, dim, H, W)."""
        x, mask = self.checked(x, mask, weight=self.conv.weight)
        mixed = self.mixer(self._given(x), mask)
        if self.mixer.capabilities.layout != "2d":
            mixed = mixed.transpose(1, 2).unflatten(2, x.shape[2:])
        return zero_masked(F.relu(x + self.norm(self.conv(mixed))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mixer's own."""
        x, mask = self.checked(x, mask, weight=self.conv.weight)
        return self.mixer.attention_map(self._given(x), mask)

    def macs(self, num_tokens: int) -> int:
        """The mixer's, and N D^2."""
        return self.mixer.macs(num_tokens) + num_tokens * self.dim**2

    def _given(self, x: Tensor) -> Tensor:
        return x if self.mixer.capabilities.layout == "2d" else x.flatten(2).transpose(1, 2)


def make_context(name: str, dim: int, options: Mapping[str, Any], factory: Mapping[str, Any]) -> nn.Module:
    """The block of that name: external, self, none, or any mixer of the table that learns no matrix over tokens.

    `options` are those of `ExternalAttention2d`, None where they are its own.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if name == "external":
        return ExternalAttention2d(dim, **given, **factory)
    if given:
        key, value = next(iter(given.items()))
        raise UserError(f"{key}={value!r} only applies to mixer='external', and the mixer is {name!r}; leave it out")
    if name == "none":
        return nn.Identity()
    if name == "self":
        return SelfAttention2d(dim, **factory)
    layer = get_spec(name).layer
    if "num_tokens" in inspect.signature(layer).parameters:
        raise UserError(
            f"mixer {name!r} learns a matrix over tokens, and these images may have any size; give a mixer without one"
        )
    known = {key: value for key, value in factory.items() if key in inspect.signature(layer).parameters}
    return MixerBlock2d(create_mixer(name, dim, **known), **factory)
