"""What `info`, `compare`, `inspect` and `export` get from a task."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from PIL.Image import Image
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.files import Values
from tokenmix.layers.base import count_parameters
from tokenmix.registry import MODELS, Arguments

Description = Mapping[str, Any]
"""Content of a run folder's data.json."""
Batch = Mapping[str, Any]
"""A task's data for one step: tensors by name, and further values."""


@dataclass(frozen=True)
class HubForm:
    """Format of a task's models on the hub."""

    library: str  # library that loads the models; one of the hub's tags
    pipeline: str  # the hub's name for the models' task
    extra: str  # extra of tokenmix that loading needs
    code: str  # Python that loads a model from `{repo}`


class View(NamedTuple):
    """An input as drawn, (C, H, W), and as the model takes it, (1, C, H', W')."""

    shown: Tensor
    inputs: Tensor


class PlainSamples(NamedTuple):
    """Features (n, d) or texts of n samples, None for a method without inputs; and targets (n, ...)."""

    features: Tensor | list[str] | None
    targets: Tensor


class Shown(NamedTuple):
    """A test sample for a report, each part an image or text. An input that both other parts show is None.

    `legend` maps classes in the images to their colours, as #rrggbb.
    """

    input: Image | str | None
    truth: Image | str
    prediction: Image | str
    legend: Mapping[str, str] = MappingProxyType({})


def check_sizes(sizes: Arguments, known: Sequence[str], remedy: str) -> None:
    """Raise `UserError` for a size that the model lacks."""
    other = next((name for name in sizes if name not in known), None)
    if other is not None:
        raise UserError(f"{remedy}; leave --{other.replace('_', '-')} {sizes[other]} out")


def own_macs(model: nn.Module) -> int | None:
    """Multiply-adds per sample, from the equations; None if the model does not count them."""
    count = getattr(model, "macs", None)
    return int(count()) if callable(count) else None


def model_summary(name: str, model: nn.Module) -> Values:
    """Summary of any model in the registry."""
    return {
        "model": name,
        "task": ", ".join(MODELS[name].tasks),
        "about": MODELS[name].about,
        "parameters": count_parameters(model),
        "macs": own_macs(model),
    }


def counted_summary(name: str, model: Any, inputs: Arguments, *size: int) -> Values:
    """Summary of a model that counts its parts, for inputs of a size; published figures may be for another size."""
    from tokenmix.models.registry import create_on_meta  # not at the top: it imports timm

    rows = (row._asdict() for row in model.cost_table(*size))
    summary = {
        "model": name,
        "task": ", ".join(MODELS[name].tasks),
        "mixer": model.mixer_name,
        **inputs,
        "parameters": count_parameters(model),
        "macs": model.macs(*size),
        "blocks": [{key.replace("mixer_", "mixer "): value for key, value in row.items()} for row in rows],
        "warnings": getattr(model, "warnings", list)(),
        "published": None,
    }
    theirs = MODELS[name].published if name in MODELS else None
    if theirs is None:
        return summary
    preset: Any = create_on_meta(name)
    if theirs.part is not None:
        row = next(row for row in preset.cost_table() if row[0] == theirs.part)
        ours = {"parameters": row.parameters}
    else:
        ours = {"parameters": count_parameters(preset)}
        if theirs.macs is not None:
            ours |= {"image": list(preset.img_size), "macs": preset.macs()}
    return {**summary, "published": asdict(theirs), "preset": ours}
