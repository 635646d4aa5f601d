"""An isotropic vision network with its token mixer passed in: the skeleton of equal-budget comparisons."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from timm.layers.drop import DropPath
from timm.layers.weight_init import trunc_normal_
from timm.models import register_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Mixer
from tokenmix.layers.table import build, get_spec
from tokenmix.ops.less import Scores

__all__ = ["BlockMap", "GridMixer", "MixerBlock", "MixerNet"]


class BlockMap(NamedTuple):
    """The map that one block used: (B, H, N, S), (B, H, N, N) or (N, N), as `kind` says; tokens lie on `grid`."""

    name: str
    kind: Literal["slots", "tokens", "gate"]
    map: Tensor
    grid: tuple[int, int]


class GridMixer(Mixer):
    """A 2-d mixer used on tokens (B, N, D) that lie row by row on a grid."""

    def __init__(self, inner: Mixer, grid: tuple[int, int]) -> None:
        super().__init__()
        self.inner, self.grid, self.dim = inner, grid, inner.dim

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Those of the mixer inside."""
        return self.inner.capabilities

    def _map(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).unflatten(2, self.grid)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix tokens (B, N, D) as a map (B, D, h, w)."""
        return self.inner(self._map(x), mask).flatten(2).transpose(1, 2)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The inner mixer's map."""
        return self.inner.attention_map(self._map(x), mask)

    def macs(self, num_tokens: int) -> int:
        """The inner mixer's multiply-adds."""
        return self.inner.macs(num_tokens)


class MixerBlock(nn.Module):
    """Pre-norm residual block: x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, mixer: Mixer, *, mlp_ratio: float, drop: float = 0.0, drop_path: float = 0.0, **factory: Any
    ) -> None:
        super().__init__()
        dim = mixer.dim
        hidden = int(dim * mlp_ratio)
        self.norm1 = nn.LayerNorm(dim, **factory)
        self.mixer = mixer
        self.norm2 = nn.LayerNorm(dim, **factory)
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden, **factory), nn.GELU(), nn.Linear(hidden, dim, **factory), nn.Dropout(drop)
        )
        self.drop_path = DropPath(drop_path)

    def forward(
        self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Scores | None]:
        """Tokens (B, N, D) and the scores of the block before, to the same for the block after."""
        out, carry = self.mixer.mix(self.norm1(x), carry, mask)
        x = x + self.drop_path(out)
        return x + self.drop_path(self.mlp(self.norm2(x))), carry


class MixerNet(nn.Module):
    """Patches, a position table, blocks that differ only in their mixer, mean over tokens, a linear head.

    Args:
        mixer: a name of `tokenmix.list_mixers()`.
        mixer_kwargs: arguments of the mixer's constructor.
        img_size: side of the image, or (height, width); a multiple of the patch.
        patch_size: side of a patch; 4, or 2 for images under 24 px, if not given.
        in_chans: channels of the image.
        num_classes: width of the head; 0 for none.
        embed_dim: width D of the tokens.
        depth: number of blocks.
        num_heads: heads of the mixers that have heads.
        num_leading: with less-attention, the blocks at the front that keep vanilla attention.
        mlp_ratio: hidden width of the MLP over D.
        global_pool: `"avg"`, or `""` for the tokens themselves.
        drop_rate: dropout before the head and behind each MLP.
        drop_path_rate: stochastic depth of the last block, linear in depth.

    Shape:
        images (B, in_chans, H, W) to logits (B, num_classes).
    """

    def __init__(
        self,
        mixer: str = "self",
        mixer_kwargs: Mapping[str, Any] | None = None,
        img_size: int | tuple[int, int] = 32,
        patch_size: int | None = None,
        in_chans: int = 3,
        num_classes: int = 10,
        embed_dim: int = 64,
        depth: int = 4,
        num_heads: int = 4,
        num_leading: int = 1,
        mlp_ratio: float = 2.0,
        global_pool: Literal["avg", ""] = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        self.patch_size = patch_size or (4 if min(self.img_size) >= 24 else 2)
        self.grid_size = _grid(self.img_size, self.patch_size)
        self.num_tokens = self.grid_size[0] * self.grid_size[1]
        self.num_classes, self.num_features, self.embed_dim = num_classes, embed_dim, embed_dim
        self.global_pool, self.mixer_name = global_pool, mixer
        self.grad_checkpointing = False

        self.patch_embed = nn.Conv2d(in_chans, embed_dim, self.patch_size, self.patch_size, **factory)
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_tokens, embed_dim, **factory))
        offered = {"num_heads": num_heads, **factory}
        mixers = _mixers(mixer, depth, num_leading, embed_dim, self.grid_size, offered, mixer_kwargs or {})
        rates = torch.linspace(0, drop_path_rate, depth).tolist()
        self.blocks = nn.ModuleList(
            MixerBlock(m, mlp_ratio=mlp_ratio, drop=drop_rate, drop_path=rate, **factory)
            for m, rate in zip(mixers, rates, strict=True)
        )
        self.norm = nn.LayerNorm(embed_dim, **factory)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **factory) if num_classes else nn.Identity()
        trunc_normal_(self.pos_embed, std=0.02)

    def tokens(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to tokens with positions (B, N, D)."""
        if images.dim() != 4 or tuple(images.shape[-2:]) != self.img_size:
            raise UserError(
                f"the model takes images (B, {self.patch_embed.in_channels}, {self.img_size[0]}, {self.img_size[1]}), "
                f"got {tuple(images.shape)}; resize them or build the model with img_size=..."
            )
        return self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed

    def forward_features(self, images: Tensor) -> Tensor:
        """Images to normalised tokens (B, N, D)."""
        x, carry = self.tokens(images), None
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x, carry = checkpoint(block, x, carry, use_reentrant=False)  # type: ignore[misc]
            else:
                x, carry = block(x, carry)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, N, D) to pooled features, and unless `pre_logits` to logits."""
        x = self.head_drop(x.mean(1) if self.global_pool == "avg" else x)
        return x if pre_logits else self.head(x)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to logits (B, num_classes)."""
        return self.forward_head(self.forward_features(images))

    @torch.no_grad()
    def attention_maps(self, images: Tensor) -> list[BlockMap]:
        """The map that each block used on these images, from the first block to the last."""
        x, carry, maps = self.tokens(images), None, []
        for i, block in enumerate(self.blocks):
            mixer = block.mixer
            used = mixer.mix_map(block.norm1(x), carry)
            maps.append(BlockMap(f"blocks.{i}.mixer", mixer.capabilities.map, used, self.grid_size))
            x, carry = block(x, carry)
        return maps

    def macs(self) -> int:
        """Multiply-adds of one image, from the equations."""
        n, d = self.num_tokens, self.embed_dim
        patches = n * d * self.patch_embed.in_channels * self.patch_size**2
        blocks = sum(b.mixer.macs(n) + 2 * n * d * b.mlp[0].out_features for b in self.blocks)  # type: ignore[union-attr]
        return patches + blocks + d * self.num_classes

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: Literal["avg", ""] | None = None) -> None:
        """A new head; 0 classes for none."""
        like = {"device": self.pos_embed.device, "dtype": self.pos_embed.dtype}
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = global_pool
        self.head = nn.Linear(self.embed_dim, num_classes, **like) if num_classes else nn.Identity()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks in the backward pass instead of keeping what they made."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay leaves alone."""
        return {"pos_embed"}


