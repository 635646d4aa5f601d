"""EAMLP: a T2T stem with external attention, then blocks of multi-head external attention; also T2T-ViT.

Reference: Guo, Liu, Mu, Hu, "Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks", 2021,
arXiv:2105.02358; the released code calls the models T2t_vit_7, _14 and _19. Yuan et al., "Tokens-to-Token ViT", 2021,
arXiv:2101.11986.
"""

import math
from typing import Literal, Unpack, get_args

import torch
import torch.fx
import torch.nn.functional as F
from timm.layers.weight_init import trunc_normal_
from timm.models import adapt_input_conv
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Device, Factory, Mixer
from tokenmix.layers.external import Memory, MultiHeadExternalAttention
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.models.interface import Size, init_linear, pair
from tokenmix.models.isotropic import IsotropicNet
from tokenmix.models.stems import Stem
from tokenmix.ops.attention import AttentionNormalization, attention
from tokenmix.ops.checks import check_choice
from tokenmix.ops.external import external_attention

torch.fx.wrap("external_attention")
torch.fx.wrap("attention")

# (kernel, stride, padding) of the three overlapping unfold operations.
Split = tuple[int, int, int]
SPLITS: tuple[Split, ...] = ((7, 4, 2), (3, 2, 1), (3, 2, 1))


