"""The attention block on a backbone's last map: the EANet block, its self-attention variant, or none."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.errors import UserError, unknown_name
from tokenmix.layers.base import Capabilities, Mixer, zero_masked
from tokenmix.layers.external import ExternalAttention2d
from tokenmix.ops.attention import attention, attention_probabilities

ContextName = Literal["external", "self", "none"]


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


def make_context(name: ContextName, dim: int, options: Mapping[str, Any], factory: Mapping[str, Any]) -> nn.Module:
    """The block of that name; `options` are those of `ExternalAttention2d`, None where they are its own."""
    if name not in get_args(ContextName):
        raise unknown_name("mixer of a segmenter", name, get_args(ContextName))
    given = {key: value for key, value in options.items() if value is not None}
    if name == "external":
        return ExternalAttention2d(dim, **given, **factory)
    if given:
        key, value = next(iter(given.items()))
        raise UserError(f"{key}={value!r} only applies to mixer='external', and the mixer is {name!r}; leave it out")
    return SelfAttention2d(dim, **factory) if name == "self" else nn.Identity()
