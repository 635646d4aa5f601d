"""Base of models whose blocks all see the same tokens: stem, positions, blocks, norm, pooling, head."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple, Unpack, cast

import torch
import torch.fx
from timm.layers.drop import DropPath, calculate_drop_path_rates
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.layers.weight_init import trunc_normal_
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Device, Factory, GridMixer, MapKind, Mixer, count_parameters, replace_parameter
from tokenmix.layers.less_attention import LessAttention
from tokenmix.layers.offset_attention import batch_norm
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.models.interface import BlockMap, Classifier, Intermediates, Size, checkpointed, make_head, take_indices
from tokenmix.models.stems import Stem
from tokenmix.ops.less import Scores


class MixerCost(NamedTuple):
    """Parameters and multiply-adds of one block's mixer, for one image."""

    block: int
    mixer: str
    mixer_parameters: int
    mixer_macs: int


@torch.fx.wrap
def mix(
    mixer: Mixer, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None, **more: Tensor
) -> tuple[Tensor, Scores | None]:
    """`mixer.mix` as one torch.fx node; modules that import this function must call `torch.fx.wrap("mix")` as well."""
    return mixer.mix(x, carry, mask, **more)


class TokenBatchNorm(nn.BatchNorm1d):
    """BatchNorm of each channel over images and tokens: (B, N, D) to (B, N, D)."""

    def forward(self, input: Tensor) -> Tensor:
        return _batch_norm(self, input.transpose(1, 2)).transpose(1, 2)


@torch.fx.wrap
def _batch_norm(norm: TokenBatchNorm, x: Tensor) -> Tensor:
    """Outside torch.fx's tracing, because BatchNorm checks the number of axes."""
    return nn.BatchNorm1d.forward(norm, x)


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """The block's norm, or the `nn.SyncBatchNorm` that PyTorch's conversion puts in place of `TokenBatchNorm`."""
    return batch_norm(norm, x) if isinstance(norm, nn.SyncBatchNorm) else norm(x)


