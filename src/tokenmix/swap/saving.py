"""A swapped model of transformers notes the swap in its config, which `save_pretrained` writes.

The config keeps its class's fields and gets a list of swaps. In the file its type is ours, so that transformers without
tokenmix refuses the folder instead of opening it without the mixers; `tokenmix.swap.opening` opens it.
"""

import copy
import functools
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from tokenmix.registry import Arguments
from tokenmix.swap.report import SwapRow

MODEL_TYPE = "tokenmix-swapped"
FIELD = "tokenmix_swap"


def record_swap(model: nn.Module, mixer: str, rows: Sequence[SwapRow], kwargs: Arguments, drop: str | None) -> None:
    """Note a swap in the configs of transformers' models, the model itself or parts of it, for `save_pretrained`."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    outermost: list[str] = []
    for name, part in model.named_modules():
        if isinstance(part, transformers.PreTrainedModel) and not any(name.startswith(one) for one in outermost):
            outermost.append(f"{name}." if name else "")
            tokens = {
                row.name.removeprefix(outermost[-1]): row.num_tokens
                for row in rows
                if row.name.startswith(outermost[-1])
            }
            if not tokens:
                continue
            # Another model may have the same config.
            old: Any = part.config
            config, prefix = copy.deepcopy(old), layer_prefix(part)
            if not isinstance(config, SwapInConfig):
                config.__class__ = swapped_config_class(type(old))
            notes = [
                {
                    "mixer": mixer,
                    "where": [name.removeprefix(prefix) for name, count in tokens.items() if count == one],
                    "num_tokens": one,
                    "mixer_kwargs": dict(kwargs),
                    "drop": drop,
                }
                for one in dict.fromkeys(tokens.values())
            ]
            setattr(config, FIELD, [*getattr(config, FIELD, ()), *notes])
            for module in part.modules():
                if getattr(module, "config", None) is old:
                    module.config = config


def layer_prefix(model: Any) -> str:
    """What stands before the names of layers in a model with a head, such as "bert."; the notes leave it out."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


class SwapInConfig:
    """What is added to a config's class: the file has our type, and all fields."""

    def to_dict(self) -> dict[str, object]:
        """All fields, those of the swap among them."""
        found = super().to_dict()  # type: ignore[misc]
        return {**found, "model_type": MODEL_TYPE, "swapped_type": found["model_type"]}

    def to_diff_dict(self) -> dict[str, object]:
        """The same without private ones: a reader without the class does not know its defaults."""
        return {key: value for key, value in self.to_dict().items() if not key.startswith("_")}

    def __reduce__(self) -> tuple[object, ...]:
        return _empty_config, (type(self).__mro__[2],), self.__dict__


@functools.cache
def swapped_config_class(kind: Any) -> Any:
    """The class of a swapped model's config, from that of the model."""
    return type(f"Swapped{kind.__name__}", (SwapInConfig, kind), {"__module__": __name__})


def _empty_config(kind: type) -> Any:
    made = swapped_config_class(kind)
    return made.__new__(made)
