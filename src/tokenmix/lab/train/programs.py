"""Hooks by which `info`, `compare`, `inspect`, `cost` and `export` ask a task about its models."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from PIL.Image import Image
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.files import Values
from tokenmix.lab.train.metrics import Rows
from tokenmix.layers.base import count_parameters
from tokenmix.registry import MODELS, Arguments

Description = Mapping[str, Any]
"""What a run folder's data.json says of the data."""
Batch = Mapping[str, Any]
"""What a task's data gives for a step: tensors by name, and what goes with them."""


@dataclass(frozen=True)
class HubForm:
    """Format of the models of a task on the hub.

    Attributes:
        library: that loads them, by the hub's name, which is one of its tags.
        pipeline: what they do, by the hub's name.
        extra: of tokenmix, which brings what loading needs.
        code: Python that loads one from `{repo}`.
    """

    library: str
    pipeline: str
    extra: str
    code: str


class View(NamedTuple):
    """An input as it is drawn, (C, H, W), and as the model takes it, (1, C, H', W')."""

    shown: Tensor
    inputs: Tensor


class PlainSamples(NamedTuple):
    """Features (n, d) or texts of n samples, None for a method that reads none, and targets (n, ...)."""

    features: Tensor | list[str] | None
    targets: Tensor


class Shown(NamedTuple):
    """A test sample for a report: each an image, or words; an input that both others show is None.

    `legend` has the colours of the classes in the images, as #rrggbb by name.
    """

    input: Image | str | None
    truth: Image | str
    prediction: Image | str
    legend: Mapping[str, str] = MappingProxyType({})


class ProgramHooks:
    """Defaults for a task that overrides none of these hooks.

    Attributes:
        looks_at: what `inspect` can show: the maps of an image, of which `view` makes the model's input; the gates and
            attention of a text; or nothing.
        no_comparison: why `compare` refuses the task, and what to do instead; empty if it does not.
        baselines: names of the simplest methods for the task, in `tokenmix.lab.compare.baselines`, which `compare`
            fits to `plain_samples`; `judged` takes logarithms of their probabilities and the targets.
        hub: how `save_for_hub` leaves its models; None if no library of the hub loads them.
    """

    looks_at: ClassVar[Literal["images", "text", "nothing"]] = "nothing"
    no_comparison: ClassVar[str] = ""
    baselines: ClassVar[tuple[str, ...]] = ()
    hub: ClassVar[HubForm | None] = None

    def plain_samples(self, data: Any, part: Literal["train", "test"]) -> Iterator[PlainSamples]:
        """What simple baselines learn from and are scored on, in batches."""
        raise NotImplementedError(f"{type(self).__name__} names baselines and has no plain_samples")

    def judged(self, logits: Tensor, targets: Tensor, index: Tensor) -> Rows:
        """What an evaluation keeps of logits (n, classes, ...) and targets (n, ...) of the samples `index` (n,)."""
        raise NotImplementedError(f"{type(self).__name__} names baselines and has no judged")

    def num_targets(self) -> int:
        """How many values a target of `plain_samples` may have."""
        return len(self.data["classes"])  # type: ignore[attr-defined]

    def plain_answers(self, data: Any) -> dict[str, Rows]:
        """What an evaluation would keep of the test answers of simple methods of the task's own, by their names."""
        return {}

    def show(self, batch: Batch) -> list[Shown]:
        """Test samples as they are drawn, with what is true and what the model predicts; empty: nothing to draw."""
        return []

    @classmethod
    def summarize_model(cls, name: str, sizes: Arguments, model_kwargs: Arguments) -> Values:
        """What `tokenmix info` prints of a model.

        Args:
            name: of the registry.
            sizes: of the input, as asked for: `img_size`, `num_points`; `UserError` for one that the model lacks.
            model_kwargs: arguments of the model.
        """
        check_sizes(sizes, (), f"{name} is given its sizes by --model-kwargs")
        from tokenmix.models.registry import create_on_meta  # not at the top: it imports timm

        return model_summary(name, create_on_meta(name, **model_kwargs))

    @classmethod
    def view(cls, model: nn.Module, file: Path, data: Description) -> View:
        """The input in a file as `predict` reads it; `data` is the run's description of its data."""
        raise NotImplementedError(f"{cls.__name__} has no view")

    def save_for_hub(self, folder: Path) -> nn.Module:
        """Write the model into a folder in the form `hub`, and return what its library loads from there.

        The module that is returned is called as the task's `answering()` is.
        """
        raise NotImplementedError(f"{type(self).__name__} has a form on the hub and no save_for_hub")


def check_sizes(sizes: Arguments, known: Sequence[str], remedy: str) -> None:
    """Raise `UserError` for a size that a model does not have."""
    other = next((name for name in sizes if name not in known), None)
    if other is not None:
        raise UserError(f"{remedy}; leave --{other.replace('_', '-')} {sizes[other]} out")


def own_macs(model: nn.Module) -> int | None:
    """Multiply-adds of one sample, from the equations; None if the model does not count them."""
    count = getattr(model, "macs", None)
    return int(count()) if callable(count) else None


def model_summary(name: str, model: nn.Module) -> Values:
    """What is known of any model of the registry."""
    return {
        "model": name,
        "task": ", ".join(MODELS[name].tasks),
        "about": MODELS[name].about,
        "parameters": count_parameters(model),
        "macs": own_macs(model),
    }


def counted_summary(name: str, model: Any, inputs: Arguments, *size: int) -> Values:
    """What a model that counts its parts has and takes for inputs of a size, with the published figures.

    Those are the paper's, and ours of the preset: what was asked for may have another size or other arguments.
    """
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
