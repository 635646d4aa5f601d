"""timm's interface, shared by all families."""

from typing import Any

from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from tokenmix.errors import UserError


class Classifier(nn.Module):
    """Features, a pooling of them, and a linear head that can be replaced.

    A family implements `forward_features` and `forward_head`, and `get_classifier` if its head has another name.
    """

    num_classes: int
    num_features: int
    global_pool: str
    head: nn.Module

    @property
    def pools(self) -> tuple[str, ...]:
        """The values that `global_pool` may have."""
        return ("avg", "")

    def forward_features(self, images: Tensor) -> Tensor:
        """Images to features, not pooled."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features to pooled features, and unless `pre_logits` to logits."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to logits (B, num_classes)."""
        return self.forward_head(self.forward_features(images))

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head, 0 classes for none; and if given, another pooling."""
        if global_pool is not None:
            self.global_pool = self.checked_pool(global_pool)
        weight = next(self.parameters())
        self.num_classes = num_classes
        head = make_head(self.num_features, num_classes, device=weight.device, dtype=weight.dtype)
        self.head = head.train(self.training)

    def checked_pool(self, pool: str) -> str:
        """The pooling, or a `UserError` if it is none of `pools`."""
        if pool not in self.pools:
            known = ", ".join(map(repr, self.pools))
            raise UserError(f"global_pool {pool!r} is not supported; {type(self).__name__} has {known}")
        return pool


def make_head(num_features: int, num_classes: int, **factory: Any) -> nn.Module:
    """The linear map to the logits; for 0 classes the features themselves."""
    return nn.Linear(num_features, num_classes, **factory) if num_classes else nn.Identity()


def check_images(images: Tensor, channels: int, size: tuple[int, int]) -> None:
    """Raise `UserError` unless images are (B, channels, *size)."""
    height, width = size
    if images.dim() != 4 or images.shape[1:] != (channels, height, width):
        raise UserError(
            f"the model takes images (B, {channels}, {height}, {width}), got {tuple(images.shape)}; "
            "resize them, or give the model that size: img_size=... when it is built, set_input_size(...) later"
        )


def record_input_size(model: nn.Module, size: tuple[int, int]) -> None:
    """Record a changed image size for timm's data settings and exports."""
    update_model_input_size(model, size)


def take_indices(count: int, indices: int | list[int] | None) -> tuple[list[int], int]:
    """timm's reading of feature indices: those chosen, and the last of them."""
    try:
        return feature_take_indices(count, indices)
    except AssertionError:
        raise UserError(
            f"feature indices {indices} do not fit {count} features; give at most {count}, or numbers in "
            f"{-count}..{count - 1}, for example out_indices=({count - 1},)"
        ) from None
