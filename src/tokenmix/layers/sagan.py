"""The self-attention block of SAGAN on feature maps, in three published variants."""

from math import isqrt
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Device, Mixer, zero_masked
from tokenmix.ops.attention import attention, attention_probabilities
from tokenmix.ops.checks import check_choice, check_flags, check_whole
from tokenmix.ops.less import pool_mask

Variant = Literal["official", "paper", "compact"]


class SpectralNorm(nn.Module):
    """A weight divided by its largest singular value, as a parametrization.

        W / (u^T W v),   u <- W v / |W v|,   v <- W^T u / |W^T u|

    Values and names equal `torch.nn.utils.parametrizations.spectral_norm` for convolutions. Torch's version uses
    `vdot`, which the ONNX exporter of traced graphs does not support.
    """

    _u: Tensor
    _v: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        matrix = weight.detach().flatten(1)
        for name, size in zip(("_u", "_v"), matrix.shape, strict=True):
            self.register_buffer(name, F.normalize(matrix.new_empty(size).normal_(), dim=0, eps=1e-12))
        self._iterate(matrix, 15)

    @torch.no_grad()
    def _iterate(self, matrix: Tensor, steps: int) -> None:
        """Power iteration in place, because DataParallel replicas share the buffers."""
        for _ in range(steps):
            self._u.copy_(F.normalize(torch.mv(matrix, self._v), dim=0, eps=1e-12))
            self._v.copy_(F.normalize(torch.mv(matrix.t(), self._u), dim=0, eps=1e-12))

    def forward(self, weight: Tensor) -> Tensor:
        """The normalised weight (C_out, C_in, 1, 1)."""
        matrix = weight.flatten(1)
        if self.training:
            self._iterate(matrix, 1)
        # Copies, so that a second forward pass may precede the first backward pass.
        u, v = self._u.clone(), self._v.clone()
        return weight / torch.dot(u, torch.mv(matrix, v))


class SAGANAttention2d(Mixer):
    """Self-attention over the pixels of a feature map, added to the map with a learned factor that starts at 0.

        y = gamma * W_o softmax(Q K^T) V + x,   Q, K, V = 1 x 1 convolutions of x

    | variant    | q, k | v   | pooled k, v | W_o      | biases | spectral norm | parameters at C = 256 |
    |------------|------|-----|-------------|----------|--------|---------------|-----------------------|
    | `official` | C/8  | C/2 | 2 x 2 max   | C/2 to C | no     | yes           | 81,921                |
    | `paper`    | C/8  | C/8 | no          | C/8 to C | no     | no            | 32,769                |
    | `compact`  | C/8  | C   | no          | none     | yes    | no            | 82,241                |

    `official` is the authors' TensorFlow code, `paper` the printed text, `compact` the popular PyTorch ports. No
    variant scales by 1/sqrt(d). The last window of an odd side is smaller, so every pixel counts; the authors' code
    needs even sides. The fused kernels never materialize the map of pixels by pixels.

    Args:
        dim: channels C, a multiple of 8.
        variant: see the table.
        spectral_norm: divide each convolution by its largest singular value (default: as in the table). Each forward
            pass in training takes one step of power iteration and updates its buffers.

    Shape: x (B, C, H, W) to (B, C, H, W); mask (B, H*W), pixels row by row; `attention_map` (B, 1, H*W, keys).
    `official` has a quarter as many keys as pixels; a pooled key is masked if all of its four pixels are.

    Cost: with N pixels, `official` 5/4 N C^2 + 5/8 N N_k C multiply-adds, N_k = N/4; `paper` 1/2 N C^2 + 1/4 N^2 C;
    `compact` 5/4 N C^2 + 9/8 N^2 C.

    Reference: Zhang et al., Self-Attention Generative Adversarial Networks, arXiv 1805.08318.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(layout="2d", map="tokens", equivariant=False)

    def __init__(
        self,
        dim: int,
        *,
        variant: Variant = "official",
        spectral_norm: bool | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(dim=dim)
        check_choice("variant", variant, get_args(Variant))
        if spectral_norm is not None:
            check_flags(spectral_norm=spectral_norm)
        if dim % 8:
            raise UserError(
                f"SAGANAttention2d narrows its channels to dim / 8: dim must be a multiple of 8, got {dim}; "
                f"the next is {dim + -dim % 8}"
            )
        values = {"official": dim // 2, "paper": dim // 8, "compact": dim}
        self.dim, self.variant, self.pooled = dim, variant, variant == "official"
        self.spectral_norm = self.pooled if spectral_norm is None else spectral_norm
        self.head_dim, self.value_dim = dim // 8, values[variant]

        def conv(width_in: int, width_out: int) -> nn.Module:
            layer = nn.Conv2d(width_in, width_out, 1, bias=variant == "compact", device=device, dtype=dtype)
            if self.spectral_norm:
                parametrize.register_parametrization(layer, "weight", SpectralNorm(layer.weight))
            return layer

        self.query, self.key = conv(dim, self.head_dim), conv(dim, self.head_dim)
        self.value = conv(dim, self.value_dim)
        self.proj = nn.Identity() if variant == "compact" else conv(self.value_dim, dim)
        self.gamma = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        query, key, key_mask = self._query_key(x, mask)
        value = _tokens(self._pool(self.value(x), mask))
        out = attention(query, key, value, mask=mask, key_mask=key_mask, scale=1.0)
        out = x + self.gamma * self.proj(out.squeeze(1).transpose(1, 2).unflatten(2, x.shape[-2:]))
        return zero_masked(out, mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        query, key, key_mask = self._query_key(x, mask)
        return attention_probabilities(query, key, mask=mask, key_mask=key_mask, scale=1.0)

    def macs(self, num_tokens: int) -> int:
        """The cost formula of the class; keys of a square map with an odd side are counted exactly."""
        check_whole(num_tokens=num_tokens)
        side = isqrt(num_tokens)
        pooled = (-(-side // 2)) ** 2 if side * side == num_tokens else -(-num_tokens // 4)
        num_keys = pooled if self.pooled else num_tokens
        back = 0 if self.variant == "compact" else self.value_dim
        convolutions = num_tokens * self.dim * (2 * self.head_dim + self.value_dim + back)
        return convolutions + num_tokens * num_keys * (self.head_dim + self.value_dim)

    def _query_key(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        key = _tokens(self._pool(self.key(x), mask))
        key_mask = pool_mask(mask, (x.shape[2], x.shape[3])) if self.pooled and mask is not None else mask
        return _tokens(self.query(x)), key, key_mask

    def _pool(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """2 x 2 max pooling over unmasked pixels, 0 if all four are masked; x itself for variants without pooling."""
        if not self.pooled:
            return x
        lowest = torch.finfo(x.dtype).min
        pixels = None if mask is None else mask.unflatten(1, x.shape[-2:]).unsqueeze(1)
        kept = x if pixels is None else x.masked_fill(~pixels, lowest)
        # Padding instead of ceil_mode, which would fix the parity of an exported program.
        pooled = F.max_pool2d(F.pad(kept, (0, x.shape[3] % 2, 0, x.shape[2] % 2), value=lowest), 2)
        return pooled if pixels is None else pooled.masked_fill(pooled == lowest, 0.0)


def _tokens(x: Tensor) -> Tensor:
    """(B, C, h, w) as one head, (B, 1, h*w, C)."""
    return x.flatten(2).transpose(1, 2).unsqueeze(1)