def _grid(img_size: Sequence[int], patch_size: int) -> tuple[int, int]:
    if any(side % patch_size or side < patch_size for side in img_size):
        raise UserError(
            f"image size {img_size[0]} x {img_size[1]} is not a multiple of the patch size {patch_size}; "
            f"give img_size={max(1, round(min(img_size) / patch_size)) * patch_size} or another patch_size"
        )
    return img_size[0] // patch_size, img_size[1] // patch_size


def _mixers(
    name: str,
    depth: int,
    num_leading: int,
    dim: int,
    grid: tuple[int, int],
    offered: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> list[Mixer]:
    """One mixer for each block. What the skeleton offers goes to the layers that have such an argument; what the user
    asked for goes to every layer of the mixer's own class, which refuses what it does not know."""
    spec = get_spec(name)

    def make(layer: type[Mixer], row: Mapping[str, Any], asked: Mapping[str, Any]) -> Mixer:
        known = inspect.signature(layer).parameters
        args = {k: v for k, v in offered.items() if k in known}
        built = build(layer, f"mixer {name!r}", dim, grid[0] * grid[1], {**args, **row, **asked})
        return GridMixer(built, grid) if built.capabilities.layout == "2d" else built

    if spec.leader is None:
        return [make(spec.layer, spec.fixed, asked) for _ in range(depth)]
    if not 1 <= num_leading < depth:
        raise UserError(
            f"num_leading must lie in 1..{depth - 1} for mixer {name!r} at depth {depth}, got {num_leading}"
        )
    shared = {k: v for k, v in asked.items() if k in inspect.signature(spec.leader).parameters}
    leading = [make(spec.leader, {}, shared) for _ in range(num_leading)]
    return leading + [make(spec.layer, {**spec.fixed, **spec.later}, asked) for _ in range(depth - num_leading)]


def _create(model_name: str, defaults: Mapping[str, Any], kwargs: dict[str, Any]) -> MixerNet:
    """Build a preset: its numbers, overridden by the caller's. timm passes `pretrained` and its config along."""
    if kwargs.pop("pretrained", False):
        raise UserError(f"{model_name} has no pretrained weights; build it with pretrained=False and train it")
    for key in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        kwargs.pop(key, None)
    return MixerNet(**{**defaults, **kwargs})


@register_model
def mixer_nano(**kwargs: Any) -> MixerNet:
    """The skeleton of comparisons at 64 x 4: give `mixer=`."""
    return _create("mixer_nano", {}, kwargs)


@register_model
def vit_nano(**kwargs: Any) -> MixerNet:
    """The self-attention twin."""
    return _create("vit_nano", {"mixer": "self"}, kwargs)
