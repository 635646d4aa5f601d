"""Attention on a large grid: the queries are the tokens, keys and values are blocks of them."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Mixer, check_tokens, finish
from tokenmix.layers.self_attention import check_heads
from tokenmix.models.lavit_layout import Grid, shrunk
from tokenmix.ops.attention import attention, attention_probabilities
from tokenmix.ops.less import Scores


def padded_image(image: Tensor, stride: int) -> Tensor:
    """Maps (B, C, H, W) with zeros below and to the right, up to multiples of the stride."""
    bottom, right = -image.shape[-2] % stride, -image.shape[-1] % stride
    return F.pad(image, (0, right, 0, bottom)) if bottom or right else image


class ReducedAttention(Mixer):
    """Attention in which every r x r block of the grid makes one key and one value.

        K, V = LN(DWConv_r(X)) W_kv,   out = concat_h [ softmax(Q_h K_h^T / sqrt(d) + R) V_h ] W_o

    The idea is that of PVT (Wang et al., arXiv 2102.12122), whose convolution is full; this one is depthwise, takes the
    mean at the start and costs next to nothing.

    Shape:
        x (B, N, D) to (B, N, D), tokens row by row on `grid`; the map (B, H, N, S) with S blocks.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(map="slots", mask=False, length="fixed", equivariant=False)

    def __init__(self, dim: int, grid: Grid, *, num_heads: int, reduction: int, **factory: Any) -> None:
        super().__init__()
        self.dim, self.grid, self.num_heads, self.reduction = dim, grid, num_heads, reduction
        self.head_dim = check_heads(dim, num_heads)
        self.q = nn.Linear(dim, dim, **factory)
        self.reduce = nn.Conv2d(dim, dim, reduction, reduction, groups=dim, **factory)
        self.norm = nn.LayerNorm(dim, **factory)
        self.kv = nn.Linear(dim, 2 * dim, **factory)
        self.proj = nn.Linear(dim, dim, **factory)
        nn.init.constant_(self.reduce.weight, reduction**-2)
        nn.init.zeros_(self.reduce.bias)  # type: ignore[arg-type]

    @property
    def num_keys(self) -> int:
        """S, blocks of the grid."""
        height, width = shrunk(self.grid, self.reduction)
        return height * width

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix tokens (B, N, D) that fill the grid; there is no mask."""
        return self.mix(x, None, mask)[0]

    def mix(
        self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None, *, residual: Tensor | None = None
    ) -> tuple[Tensor, Scores | None]:
        """`forward`, and the pre-softmax scores in factors; `residual` (B, H, N, S) is added to them."""
        query, key, value = self._heads(x, mask)
        out = attention(query, key, value, bias=residual, scale=1.0)
        return finish(self.proj(out.transpose(1, 2).flatten(2)), None), Scores(query, key, residual)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The map (B, H, N, S): which blocks a token looks at."""
        return self.mix_map(x, None, mask)

    def mix_map(
        self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None, *, residual: Tensor | None = None
    ) -> Tensor:
        """The map that `mix` used on the same arguments."""
        query, key, _ = self._heads(x, mask)
        return attention_probabilities(query, key, bias=residual, scale=1.0)

    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Treat the tokens as a grid of the new size."""
        self.grid = (new[0], new[1])

    def macs(self, num_tokens: int) -> int:
        """2 N D^2 for q and output, N D for the reduction, 2 S D^2 for k and v, 2 N S D for the attention."""
        keys, area = self.num_keys, self.reduction**2
        return 2 * (num_tokens + keys) * self.dim**2 + (area + 2 * num_tokens) * keys * self.dim

    def _heads(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        check_tokens(self, x)
        if mask is not None:
            raise UserError("ReducedAttention makes keys of whole blocks of the image and takes no mask")
        image = padded_image(x.transpose(1, 2).unflatten(2, self.grid), self.reduction)
        blocks = self.norm(self.reduce(image).flatten(2).transpose(1, 2))
        key, value = self.kv(blocks).unflatten(2, (2, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        query = self.q(x).unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)
        return query * self.head_dim**-0.5, key, value
