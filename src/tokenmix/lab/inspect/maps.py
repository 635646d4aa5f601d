"""The map that every mixer of a model used on given images."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Mixer, near_square
from tokenmix.models import BlockMap


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor) -> list[BlockMap]:
    """The maps of a model's mixers on images, from the first block to the last, in the model's present mode.

    They are computed by each layer's own `attention_map` from the input that it got, so it works with fused attention.

    Args:
        model: one of ours, or any module that calls tokenmix mixers.
        images: what the model takes.

    Raises:
        UserError: the model has no token mixer, or called none of them; the answer is never empty.
    """
    own = getattr(model, "attention_maps", None)
    maps: list[BlockMap] = own(images) if callable(own) else _watched(model, images)
    if not maps:
        raise UserError(
            f"{type(model).__name__} has no token mixer with a map that was called, so there is none to show; "
            "take a model of `tokenmix list models`, put a layer of tokenmix.layers into yours, or give a mixer of "
            "yours whose capabilities say map=None an attention_map"
        )
    return maps


def _watched(model: nn.Module, images: Tensor) -> list[BlockMap]:
    """Run a model that is not ours and ask every mixer, in the order of the calls, about the input that it got."""
    mixers = [(name, module) for name, module in model.named_modules() if isinstance(module, Mixer)]
    inside = {id(inner) for _, outer in mixers for inner in outer.modules() if inner is not outer}
    found: list[BlockMap] = []
    hooks = [
        mixer.register_forward_hook(_note(name, found), with_kwargs=True)
        for name, mixer in mixers
        if id(mixer) not in inside
    ]
    try:
        if hooks:
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _note(name: str, found: list[BlockMap]) -> Callable[..., None]:
    def hook(mixer: Mixer, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Tensor) -> None:
        given, kind = dict(zip(("x", "mask"), args)) | kwargs, mixer.capabilities.map
        if kind is not None:
            x = given["x"]
            used = mixer.attention_map(x, given.get("mask"))
            grid = (int(x.shape[-2]), int(x.shape[-1])) if x.dim() == 4 else near_square(used.shape[-2])
            found.append(BlockMap(name, kind, used, grid))

    return hook
