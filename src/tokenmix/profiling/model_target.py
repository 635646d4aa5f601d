"""A model of ours or timm's in a table of costs. Only this module of `profiling` needs the models."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tokenmix.errors import UserError, unknown_name
from tokenmix.layers.table import list_mixers
from tokenmix.models.foreign import IMAGENET, load_foreign
from tokenmix.models.registry import create_model, create_on_meta
from tokenmix.profiling.estimate import Pass, overflowed
from tokenmix.profiling.measured import Measured
from tokenmix.registry import MODELS, TORCHVISION, list_models


@dataclass(frozen=True)
class ModelTarget:
    """A model by name, ours, timm's or torchvision's; sizes are sides of a square image."""

    name: str
    device: torch.device
    dtype: torch.dtype
    outlines: dict[int, Measured] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By size: needed by the counts and by each pass whose memory is estimated."""

    def default_sizes(self) -> list[int]:
        """The side that the model is made for only."""
        if self.name in MODELS:
            return [_own(create_on_meta(self.name))[0]]
        if self.name.startswith(TORCHVISION):
            return [224]
        config = timm.get_pretrained_cfg(self.name)
        return [int(config.input_size[1]) if config is not None else 224]

    def build(self, size: int) -> Measured:
        """The model with one random image, of a size whose memory was estimated to fit."""
        model = self._model(size, None).to(self.device, self.dtype).eval()
        return Measured(model, self._example(model, size, self.device))

    def outline(self, size: int) -> Measured:
        """The model and an image with shapes only; `UserError` if it does not take images of that size."""
        if size not in self.outlines:
            try:
                model = self._model(size, "meta").to(self.dtype).eval()
                made = Measured(model, self._example(model, size, "meta"))
                made.forward()
            except (AssertionError, ValueError, RuntimeError) as error:
                if isinstance(error, UserError):
                    raise UserError(f"{self.name}: {error}") from None
                reason = "its tensors would be too large" if overflowed(error) else " ".join(str(error).split())
                raise UserError(
                    f"{self.name} does not take images of {size} x {size} px: {reason or type(error).__name__}; give "
                    "another --img-size"
                ) from None
            self.outlines[size] = made
        return self.outlines[size]

    def dry_run(self, size: int, which: Pass) -> Callable[[], Callable[[], object]]:
        """Weights of the model's shapes and one pass with them.

        The weights are made apart, since timm's models cannot be built with shapes only.
        """
        model = self.outline(size).module

        def build() -> Callable[[], object]:
            weights = {name: self._empty(p).requires_grad_() for name, p in model.named_parameters()}
            tensors = {**weights, **{name: self._empty(b) for name, b in model.named_buffers()}}
            images = self._example(model, size, self.device)

            def call() -> None:
                with torch.set_grad_enabled(which == "step"):
                    out = functional_call(model, tensors, (images,))
                    if which == "step":
                        out.float().square().mean().backward()

            return call

        return build

    def _example(self, model: nn.Module, size: int, device: torch.device | str) -> Tensor:
        """A square image of noise."""
        first = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
        channels: Any = getattr(model, "in_chans", first)
        return torch.randn(1, int(channels), size, size, device=device, dtype=self.dtype)

    def _empty(self, like: Tensor) -> Tensor:
        dtype = self.dtype if like.is_floating_point() else like.dtype
        return torch.empty(like.shape, device=self.device, dtype=dtype)

    def _model(self, size: int, device: str | None) -> nn.Module:
        if self.name in MODELS:
            model: Any = create_model(self.name) if device is None else create_on_meta(self.name)
            if _own(model) != (size, size):
                model.set_input_size(size)
            return model
        with torch.device(device or "cpu"):
            if self.name.startswith(TORCHVISION):
                return load_foreign(self.name, {**IMAGENET, "img_size": (size, size)}, "classifier")
            try:
                return timm.create_model(self.name, img_size=size)
            except TypeError as error:
                # Convolutional networks have no such argument: they take images of any size.
                if "img_size" not in str(error):
                    raise
                return timm.create_model(self.name)


def _own(model: Any) -> tuple[int, int]:
    size = model.img_size
    return (size, size) if isinstance(size, int) else tuple(size)


def check_is_model(name: str) -> None:
    """Raise `UserError` unless the name is a model whose costs can be measured."""
    if name.startswith(TORCHVISION):
        with torch.device("meta"):
            load_foreign(name, IMAGENET, "classifier")
        return
    tasks = MODELS[name].tasks if name in MODELS else ()
    if "image-classification" in tasks or (not tasks and timm.is_model(name)):
        return
    if tasks:
        raise UserError(f"{name!r} is a model of {', '.join(tasks)}, whose cost is counted by: tokenmix info {name}")
    error = unknown_name("mixer or model", name, {*list_mixers(), *list_models(), *timm.list_models()})
    # Nobody reads a list of more than a thousand names.
    if "did you mean" in str(error):
        raise error
    raise UserError(f"unknown mixer or model {name!r}; see: tokenmix list mixers, tokenmix list models")