class MixerBlock(nn.Module):
    """Pre-norm residual block: x + mixer(norm(x)), then x + mlp(norm(x)), unless `mlp_ratio` is 0.

    With `layer_scale`, each branch has a learned factor per channel, which starts at that number.
    """

    def __init__(
        self,
        mixer: Mixer,
        *,
        mlp_ratio: float,
        drop: float = 0.0,
        drop_path: float = 0.0,
        norm: Literal["layer", "batch"] = "layer",
        norm_eps: float = 1e-5,
        layer_scale: float | None = None,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        dim, self.hidden = mixer.dim, int(mixer.dim * mlp_ratio)
        make_norm = {"layer": nn.LayerNorm, "batch": TokenBatchNorm}[norm]
        self.norm1 = make_norm(dim, eps=norm_eps, **factory)
        self.mixer = mixer
        if self.hidden:
            self.norm2 = make_norm(dim, eps=norm_eps, **factory)
            up, down = nn.Linear(dim, self.hidden, **factory), nn.Linear(self.hidden, dim, **factory)
            self.mlp = nn.Sequential(up, nn.GELU(), down, nn.Dropout(drop))
        self.drop_path = DropPath(drop_path)
        self.scale1, self.scale2 = (
            None if layer_scale is None else nn.Parameter(torch.full_like(self.norm1.weight, layer_scale))
            for _ in range(2)
        )

    def forward(
        self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None, residual: Tensor | None = None
    ) -> tuple[Tensor, Scores | None]:
        """Tokens (B, N, D) and the previous block's scores, to tokens and scores for the next block.

        `residual` is added to the scores of vanilla attention; no other mixer accepts it.
        """
        more = {} if residual is None else {"residual": residual}
        out, carry = mix(self.mixer, _normed(self.norm1, x), carry, mask, **more)
        x = x + self.drop_path(out if self.scale1 is None else self.scale1 * out)
        if not self.hidden:
            return x, carry
        out = self.mlp(_normed(self.norm2, x))
        return x + self.drop_path(out if self.scale2 is None else self.scale2 * out), carry

    def map(
        self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """The attention map of `forward` with the same arguments."""
        more = {} if residual is None else {"residual": residual}
        return self.mixer.mix_map(_normed(self.norm1, x), carry, mask, **more)

    def macs(self, num_tokens: int) -> int:
        return self.mixer.macs(num_tokens) + 2 * num_tokens * self.mixer.dim * self.hidden


class IsotropicNet(Classifier):
    """Stem, positions, blocks, norm, pooling and head, with timm's conventions.

    Args:
        stem: images to tokens; has `img_size`, `grid_size`, `in_chans` and `dim`.
        mixers: one for each block.
        depth: number of blocks.
        num_classes: width of the head; 0 for none.
        mlp_ratio, norm: of the blocks, see `MixerBlock`.
        positions: positional embedding, learned, fixed sinusoid, or none.
        class_token: prepend a learned token.
        global_pool: `"avg"` over the image's tokens, `"token"` for the class token, or `""` for all tokens.
        drop_rate, proj_drop_rate: dropout before the head, and after each MLP.
        drop_path_rate: stochastic depth of the last block, linear in depth.
        norm_eps: epsilon of the norms.

    Shape: images (B, in_chans, H, W) to logits (B, num_classes).
    """

    pos_embed: Tensor | None

    def __init__(
        self,
        stem: Stem,
        mixers: Iterable[Mixer],
        depth: int,
        *,
        num_classes: int,
        mlp_ratio: float,
        norm: Literal["layer", "batch"] = "layer",
        positions: Literal["learned", "sinusoid", "none"] = "learned",
        class_token: bool = False,
        global_pool: Literal["avg", "token", ""] = "avg",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_eps: float = 1e-5,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        rates = cast(list[float], calculate_drop_path_rates(drop_path_rate, depth))
        blocks = [
            MixerBlock(
                mixer,
                mlp_ratio=mlp_ratio,
                drop=proj_drop_rate,
                drop_path=rate,
                norm=norm,
                norm_eps=norm_eps,
                **factory,
            )
            for mixer, rate in zip(mixers, rates, strict=True)
        ]
        self.stem, self.in_chans = stem, stem.in_chans
        self.num_prefix_tokens = int(class_token)
        self.num_classes, self.num_features, self.embed_dim = num_classes, stem.dim, stem.dim
        self.head_hidden_size, self.grad_checkpointing = stem.dim, False
        self.pools = (*self.pools, "token") if class_token else self.pools
        self.global_pool = self.checked_pool(global_pool)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, stem.dim, **factory)) if class_token else None
        if positions == "learned":
            self.pos_embed = nn.Parameter(torch.empty(1, self.num_tokens, stem.dim, **factory))
            # As large as the tokens of a new stem: with ViT's 0.02, short runs hardly learn positions (dev/LOG.md,
            # 2026-11-21: 0.70 against 0.77 after 12,000 images).
            trunc_normal_(self.pos_embed, std=0.5)
        else:
            table = sinusoid_table(self.num_tokens, stem.dim, **factory) if positions == "sinusoid" else None
            self.register_buffer("pos_embed", table)
        self.blocks = nn.ModuleList(blocks)
        self.norm: nn.Module = nn.LayerNorm(stem.dim, eps=norm_eps, **factory)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = make_head(stem.dim, num_classes, **factory)
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": stem.dim, "reduction": stem.reduction} for i in range(len(blocks))
        ]

    @property
    def img_size(self) -> tuple[int, int]:  # pyrefly: ignore[bad-override]
        return self.stem.img_size

    @property
    def grid_size(self) -> tuple[int, int]:
        return self.stem.grid_size

    @property
    def num_tokens(self) -> int:
        """N, tokens of one image, including the class token."""
        return self.num_prefix_tokens + self.grid_size[0] * self.grid_size[1]

    def tokens(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to tokens with positions (B, N, D)."""
        x = self.stem(images)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1)
        return x if self.pos_embed is None else x + self.pos_embed

    def _block(self, block: nn.Module, x: Tensor, carry: Scores | None) -> tuple[Tensor, Scores | None]:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpointed(block, x, carry)
        return block(x, carry)

    def forward_features(self, images: Tensor) -> Tensor:
        x, carry = self.tokens(images), None
        for block in self.blocks:
            x, carry = self._block(block, x, carry)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(1)
        elif self.global_pool == "token":
            x = x[:, 0]
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
        return_prefix_tokens: bool = False,
    ) -> Intermediates:
        """The tokens after selected blocks, as maps or sequences; also the final features unless `intermediates_only`.

        Args:
            images: (B, C, H, W).
            indices: block numbers; an integer n selects the last n; None selects all.
            norm: apply the last norm to them.
            stop_early: skip the blocks after the last selected one. The final features are then that block's output.
            output_fmt: maps (B, D, h, w), or sequences (B, h * w, D).
            intermediates_only: return only the list.
            return_prefix_tokens: return pairs with the prefix tokens (B, prefix, D).
        """
        take, last = take_indices(len(self.blocks), indices, output_fmt)
        x, carry, kept = self.tokens(images), None, []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x, carry = self._block(block, x, carry)
            if i in take:
                prefix, y = (self.norm(x) if norm else x).tensor_split((self.num_prefix_tokens,), dim=1)
                y = y.transpose(1, 2).unflatten(2, (-1, self.grid_size[1])) if output_fmt == "NCHW" else y
                kept.append((y, prefix) if return_prefix_tokens else y)
        return kept if intermediates_only else (self.norm(x), kept)

    def prune_intermediate_layers(
        self, indices: int | list[int] | None = None, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the blocks after the last selected one, optionally norm and head, for `features_only=True`."""
        take, last = take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def set_input_size(self, img_size: Size) -> None:
        """Set the image size; gates, score transforms and positional embeddings are interpolated.

        Positional embeddings are resampled bicubically over the grid; prefix tokens keep theirs. A sinusoid table is
        also resampled: a trained model knows its own table, and a new table would move every position. (For a new
        table, build the model with `img_size`.) Parameters are replaced, so create the optimiser afterwards.

        Raises:
            UserError: the size does not give whole tokens, or a Toeplitz gate cannot be resized.
        """
        old_size, old = self.img_size, self.grid_size
        self.stem.set_input_size(img_size)
        new = self.grid_size
        mixers: list[Any] = [block.mixer for block in self.blocks] if new != old else []
        # Toeplitz gates first, which refuse before any weight has changed.
        mixers.sort(key=lambda mixer: all(getattr(part, "gate", "dense") == "dense" for part in mixer.modules()))
        try:
            for mixer in mixers:
                mixer.set_grid(old, new)
        except UserError:
            self.stem.set_input_size(old_size)
            raise
        if self.pos_embed is not None:
            table = resample_abs_pos_embed(self.pos_embed.detach(), list(new), list(old), self.num_prefix_tokens)
            if isinstance(self.pos_embed, nn.Parameter):
                replace_parameter(self, "pos_embed", table)
            else:
                self.pos_embed = table
        update_model_input_size(self, self.img_size)

    def attention_maps(self, images: Tensor) -> list[BlockMap]:
        return block_maps(self, images, lambda _: self.grid_size, self.num_prefix_tokens)

    def macs(self) -> int:
        blocks = sum(block.macs(self.num_tokens) for block in self.blocks)  # type: ignore[operator]
        return self.stem.macs() + blocks + self.embed_dim * self.num_classes

    def cost_table(self) -> list[MixerCost]:
        rows = []
        for i, block in enumerate(self.blocks):
            mixer = cast(Mixer, block.mixer)
            kind = type(mixer.inner if isinstance(mixer, GridMixer) else mixer).__name__
            rows.append(MixerCost(i, kind, count_parameters(mixer), mixer.macs(self.num_tokens)))
        return rows

    def warnings(self) -> list[str]:
        """Less-attention layers that need at least as many multiply-adds as self-attention."""
        less = [block.mixer for block in self.blocks if isinstance(block.mixer, LessAttention)]
        if not less:
            return []
        n, layer = self.num_tokens, less[0]
        own, vanilla = layer.macs(n), SelfAttention(layer.dim, num_heads=layer.num_heads, device="meta").macs(n)
        if own < vanilla:
            return []
        return [
            f"the {len(less)} less-attention layers do not pay at {n} tokens, {own / 1e6:.4g} M multiply-adds against "
            f"{vanilla / 1e6:.4g} M of self-attention; they do with fewer tokens, that is a smaller image or larger "
            "patches, or in a wider model"
        ]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters(recurse=False)}

    def group_matcher(self, coarse: bool = False) -> dict[str, object]:
        """Groups of parameters by depth for layer-wise learning rates; `coarse` makes all blocks one group."""
        blocks = r"^blocks\." if coarse else r"^blocks\.(\d+)"
        return {"stem": r"^stem|^cls_token|^pos_embed", "blocks": [(blocks, None), (r"^norm", (99999,))]}