class StemAttention(nn.Module):
    """One external-attention block of the stem, which also reduces the width.

        h = W_q norm(x);  y = h + W_o EA(h);  out = y + mlp(norm(y))

    The first line has no shortcut, because the widths differ. One head; M_k has no bias, M_v has one.

    Shape: (B, N, in_dim) to (B, N, dim).
    """

    def __init__(self, in_dim: int, dim: int, num_slots: int, *, dropout: float, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.in_dim, self.dim, self.num_slots = in_dim, dim, num_slots
        self.norm1 = nn.LayerNorm(in_dim, **factory)
        self.query = nn.Linear(in_dim, dim, **factory)
        self.key_memory = nn.Parameter(torch.empty(num_slots, dim, **factory))
        self.value_memory = nn.Parameter(torch.empty(num_slots, dim, **factory))
        self.value_bias = nn.Parameter(torch.zeros(dim, **factory))
        self.proj = nn.Linear(dim, dim, **factory)
        self.norm2 = nn.LayerNorm(dim, **factory)
        self.mlp = nn.Sequential(nn.Linear(dim, dim, **factory), nn.GELU(), nn.Linear(dim, dim, **factory))
        self.dropout = nn.Dropout(dropout)
        for memory in (self.key_memory, self.value_memory):
            trunc_normal_(memory, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.query(self.norm1(x))
        dropout = self.dropout.p if self.training else 0.0
        mixed = external_attention(h, self.key_memory, self.value_memory, value_bias=self.value_bias, dropout=dropout)
        y = h + self.dropout(self.proj(mixed))
        return y + self.mlp(self.norm2(y))

    def macs(self, num_tokens: int) -> int:
        d = self.dim
        return num_tokens * (self.in_dim * d + 2 * self.num_slots * d + 3 * d * d)


class StemSelfAttention(nn.Module):
    """One block of T2T-ViT's stem: one-head self-attention that also reduces the width.

        Q, K, V = W norm(x) + b;  y = V + W_o Attention(Q, K, V);  out = y + mlp(norm(y))

    Shape: (B, N, in_dim) to (B, N, dim).
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        normalization: AttentionNormalization,
        *,
        dropout: float,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.in_dim, self.dim, self.normalization = in_dim, dim, normalization
        self.norm1 = nn.LayerNorm(in_dim, **factory)
        self.qkv = nn.Linear(in_dim, 3 * dim, **factory)
        self.proj = nn.Linear(dim, dim, **factory)
        self.norm2 = nn.LayerNorm(dim, **factory)
        self.mlp = nn.Sequential(nn.Linear(dim, dim, **factory), nn.GELU(), nn.Linear(dim, dim, **factory))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unsqueeze(1).chunk(3, -1)
        dropout = self.dropout.p if self.training else 0.0
        mixed = attention(query, key, value, normalization=self.normalization, dropout=dropout)
        y = (value + self.dropout(self.proj(mixed))).squeeze(1)
        return y + self.mlp(self.norm2(y))

    def macs(self, num_tokens: int) -> int:
        d = self.dim
        return num_tokens * (3 * self.in_dim * d + 2 * num_tokens * d + 3 * d * d)


class T2TStem(Stem):
    """Three overlapping unfold operations with attention blocks between them: 1/16 of the image's sides.

    Attention is external; with `normalization` it is self-attention, softmax or double.

    Shape: images (B, C, H, W) to tokens (B, N, D); any H and W of at least 16, the grid rounds up.
    """

    def __init__(
        self,
        dim: int,
        *,
        img_size: Size,
        in_chans: int = 3,
        token_dim: int = 64,
        num_slots: int = 128,
        num_splits: int = 3,
        normalization: AttentionNormalization | None = None,
        dropout: float = 0.0,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.dim, self.in_chans = dim, in_chans
        self.splits = SPLITS[-num_splits:]
        self.reduction = math.prod(stride for _, stride, _ in self.splits)
        widths = [in_chans * self.splits[0][0] ** 2] + [token_dim * k**2 for k, _, _ in self.splits[1:]]
        self.attentions = nn.ModuleList(
            StemAttention(width, token_dim, num_slots, dropout=dropout, **factory)
            if normalization is None
            else StemSelfAttention(width, token_dim, normalization, dropout=dropout, **factory)
            for width in widths[:-1]
        )
        self.project = nn.Linear(widths[-1], dim, **factory)
        self.set_input_size(img_size)

    def set_input_size(self, img_size: Size) -> None:
        size = pair(img_size)
        if min(size) < self.reduction:
            raise UserError(
                f"image size {size[0]} x {size[1]} is smaller than one token; give at least {self.reduction}"
            )
        self.img_size, self.grids, grid = size, [], size
        for kernel, stride, padding in self.splits:
            grid = tuple((side + 2 * padding - kernel) // stride + 1 for side in grid)
            self.grids.append(grid)
        self.grid_size = self.grids[-1]

    def forward(self, images: Tensor) -> Tensor:
        self.check(images)
        x = images
        for block, split, grid in zip(self.attentions, self.splits, self.grids, strict=False):
            x = block(_unfolded(x, split)).transpose(1, 2).unflatten(2, grid)
        return self.project(_unfolded(x, self.splits[-1]))

    def macs(self) -> int:
        blocks = sum(a.macs(h * w) for a, (h, w) in zip(self.attentions, self.grids, strict=False))  # type: ignore[operator]
        return blocks + self.grid_size[0] * self.grid_size[1] * self.project.in_features * self.dim


def _unfolded(x: Tensor, split: Split) -> Tensor:
    kernel, stride, padding = split
    return F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2)


class EAMLP(IsotropicNet):
    """EAMLP: class token, fixed sinusoid positions, pre-norm blocks of multi-head external attention and MLP.

    `attention="softmax"` is T2T-ViT, with self-attention in stem and blocks (T2T-ViT_t). The tables of the T2T-ViT
    paper are for a stem with Performer attention. The author of external attention reports +0.1 to 0.3 points for
    double normalisation in T2T-ViT.

    Args:
        img_size, in_chans, num_classes, drop_rate, drop_path_rate: see `Classifier`.
        global_pool: `"token"` for the class token, `"avg"`, or `""` for all tokens.
        embed_dim: width D of the tokens.
        depth: number of blocks.
        attention: `"external"`, or self-attention with `"softmax"` or `"double"` normalisation.
        num_heads: heads per block. External attention expands D and the number of heads by 4. The stem has one head.
        num_slots: memory slots per block of external attention (default 64).
        mlp_ratio: hidden width of the MLP over D.
        num_splits: unfold operations of the stem: 3 for 1/16 of the sides, 2 for 1/4.
        norm: `"layer"`, or `"batch"` for the BatchNorm variant that the author reports for EAMLP-7.
        init: `"paper"`, as in the released code; `"torch"`, the layers' own, which learns faster at first.
        proj_drop_rate: dropout in the blocks' MLPs.
        attn_drop_rate: dropout of the attention maps and after the projections in the stem; the released stem has 0.1.
    """

    def __init__(
        self,
        *,
        img_size: Size = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: Literal["token", "avg", ""] = "token",
        embed_dim: int = 256,
        depth: int = 7,
        attention: Literal["external", "softmax", "double"] = "external",
        num_heads: int = 4,
        num_slots: int | None = None,
        mlp_ratio: float = 2.0,
        num_splits: Literal[2, 3] = 3,
        norm: Literal["layer", "batch"] = "layer",
        init: Literal["paper", "torch"] = "paper",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("attention", attention, ("external", *get_args(AttentionNormalization)))
        check_choice("init", init, ("paper", "torch"))
        if attention != "external" and num_slots is not None:
            raise UserError(
                f"num_slots={num_slots} is of attention='external', got {attention!r}; leave it out, or "
                "take a t2t_vit model"
            )
        factory: Factory = {"device": device, "dtype": dtype}
        normalization = None if attention == "external" else attention
        stem = T2TStem(
            embed_dim,
            img_size=img_size,
            in_chans=in_chans,
            num_splits=num_splits,
            normalization=normalization,
            dropout=attn_drop_rate,
            **factory,
        )

        def mixer() -> Mixer:
            if normalization is None:
                return MultiHeadExternalAttention(embed_dim, num_heads=num_heads, num_slots=num_slots or 64, **factory)
            return SelfAttention(embed_dim, num_heads=num_heads, normalization=normalization, qkv_bias=False, **factory)

        super().__init__(
            stem,
            (mixer() for _ in range(depth)),
            depth,
            num_classes=num_classes,
            mlp_ratio=mlp_ratio,
            norm=norm,
            positions="sinusoid",
            class_token=True,
            global_pool=global_pool,
            drop_rate=drop_rate,
            proj_drop_rate=proj_drop_rate,
            drop_path_rate=drop_path_rate,
            **factory,
        )
        names = {"external": "multihead-external", "softmax": "self", "double": "self-double"}
        self.mixer_name = names[attention]
        if init == "paper":
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise as the released code: truncated normal (std 0.02), and 0 for biases."""
        for module in self.modules():
            init_linear(module)
            if isinstance(module, Memory):
                module.reset_parameters()
                for memory in (module.key_memory, module.value_memory):
                    if memory is not None:
                        trunc_normal_(memory, std=0.02)
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)

    def adapt_channels(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adapt a state dict for three channels to `in_chans`, like timm's adaptation of a first convolution.

        The first layers are a LayerNorm over unfolded pixels and a linear map, W (g n + b) + c. With W diag(g) for W
        and W b + c for c, they are one convolution of n, and the norm has no weights. A grey image with one channel
        then gives the same output as with three equal channels.
        """
        adapted, first = dict(state_dict), "stem.attentions.0"
        assert isinstance(self.stem, T2TStem)
        parts = self.stem.attentions[0].named_children()
        linear = next(name for name, part in parts if isinstance(part, nn.Linear))
        names = [f"{first}.{name}" for name in ("norm1.weight", "norm1.bias", f"{linear}.weight", f"{linear}.bias")]
        kernel = self.stem.splits[0][0]
        if self.in_chans == 3 or not set(names) <= set(adapted) or adapted[names[0]].numel() != 3 * kernel**2:
            return adapted
        scale, shift, weight, bias = (adapted[name] for name in names)
        filters = adapt_input_conv(self.in_chans, (weight * scale).unflatten(1, (3, kernel, kernel))).flatten(1)
        plain = (scale.new_ones(filters.shape[1]), scale.new_zeros(filters.shape[1]))
        return {**adapted, **dict(zip(names, (*plain, filters, bias + weight @ shift)))}
