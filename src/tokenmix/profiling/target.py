"""Subjects of a cost table with their input: a mixer at a number of tokens, or a model at an image size."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.errors import MissingExtra, UserError, unknown_name
from tokenmix.files import Values
from tokenmix.layers.base import Mixer, count_parameters, near_square
from tokenmix.layers.table import (
    MIXERS,
    build_mixer,
    checked_own_mixers,
    create_mixer,
    get_spec,
    is_mixer,
    list_mixers,
    own_mixers,
)
from tokenmix.ops.less import Scores
from tokenmix.profiling.machine import overflowed
from tokenmix.registry import MODELS, TORCHVISION, Arguments, check_models, import_object
from tokenmix.swap.probe import example_of, model_macs


@dataclass(frozen=True)
class Measured:
    """A module with its input and, for a stacked layer, the previous layer's scores."""

    module: nn.Module
    x: Tensor
    carry: Scores | None = None

    def _run(self, x: Tensor) -> Tensor:
        return self.module.mix(x, self.carry)[0] if isinstance(self.module, Mixer) else self.module(x)

    @torch.no_grad()
    def forward(self) -> Tensor:
        return self._run(self.x)

    def step(self) -> None:
        """One forward and backward pass, with gradients for weights and tokens, not for images."""
        x = self.x.detach().requires_grad_(isinstance(self.module, Mixer))
        self._run(x).float().square().mean().backward()
        self.module.zero_grad(set_to_none=True)

    def counts(self) -> dict[str, int]:
        """Parameters, multiply-adds, and traffic: bytes of input, weights, output and scores, each moved once."""
        out = self.x
        own: Any = getattr(self.module, "macs", None)
        if isinstance(self.module, Mixer):
            macs = self.module.macs(self.x.numel() // self.x.shape[0] // self.module.dim)
        else:
            out, macs = self.forward(), model_macs(self.module, (self.x,)) if own is None else own()
        scores = 0 if self.carry is None else self.carry.query.nbytes + self.carry.key.nbytes
        traffic = self.x.nbytes + out.nbytes + sum(p.nbytes for p in self.module.parameters()) + scores
        return {"parameters": count_parameters(self.module), "macs": macs, "traffic": traffic}

    def dry_run(self, which: str, device: torch.device) -> Callable[[], Callable[[], object]]:
        """The pass `which` of a copy, for `expected_peak`; models cannot be built in a dry run."""
        twin, empty = copy.deepcopy(self), partial(torch.empty_like, device=device)

        def build() -> Callable[[], object]:
            made = {name: empty(x) for name, x in twin.carry._asdict().items() if x is not None} if twin.carry else {}
            carry = Scores(**made) if made else None
            return getattr(Measured(twin.module.to_empty(device=device), empty(twin.x), carry), which)

        return build


Target = Callable[..., Measured]
"""Builds the subject at a size on the named `device`; on meta, also checks that it runs."""


def layer_for(name: str, dim: int, num_tokens: int, **kwargs: object) -> Mixer:
    """The mixer as inside a stack; `kwargs` go to layers that accept them."""
    spec = get_spec(name)
    known = {**_known(spec.layer, kwargs), **spec.later}
    return create_mixer(name, dim, num_tokens=num_tokens, **known)


def mixer_with_input(
    name: str,
    dim: int,
    num_tokens: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: object,
) -> Measured:
    """Build a mixer and random input. If layers of a stack pass scores, the previous layer runs once."""
    spec, carry = get_spec(name), None
    # As defaults, because user mixers may not accept device and dtype.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with torch.device(device or "cpu"), torch.no_grad():
            layer = layer_for(name, dim, num_tokens, **kwargs)
            x = torch.randn(1, num_tokens, dim)
            if layer.capabilities.layout == "2d":
                x = x.transpose(1, 2).unflatten(2, near_square(num_tokens)).contiguous()
            if spec.leader is not None:
                given = _known(spec.leader, kwargs)
                carry = build_mixer(spec.leader, f"the leader of {name!r}", dim, num_tokens, given).mix(x)[1]
    finally:
        torch.set_default_dtype(before)
    built = Measured(layer, x, carry)
    if x.is_meta and own_mixers(layer):
        with checked_own_mixers(layer):
            built.forward()
    return built


def _known(layer: type[Mixer], offered: Arguments) -> Values:
    accepted = inspect.signature(layer).parameters
    return {name: value for name, value in offered.items() if name in accepted and value is not None}


def model_with_image(
    model: str | nn.Module,
    size: int | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Measured:
    """Build a classifier (ours, timm's, torchvision's), or copy an image model, and make a square of noise for it.

    The default `size` is the model's own, or 224; `UserError` if the model does not accept the size.
    """
    from tokenmix.models.foreign import open_model
    from tokenmix.models.registry import of_size

    name, given = (model, None) if isinstance(model, str) else (type(model).__name__, model)
    try:
        with torch.device(device):
            built = of_size(partial(open_model, name), size) if given is None else copy.deepcopy(given)
        own = example_of(built, None)
        resize: Any = getattr(built, "set_input_size", None)
        image = own[0] if isinstance(own, tuple) else None
        fits = given is None or size is None or (isinstance(image, Tensor) and image.shape[2] == size)
        if not fits and resize is not None:
            resize(size)
        example = example_of(built, size or (None if own else 224))
        if isinstance(example, Mapping) and [*example] == ["pixel_values"]:
            example = (*example.values(),)  # for transformers
        if not isinstance(example, tuple) or not isinstance(example[0], Tensor):
            raise UserError("its input is no image; give a model of images")
        x = torch.randn(example[0].shape, device=device, dtype=dtype)
        made = Measured(built.to(device, dtype).eval(), x)
        if x.is_meta:
            made.forward()
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise UserError(f"{name}: {str(error).removeprefix(f'{name} ')}") from None
        reason = "its tensors would be too large" if overflowed(error) else " ".join(str(error).split())
        raise UserError(
            f"{name} does not take images of {size} x {size} px: {reason or type(error).__name__}; give another size"
        ) from None
    return made


_OF_THE_TABLE = {"dim", "num_tokens", "device", "dtype"}


def named(subjects: Iterable[str | nn.Module]) -> dict[str, str | nn.Module]:
    """The subjects by their names in the table: a module's is its class, with a number from the second one on."""
    found: dict[str, str | nn.Module] = {}
    for one in subjects:
        name = kind = one if isinstance(one, str) else str(getattr(one, "__name__", type(one).__name__))
        number = 1
        while name in found and not isinstance(one, str):
            number += 1
            name = f"{kind} {number}"
        found[name] = one
    return found


def targets_for(
    subjects: Mapping[str, str | nn.Module], *, dim: int, dtype: torch.dtype, kwargs: Arguments
) -> tuple[dict[str, Target], bool]:
    """Mixers by name, self-attention first, or models in the given order; and whether they are mixers."""
    if not are_mixers(subjects):
        return {label: partial(model_with_image, subject, dtype=dtype) for label, subject in subjects.items()}, False
    mixers = list(dict.fromkeys(["self", *map(str, subjects.values())]))
    accepted = {key for name in mixers for key in inspect.signature(get_spec(name).layer).parameters}
    if unknown := sorted(set(kwargs) - accepted):
        known = ", ".join(sorted(accepted - _OF_THE_TABLE))
        raise UserError(
            f"none of {', '.join(mixers)} has an argument {unknown[0]!r}; they take {known}; "
            "numbers of tokens are given as sizes"
        )
    return {name: partial(mixer_with_input, name, dim, dtype=dtype, **kwargs) for name in mixers}, True


def are_mixers(subjects: Mapping[str, str | nn.Module]) -> bool:
    """Whether all are mixers, or else models; `UserError` for an unknown name, and for a mixture."""
    for label, one in subjects.items():
        if isinstance(one, type):
            raise UserError(f"{label!r} is the class {one.__name__}; give a model that is built, or 'module:Class'")
    mixers = [label for label, one in subjects.items() if isinstance(one, str) and _is_mixer(one)]
    models = [label for label in subjects if label not in mixers]
    for name in (one for one in map(subjects.get, models) if isinstance(one, str)):
        check_is_model(name)
    if mixers and models:
        raise UserError(f"{mixers[0]!r} is a mixer and {models[0]!r} a model; measure them in separate commands")
    return not models


def _is_mixer(name: str) -> bool:
    """Of "module:Name" a subclass of `Mixer`, or a class with `dim` and no size of images; others build a model."""
    if name in MIXERS or not is_mixer(name):
        return name in MIXERS
    found = import_object(name)
    if not isinstance(found, type) or issubclass(found, Mixer):
        return isinstance(found, type)
    taken = inspect.signature(found).parameters
    return "dim" in taken and not {"img_size", "num_classes"} & taken.keys()


def check_is_model(name: str) -> None:
    try:
        from tokenmix.models.foreign import IMAGENET, load_foreign
    except MissingExtra as missing:
        raise MissingExtra(f"{unknown_name('mixer', name, list_mixers())}; if it is a model: {missing}") from None
    if name.startswith(TORCHVISION):
        with torch.device("meta"):
            load_foreign(name, IMAGENET, "classifier")
    elif name in MODELS and "image-classification" not in (tasks := MODELS[name].tasks):
        raise UserError(f"{name!r} is a model of {', '.join(tasks)}, whose cost is counted by: tokenmix info {name}")
    else:
        check_models([name], list_mixers())