@torch.no_grad()
def block_maps(
    model: Classifier, images: Tensor, grid_of: Callable[[str], tuple[int, int]], prefix: int = 0
) -> list[BlockMap]:
    """The attention map of each `MixerBlock` of a model for these images, on the grid of its name."""
    maps: list[BlockMap] = []
    with ExitStack() as stack:
        for name, block in model.named_modules():
            if isinstance(block, MixerBlock) and (kind := block.mixer.capabilities.map) is not None:

                def note(block: MixerBlock, args: tuple[Any, ...], name: str = name, kind: MapKind = kind) -> None:
                    maps.append(BlockMap(f"{name}.mixer", kind, block.map(*args), grid_of(name), prefix))

                stack.callback(block.register_forward_pre_hook(note).remove)
        model.forward_features(images)
    return maps


def sinusoid_table(num_tokens: int, dim: int, *, device: Device = None, dtype: torch.dtype | None = None) -> Tensor:
    """Fixed positions (1, N, D): sines at even indices, cosines at odd ones, wavelengths 2 pi to 20,000 pi."""
    place = torch.arange(num_tokens, dtype=torch.float64).unsqueeze(1)
    wave = 10_000 ** (-2 * torch.div(torch.arange(dim), 2, rounding_mode="floor") / dim)
    angle = place * wave
    table = torch.where(torch.arange(dim) % 2 == 0, angle.sin(), angle.cos())
    return table.unsqueeze(0).to(device=device, dtype=dtype or torch.get_default_dtype())
