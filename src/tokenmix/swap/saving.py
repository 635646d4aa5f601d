"""A swapped model of transformers in its own form: `save_pretrained` writes the swap, `from_pretrained` repeats it.

The config of such a model keeps its class's fields and gets a list of swaps; in the file its type is ours, so that
transformers without tokenmix refuses the folder instead of loading it without the mixers. `import tokenmix.register`
makes the type known. transformers itself is imported only where a model of its own is at hand.
"""

import copy
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.trust import from_file

MODEL_TYPE = "tokenmix-swapped"
FIELD = "tokenmix_swap"
AUTO = (
    "AutoModel",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForMultipleChoice",
    "AutoModelForImageClassification",
    "AutoModelForMaskedImageModeling",
    "AutoModelForVideoClassification",
    "AutoModelForAudioClassification",
    "AutoModelForCTC",
)
"""transformers' automatic classes that open a swapped model."""


def record_swap(
    model: nn.Module, mixer: str, names: Sequence[str], num_tokens: Sequence[int | None], kwargs: Mapping[str, Any]
) -> None:
    """Note a swap in the config of a model of transformers, for `save_pretrained`; nothing for other models.

    Args:
        model: the model that was swapped.
        mixer: name of the mixer.
        names: of the layers.
        num_tokens: N of each layer.
        kwargs: arguments of the mixer.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    old = model.config
    config = copy.deepcopy(old)
    if not isinstance(config, _SwapInConfig):
        config.__class__ = swapped_config_class(type(old))
    inner = "" if model.base_model is model else f"{model.base_model_prefix}."
    counts = sorted({count or 0 for count in num_tokens})
    rows = [
        {
            "mixer": mixer,
            "where": [n.removeprefix(inner) for n, count in zip(names, num_tokens, strict=True) if (count or 0) == one],
            "num_tokens": one or None,
            "mixer_kwargs": dict(kwargs),
        }
        for one in counts
    ]
    setattr(config, FIELD, [*getattr(config, FIELD, ()), *rows])
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config  # type: ignore[assignment]


def repeat_swap(model: Any) -> None:
    """Swap in a new model of transformers as its config says; names of mixers from a file are never code."""
    from tokenmix.swap.swap import swap_attention

    swaps = getattr(model.config, FIELD)
    inner = "" if model.base_model is model else f"{model.base_model_prefix}."
    setattr(model.config, FIELD, [])
    for swap in from_file(swaps):
        where = [f"{inner}{name}" for name in swap["where"]]
        swap_attention(model, swap["mixer"], where, num_tokens=swap["num_tokens"], mixer_kwargs=swap["mixer_kwargs"])


class _SwapInConfig:
    """What is added to a config's class: the file has our type, and all fields."""

    def to_dict(self) -> dict[str, Any]:
        """All fields, those of the swap among them."""
        found = super().to_dict()  # type: ignore[misc]
        return {**found, "model_type": MODEL_TYPE, "swapped_type": found["model_type"]}

    def to_diff_dict(self) -> dict[str, Any]:
        """The same: a reader without the class does not know its defaults."""
        found = self.to_dict()
        found.pop("_name_or_path", None)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty_config, (type(self).__mro__[2],), self.__dict__


def _empty_config(kind: type) -> Any:
    made = swapped_config_class(kind)
    return made.__new__(made)


@functools.cache
def swapped_config_class(kind: Any) -> Any:
    """The class of a swapped model's config, from that of the model, known to transformers' automatic classes."""
    import transformers

    made = type(f"Swapped{kind.__name__}", (_SwapInConfig, kind), {"__module__": __name__})
    for name in AUTO:
        auto = getattr(transformers, name, None)
        if auto is not None and kind in auto._model_mapping:
            auto.register(made, _opener(auto, kind), exist_ok=True)
    return made


def _opener(auto: Any, kind: Any) -> type:
    """What an automatic class opens: the model's own class, with the mixers put in before its weights are read."""

    def build() -> Any:
        found = auto._model_mapping[kind]
        known = found[0] if isinstance(found, tuple | list) else found

        def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            known.__init__(self, config, *args, **kwargs)
            repeat_swap(self)

        return known, type(known.__name__, (known,), {"__init__": __init__, "__module__": known.__module__})

    class Opener:
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            known, swapped = build()
            opened = swapped.from_pretrained(*args, **kwargs)
            (opened[0] if isinstance(opened, tuple) else opened).__class__ = known
            return opened

        @classmethod
        def _from_config(cls, *args: Any, **kwargs: Any) -> Any:
            known, swapped = build()
            made = swapped._from_config(*args, **kwargs)
            made.__class__ = known
            return made

    return Opener


def register_swapped() -> None:
    """Make the type known to transformers."""
    from transformers import AutoConfig, PreTrainedConfig

    class SwappedConfig(PreTrainedConfig):
        """Reads the config of a swapped model; what it returns is of that model's own kind."""

        model_type = MODEL_TYPE

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            """The config of a file."""
            return _read_config(config_dict, **kwargs)

    AutoConfig.register(MODEL_TYPE, SwappedConfig, exist_ok=True)


def _read_config(fields: Mapping[str, Any], **kwargs: Any) -> Any:
    from transformers import CONFIG_MAPPING

    fields = dict(fields)
    kind = fields.pop("swapped_type", None)
    if not isinstance(kind, str) or kind == MODEL_TYPE or kind not in CONFIG_MAPPING:
        raise unknown_name("model type of transformers in config.json:", str(kind), list(CONFIG_MAPPING))
    fields.pop("model_type", None)
    fields.pop("auto_map", None)
    swaps = fields.get(FIELD)
    if not _well_formed(swaps):
        raise UserError(f"{FIELD} of config.json is not a list of swaps; save the model again with save_pretrained")
    return swapped_config_class(CONFIG_MAPPING[kind]).from_dict(fields, **kwargs)


def _well_formed(swaps: Any) -> bool:
    return isinstance(swaps, list) and all(
        isinstance(swap, dict)
        and isinstance(swap.get("mixer"), str)
        and isinstance(swap.get("mixer_kwargs"), dict)
        and isinstance(swap.get("num_tokens"), int | None)
        and isinstance(swap.get("where"), list)
        and all(isinstance(name, str) for name in swap["where"])
        for swap in swaps
    )
