"""A model of ours or timm's in a table of costs. Only this module of `cost` needs the models and their tasks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tokenmix.cost.estimate import Pass, overflowed
from tokenmix.errors import UserError, unknown_name
from tokenmix.layers.base import count_parameters
from tokenmix.layers.table import list_mixers
from tokenmix.models.registry import create_model, create_on_meta
from tokenmix.registry import MODELS, get_task, list_models
from tokenmix.swap.probe import model_macs
from tokenmix.tasks.classification.task import ImageClassification
from tokenmix.tasks.fitting import task_of_model
from tokenmix.train.task import TaskModule


@dataclass(frozen=True)
class ModelWithInput:
    """A model in evaluation mode and one image."""

    model: nn.Module
    images: Tensor

    @torch.no_grad()
    def forward(self) -> Tensor:
        """One pass without gradients."""
        return self.model(self.images)

    def step(self) -> None:
        """One pass forward and back, to the weights; the gradients are dropped."""
        self.model(self.images).float().square().mean().backward()
        self.model.zero_grad(set_to_none=True)

    def parameters(self) -> int:
        """Learned numbers."""
        return count_parameters(self.model)

    def macs(self) -> int:
        """From our equations; of another's model counted."""
        macs: Any = getattr(self.model, "macs", None)
        return model_macs(self.model, (self.images,)) if macs is None else macs()

    def traffic(self) -> int:
        """Bytes of image, weights and logits, each moved once."""
        weights = sum(p.nbytes for p in self.model.parameters())
        return self.images.nbytes + weights + self.forward().nbytes


@dataclass(frozen=True)
class ModelTarget:
    """A model by name, ours or timm's; sizes are sides of a square image."""

    name: str
    device: torch.device
    dtype: torch.dtype
    outlines: dict[int, ModelWithInput] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By size: needed by the counts and by each pass whose memory is estimated."""

    def default_sizes(self) -> list[int]:
        """The side that the model is made for only."""
        if self.name in MODELS:
            return [_own(create_on_meta(self.name))[0]]
        config = timm.get_pretrained_cfg(self.name)
        return [int(config.input_size[1]) if config is not None else 224]

    def build(self, size: int) -> ModelWithInput:
        """The model with one random image, of a size whose memory was estimated to fit."""
        model = self._model(size, None).to(self.device, self.dtype).eval()
        return ModelWithInput(model, self._example(model, size, self.device))

    def outline(self, size: int) -> ModelWithInput:
        """The model and an image with shapes only; `UserError` if it does not take images of that size."""
        if size not in self.outlines:
            try:
                model = self._model(size, "meta").to(self.dtype).eval()
                made = ModelWithInput(model, self._example(model, size, "meta"))
                made.forward()
            except (AssertionError, ValueError, RuntimeError) as error:
                raise _wrong_size(self.name, size, error) from None
            self.outlines[size] = made
        return self.outlines[size]

    def dry_run(self, size: int, which: Pass) -> Callable[[], Callable[[], object]]:
        """Weights of the model's shapes and one pass with them.

        The weights are made apart, since timm's models cannot be built with shapes only.
        """
        model = self.outline(size).model

        def build() -> Callable[[], object]:
            weights = {name: self._empty(p).requires_grad_() for name, p in model.named_parameters()}
            tensors = {**weights, **{name: self._empty(b) for name, b in model.named_buffers()}}
            images = self._example(model, size, self.device)
            return lambda: _pass(model, tensors, images, which)

        return build

    def _example(self, model: nn.Module, size: int, device: torch.device | str) -> Tensor:
        return _task_of(self.name).example_input(model, size, device=device, dtype=self.dtype)

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
            try:
                return timm.create_model(self.name, img_size=size)
            except TypeError as error:
                # Convolutional networks have no such argument: they take images of any size.
                if "img_size" not in str(error):
                    raise
                return timm.create_model(self.name)


def _pass(model: nn.Module, tensors: Mapping[str, Tensor], images: Tensor, which: Pass) -> None:
    with torch.set_grad_enabled(which == "step"):
        out = functional_call(model, dict(tensors), (images,))
        if which == "step":
            out.float().square().mean().backward()


def _own(model: Any) -> tuple[int, int]:
    size = model.img_size
    return (size, size) if isinstance(size, int) else tuple(size)


def _task_of(model: str) -> type[TaskModule]:
    """The task that says what a model's input is like; models of timm's are classifiers."""
    return get_task(MODELS[model].tasks[0]) if model in MODELS else ImageClassification


def _wrong_size(name: str, size: int, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return UserError(f"{name}: {error}")
    reason = "its tensors would be too large" if overflowed(error) else " ".join(str(error).split())
    reason = reason or type(error).__name__
    return UserError(f"{name} does not take images of {size} x {size} px: {reason}; give another --img-size")


def check_is_model(name: str) -> None:
    """Raise `UserError` unless the name is a model whose costs can be measured."""
    if _task_of(name).has_example_input if name in MODELS else timm.is_model(name):
        return
    task = task_of_model(name)
    if task is not None:
        raise UserError(f"{name!r} is a model of {task}, whose cost is counted by: tokenmix info {name}")
    error = unknown_name("mixer or model", name, {*list_mixers(), *list_models(), *timm.list_models()})
    # Nobody reads a list of more than a thousand names.
    if "did you mean" in str(error):
        raise error
    raise UserError(f"unknown mixer or model {name!r}; see: tokenmix list mixers, tokenmix list models")
