"""What timm wants to be told, whatever the family."""

from timm.models._features import feature_take_indices
from torch import nn

from tokenmix.errors import UserError

__all__ = ["record_input_size", "take_indices"]


def record_input_size(model: nn.Module, size: tuple[int, int]) -> None:
    """Let timm know of an image size that was changed, for its data settings and its exports."""
    for name in ("_traits", "_model_args"):
        setattr(model, name, {**getattr(model, name, {}), "img_size": size})


def take_indices(count: int, indices: int | list[int] | None) -> tuple[list[int], int]:
    """timm's reading of feature indices: those chosen, and the last of them."""
    try:
        return feature_take_indices(count, indices)
    except AssertionError:
        raise UserError(
            f"feature indices {indices} do not fit {count} features; give at most {count}, or numbers in "
            f"{-count}..{count - 1}, for example out_indices=({count - 1},)"
        ) from None
