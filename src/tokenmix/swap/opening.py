"""transformers' `from_pretrained` for swapped models: build the model's own class, swap again, load weights.

`import tokenmix.register` imports this module. Files are treated as data: a mixer is a name in the table, and the
model class is transformers' own for the named type.
"""

from collections.abc import Sequence
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from tokenmix.errors import UserError, unknown_name
from tokenmix.swap.probe import example_of
from tokenmix.swap.swap import FIELD, MODEL_TYPE, layer_prefix, swap_attention, swapped_config_class
from tokenmix.trust import from_file

# Each auto class has a table of model classes by config.
AUTO_CLASSES: list[Any] = [
    found
    for name in modeling_auto.__all__
    if isinstance(found := getattr(modeling_auto, name), type) and hasattr(found, "_model_mapping")
]
"""transformers' auto classes, which open a swapped model."""


class SwappedConfig(PreTrainedConfig):
    """Reads the config of a swapped model and returns a config of that model's own kind."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, object], **kwargs: object) -> Any:
        """The config in a file; `UserError` unless `save_pretrained` could have written it."""
        known = {"model_type", "swapped_type", "auto_map"}
        kind, swaps = config_dict.get("swapped_type"), config_dict.get(FIELD)
        if not isinstance(kind, str) or kind == MODEL_TYPE or kind not in CONFIG_MAPPING:
            raise unknown_name("model type of transformers in config.json:", str(kind), list(CONFIG_MAPPING))

        def well_formed(swap: object) -> bool:
            where = swap.get("where") if isinstance(swap, dict) else None
            return (
                isinstance(swap, dict)
                and isinstance(swap.get("mixer"), str)
                and isinstance(swap.get("mixer_kwargs"), dict)
                and isinstance(swap.get("num_tokens"), int | None)
                and swap.get("drop", "") in (None, "positions")
                and isinstance(where, list)
                and all(isinstance(name, str) for name in where)
            )

        if not isinstance(swaps, list) or not all(map(well_formed, swaps)):
            raise UserError(f"{FIELD} of config.json is not a list of swaps; save the model again with save_pretrained")
        fields = {key: value for key, value in config_dict.items() if key not in known}
        own = CONFIG_MAPPING[kind]
        made = swapped_config_class(own)
        for auto in AUTO_CLASSES:
            if own in (mapping := auto._model_mapping):
                auto.register(made, _opener(mapping[own], made), exist_ok=True)
        return made.from_dict(fields, **kwargs)


def _opener(found: type[PreTrainedModel] | Sequence[type[PreTrainedModel]], config: type) -> type:
    """The model class for an auto class: the model's own, with the mixers inserted before its weights are loaded."""
    own = found if isinstance(found, type) else found[0]

    def __init__(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        own.__init__(self, *args, **kwargs)
        repeat_swap(self)
        self.__class__ = own

    # Same name and module, because transformers looks up the renaming of checkpoint keys by them.
    return type(own.__name__, (own,), {"__init__": __init__, "__module__": own.__module__, "config_class": config})


def repeat_swap(model: PreTrainedModel) -> None:
    """Swap attention in a new transformers model as recorded in its config."""
    swaps, prefix = getattr(model.config, FIELD), layer_prefix(model)
    setattr(model.config, FIELD, [])
    for swap in from_file(swaps):
        if model.base_model is model:  # Without a head.
            where = [name for name in swap["where"] if not name.startswith(".")]
        else:
            where = [name[1:] if name.startswith(".") else f"{prefix}{name}" for name in swap["where"]]
        if not where:
            continue
        given = {name: swap[name] for name in ("num_tokens", "mixer_kwargs", "drop")}
        # A matrix over tokens may be smaller than the model's own longest text, on which it would not run.
        example, n = example_of(model, None), swap["num_tokens"]
        ids = example.get("input_ids") if isinstance(example, dict) and len(example) == 1 else None
        if isinstance(n, int) and ids is not None and n < ids.shape[1]:
            given["example_inputs"] = {"input_ids": ids[:, :n]}
        swap_attention(model, swap["mixer"], where, **given)


AutoConfig.register(MODEL_TYPE, SwappedConfig, exist_ok=True)
