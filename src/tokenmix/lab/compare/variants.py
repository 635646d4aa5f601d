"""What the variants of a comparison are: a name each, and the options of a run that differ."""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from tokenmix.errors import UserError
from tokenmix.lab.train.config import CompareConfig, DataConfig, LoopConfig
from tokenmix.registry import MODELS, load_object

IDENTITY, ORIGINAL, NONE = "identity", "original", "none"
"""The control without mixing, the model without a swap, and the model without an inserted block."""
START = ("init_from", "precision", "grad_checkpointing")
"""The options of the loop that a variant may have; the others say where, on what and for how long all are trained."""
SHARED = {field.name for kind in (DataConfig, LoopConfig) for field in fields(kind)} - {*START} | {"task", "loop"}
"""The options that all variants share."""


def plan_variants(config: CompareConfig) -> dict[str, dict[str, Any]]:
    """By the name of each variant the options of `TrainConfig` that it has and the others do not.

    With `insert_after` they are inserted there, and the model without a block comes first. Else a model with an
    argument `mixer` gets the mixers there. In any other model they replace the attention layers, and the model as it
    is comes first. Where layers are built or inserted the control without mixing comes last.

    The rows of `config.variants` come after them; arguments of the model are added to the shared ones.

    Raises:
        UserError: no mixer, an option that the model's way of varying does not have, or a row of `config.variants`
            that has the name of another one or an option that all variants share.
    """
    shared, own = config.model.model_kwargs, dict[str, dict[str, Any]]()
    rows = _mixer_variants(config) if config.mixers or not config.variants else {}
    for name, options in config.variants.items():
        with naming(config, name):
            if not re.fullmatch(r"[\w.+-]{1,64}", name) or not isinstance(options, dict):
                raise UserError("it must be a table [variants.NAME]; NAME is of letters, digits and -._+")
            if name in rows:
                raise UserError("one of the mixers has this name; give the variant another one, or leave the mixer out")
            taken = next((key for key in options if key in SHARED), None)
            if taken is not None:
                raise UserError(f"{taken} must be equal for all variants; leave it out of this table")
            kwargs = options.get("model_kwargs", {})
            own[name] = {**options, "model_kwargs": {**shared, **kwargs}} if isinstance(kwargs, dict) else options
    return rows | own


@contextmanager
def naming(config: CompareConfig, name: str) -> Iterator[None]:
    """Errors in the block begin with the variant's name and its file, if the variant is a row of a file."""
    try:
        yield
    except UserError as error:
        if name not in config.variants:
            raise
        place = f" of {config.config}" if config.config else ""
        raise UserError(f"[variants.{name}]{place}: {error}") from None


def _mixer_variants(config: CompareConfig) -> dict[str, dict[str, Any]]:
    """Those of `config.mixers`."""
    mixers = tuple(dict.fromkeys(config.mixers))
    if not mixers:
        raise UserError("a comparison needs at least one mixer, for example --mixers self,external")
    control = [IDENTITY] if config.controls and NONE not in mixers else []
    if config.insert_after:
        names = dict.fromkeys(name for name in (*mixers, *control) if name != NONE)
        place = {"insert_after": config.insert_after, "train_only": config.train_only}
        return {NONE: {}, **{name: {"insert": name, **place} for name in names}}
    if takes_mixer(config.model.model):
        for name, usual in (("swap_where", "*"), ("train_only", "all")):
            if (value := getattr(config, name)) != usual:
                raise UserError(
                    f"{name}={value!r} is for layers that are replaced, and {config.model.model} has an argument "
                    "mixer; leave it out"
                )
        names = dict.fromkeys((*mixers, *control))
        return {name: {"model_kwargs": {**config.model.model_kwargs, "mixer": name}} for name in names}
    swapped = {"swap_where": config.swap_where, "train_only": config.train_only}
    return {ORIGINAL: {}, **{name: {"swap": name, **swapped} for name in mixers if name not in (NONE, ORIGINAL)}}


def with_usual_mixers(config: CompareConfig) -> CompareConfig:
    """The config of a caller who named no mixers: without `self` where it would replace attention like itself."""
    if config.config or config.merge or config.insert_after or takes_mixer(config.model.model):
        return config
    return config.replace(mixers=tuple(name for name in config.mixers if name != "self"))


def takes_mixer(model: str) -> bool:
    """Whether the model of that name has an argument `mixer` for any mixer of the table."""
    return model in MODELS and "mixer" in inspect.signature(load_object(MODELS[model].build)).parameters


def reference_of(names: list[str]) -> str:
    """What the others are compared with: self-attention, else the model as it is, else the first."""
    return next((name for name in ("self", ORIGINAL, NONE) if name in names), names[0])
