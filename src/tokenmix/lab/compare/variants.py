"""What the variants of a comparison are: a name each, and the options of a run that differ."""

import inspect
import re
from typing import Any

from tokenmix.errors import UserError
from tokenmix.lab.train.config import CompareConfig
from tokenmix.registry import MODELS, load_object

IDENTITY, ORIGINAL, NONE = "identity", "original", "none"
"""The control without mixing, the model without a swap, and the model without an inserted block."""


def plan_variants(config: CompareConfig) -> dict[str, dict[str, Any]]:
    """By the name of each variant the options of `TrainConfig` that it has and the others do not.

    With `insert_after` they are inserted there, and the model without a block comes first. Else a model with an
    argument `mixer` gets the mixers there. In any other model they replace the attention layers, and the model as it
    is comes first. Where layers are built or inserted the control without mixing comes last.

    The rows of `config.variants` come after them; arguments of the model are added to the shared ones.

    Raises:
        UserError: no mixer, or an option that the model's way of varying does not have.
    """
    shared, own = config.model.model_kwargs, dict[str, dict[str, Any]]()
    for name, options in config.variants.items():
        if not re.fullmatch(r"[\w.+-]{1,64}", name) or not isinstance(options, dict):
            raise UserError(f"the variant {name!r} is not a table [variants.NAME]; NAME is of letters, digits and -._+")
        kwargs = options.get("model_kwargs", {})
        own[name] = {**options, "model_kwargs": {**shared, **kwargs}} if isinstance(kwargs, dict) else options
    return (_mixer_variants(config) if config.mixers or not own else {}) | own


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
