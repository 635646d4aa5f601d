"""A swapped model of transformers notes the swap in its config, which `save_pretrained` writes.

The config keeps its class's fields and gets a list of swaps. In the file its type is ours, so that transformers without
tokenmix refuses the folder instead of opening it without the mixers; `tokenmix.swap.opening` opens it.
"""

import copy
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

MODEL_TYPE = "tokenmix-swapped"
FIELD = "tokenmix_swap"


def record_swap(
    model: nn.Module,
    mixer: str,
    names: Sequence[str],
    num_tokens: Sequence[int | None],
    kwargs: Mapping[str, Any],
    drop: str | None,
) -> None:
    """Note a swap in the config of a model of transformers, for `save_pretrained`; nothing for other models.

    Args:
        model: the model that was swapped.
        mixer: name of the mixer.
        names: of the layers.
        num_tokens: N of each layer.
        kwargs: arguments of the mixer.
        drop: as of `swap_attention`.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    old = model.config
    # Another model may have the same config.
    config = copy.deepcopy(old)
    if not isinstance(config, SwapInConfig):
        config.__class__ = swapped_config_class(type(old))
    prefix = layer_prefix(model)
    rows = [
        {
            "mixer": mixer,
            "where": [n.removeprefix(prefix) for n, count in zip(names, num_tokens, strict=True) if count == one],
            "num_tokens": one,
            "mixer_kwargs": dict(kwargs),
            "drop": drop,
        }
        for one in dict.fromkeys(num_tokens)
    ]
    setattr(config, FIELD, [*getattr(config, FIELD, ()), *rows])
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config  # type: ignore[assignment]


def layer_prefix(model: Any) -> str:
    """What stands before the names of layers in a model with a head, such as "bert."; the notes leave it out."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


class SwapInConfig:
    """What is added to a config's class: the file has our type, and all fields."""

    def to_dict(self) -> dict[str, Any]:
        """All fields, those of the swap among them."""
        found = super().to_dict()  # type: ignore[misc]
        return {**found, "model_type": MODEL_TYPE, "swapped_type": found["model_type"]}

    def to_diff_dict(self) -> dict[str, Any]:
        """The same without private ones: a reader without the class does not know its defaults."""
        return {key: value for key, value in self.to_dict().items() if not key.startswith("_")}

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty_config, (type(self).__mro__[2],), self.__dict__


def _empty_config(kind: type) -> Any:
    made = swapped_config_class(kind)
    return made.__new__(made)


@functools.cache
def swapped_config_class(kind: Any) -> Any:
    """The class of a swapped model's config, from that of the model."""
    return type(f"Swapped{kind.__name__}", (SwapInConfig, kind), {"__module__": __name__})
