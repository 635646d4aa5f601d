"""Interfaces shared by the models: timm's, feature maps, attention maps and costs."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import torch
from timm.layers.weight_init import trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokenmix.errors import UserError
from tokenmix.layers.base import Factory
from tokenmix.layers.less_attention import kept_scores
from tokenmix.ops.checks import check_choice
from tokenmix.ops.less import Scores

Size = int | tuple[int, int]


def pair(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


class BlockMap(NamedTuple):
    """The attention map of one block: (B, H, N, S), (B, H, N, N) or (N, N), depending on `kind`.

    The first `prefix` tokens are not positions of the image (class token); the others are on `grid`, row by row. An
    image that is mixed in `windows` has as many maps, one after another.
    """

    name: str
    kind: Literal["slots", "tokens", "gate"]
    map: Tensor
    grid: tuple[int, int]
    prefix: int = 0
    windows: int = 1


Features = Sequence[Tensor | tuple[Tensor, Tensor]]
"""Maps or sequences, alone or with the prefix tokens."""
Intermediates = Features | tuple[Tensor, Features]
"""Selected features of a network, optionally after the final features."""


class MapInfo(TypedDict):
    """timm's description of a feature map: module, channels and stride in pixels."""

    module: str
    num_chs: int
    reduction: int


class PartCost(NamedTuple):
    """Parameters and multiply-adds of one part of a network."""

    part: str
    parameters: int
    macs: int


def checkpointed(block: nn.Module, *inputs: object) -> Any:
    """The block's output; its activations are computed again in the backward pass, from its buffers of now.

    BatchNorm and spectral norm change their buffers in each forward pass. Here the second one leaves them alone.
    """
    # A compiled graph changes its buffers once, and takes no context.
    before = [] if torch.compiler.is_compiling() else [(buffer, buffer.clone()) for buffer in block.buffers()]

    @contextmanager
    def again() -> Iterator[None]:
        after = [buffer.clone() for buffer, _ in before]
        for buffer, value in before:
            buffer.copy_(value)
        try:
            yield
        finally:
            for (buffer, _), value in zip(before, after):
                buffer.copy_(value)

    context: dict[str, Any] = {"context_fn": lambda: (nullcontext(), again())} if before else {}
    return checkpoint(block, *inputs, use_reentrant=False, **context)


class FeatureMaps:
    """A network with the maps of `feature_info`, finest first, for images of `img_size`."""

    img_size: tuple[int, int]
    feature_info: list[MapInfo]

    def meta_maps(self) -> list[Tensor]:
        """Meta tensors with the shapes of the maps."""
        return [torch.empty(1, entry["num_chs"], *self._grid(entry), device="meta") for entry in self.feature_info]

    def _grid(self, entry: MapInfo) -> tuple[int, int]:
        return -(-self.img_size[0] // entry["reduction"]), -(-self.img_size[1] // entry["reduction"])

    @property
    def grid_size(self) -> tuple[int, int]:
        """(height, width) of the last map."""
        return self._grid(self.feature_info[-1])

    @property
    def num_tokens(self) -> int:
        """N, positions of the last map."""
        return self.grid_size[0] * self.grid_size[1]


class Classifier(nn.Module):
    """timm's interface: features, pooling, and a linear head that can be replaced.

    A family implements the abstract methods, and `get_classifier` if its head has another name. It has `grid_size` and
    `num_tokens` of its last grid, where N includes the class token.

    Args:
        img_size: side of the image, or (height, width).
        in_chans: channels of the image.
        num_classes: width of the head; 0 for none.
        drop_rate: dropout before the head.
        drop_path_rate: stochastic depth of the last block, linear in depth.
    """

    mixer_name: str
    img_size: tuple[int, int]
    num_classes: int
    num_features: int
    in_chans: int
    global_pool: str
    head: nn.Module
    pools: tuple[str, ...] = ("avg", "")
    """Valid values of `global_pool`."""
    feature_info: list[MapInfo]

    @abstractmethod
    def forward_features(self, images: Tensor) -> Tensor:
        """Images to features before pooling."""

    @abstractmethod
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features to logits, or with `pre_logits` to pooled features."""

    @abstractmethod
    def attention_maps(self, images: Tensor) -> list[BlockMap]:
        """The attention map of each block for these images, in order; mixers without a map are skipped."""

    @abstractmethod
    def set_input_size(self, img_size: Size) -> None:
        """Set the image size; weights over positions are interpolated into new parameters."""

    @abstractmethod
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks or stages in the backward pass instead of storing activations."""

    @abstractmethod
    def macs(self) -> int:
        """Multiply-adds of one image of `img_size`."""

    @abstractmethod
    def cost_table(self) -> Sequence[tuple[object, ...]]:
        """A named tuple for each part or block."""

    def warnings(self) -> list[str]:
        """A line for each block or part that does not pay off."""
        return []

    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay, in addition to one-dimensional ones."""
        return set()

    def adapt_channels(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adapt weights for three channels to `in_chans`, if timm does not."""
        return state_dict

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))

    def forward_with_scores(self, images: Tensor) -> tuple[Tensor, list[Scores]]:
        """Logits, and the scores of each less-attention layer, for a loss such as `losses.diagonality_loss`."""
        with kept_scores(self) as scores:
            return self(images), scores

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head (0 classes for none) and optionally the pooling."""
        if global_pool is not None:
            self.global_pool = self.checked_pool(global_pool)
        weight = next(self.parameters())
        self.num_classes = num_classes
        head = make_head(self.num_features, num_classes, device=weight.device, dtype=weight.dtype)
        self.head = head.train(self.training)

    def checked_pool(self, pool: str) -> str:
        """Return `pool`; `UserError` if it is not in `pools`."""
        if pool not in self.pools:
            known = ", ".join(map(repr, self.pools))
            raise UserError(f"global_pool {pool!r} is not supported; {type(self).__name__} has {known}")
        return pool


def make_head(num_features: int, num_classes: int, **factory: Unpack[Factory]) -> nn.Module:
    """A linear head; the identity for 0 classes."""
    return nn.Linear(num_features, num_classes, **factory) if num_classes else nn.Identity()


def init_linear(module: nn.Module) -> None:
    """Initialise a linear layer with a truncated normal (std 0.02) and biases of 0; other modules stay."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def check_images(images: Tensor, channels: int, size: tuple[int, int]) -> None:
    """Raise `UserError` unless images are (B, channels, *size)."""
    height, width = size
    if images.dim() != 4 or images.shape[1:] != (channels, height, width):
        raise UserError(
            f"the model takes images (B, {channels}, {height}, {width}), got {tuple(images.shape)}; "
            "resize them, or give the model that size: img_size=... when it is built, set_input_size(...) later"
        )


def take_indices(count: int, indices: int | list[int] | None, output_fmt: str = "NCHW") -> tuple[list[int], int]:
    """timm's feature indices: the selected ones and their maximum; `UserError` for an unknown output_fmt."""
    check_choice("output_fmt", output_fmt, ("NCHW", "NLC"))
    try:
        return feature_take_indices(count, indices)
    except AssertionError:
        raise UserError(
            f"feature indices {indices} do not fit {count} features; give at most {count}, or numbers in "
            f"{-count}..{count - 1}, for example out_indices=({count - 1},)"
        ) from None
