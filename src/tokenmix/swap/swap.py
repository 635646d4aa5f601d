"""Swap a model's attention for another mixer; transformers' models record the swap for `save_pretrained`.

The config keeps the fields of its class and gets a list of swaps. The file has our model type, so transformers without
tokenmix rejects the folder instead of opening it without the mixers. `tokenmix.swap.opening` opens it.
"""

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn

from tokenmix.environment import warn_untested
from tokenmix.errors import UserError
from tokenmix.layers.base import Mixer, count_parameters, outer_mixers
from tokenmix.layers.table import resolve_mixer
from tokenmix.registry import Arguments
from tokenmix.swap.adapter import NO_ATTENTIONS, check_model
from tokenmix.swap.carrying import watch_blocks
from tokenmix.swap.inserting import holders, unpack_padded
from tokenmix.swap.probe import Example, check_runs, example_of, probe_model
from tokenmix.swap.registry import Where, find_sites, select_sites
from tokenmix.swap.replacements import Replacement, SwapRequest, lost_hooks, misread_weights, plan_replacements
from tokenmix.swap.report import SwapReport, SwapRow

MODEL_TYPE = "tokenmix-swapped"
FIELD = "tokenmix_swap"


def record_swap(model: nn.Module, mixer: str, rows: Sequence[SwapRow], kwargs: Arguments, drop: str | None) -> None:
    """Record a swap in the configs of transformers' models, the model or parts of it, for `save_pretrained`."""
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
            # Another model may share the config.
            old: Any = part.config
            config, prefix = copy.deepcopy(old), layer_prefix(part)
            if not isinstance(config, SwapInConfig):
                config.__class__ = swapped_config_class(type(old))
            notes = [
                {
                    "mixer": mixer,
                    "where": [stored_name(name, prefix) for name, count in tokens.items() if count == one],
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
            part.register_forward_pre_hook(refuse_attentions, with_kwargs=True)


def refuse_attentions(model: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> None:
    """Hook of a swapped transformers model, which would return the attentions of the other layers alone."""
    if kwargs.get("output_attentions") or getattr(model.config, "output_attentions", False):
        raise UserError(NO_ATTENTIONS)


def stored_name(name: str, prefix: str) -> str:
    """The name in the base model; with a dot before it, that of a head, such as the decoder of MAE."""
    return name.removeprefix(prefix) if name.startswith(prefix) else f".{name}"


def layer_prefix(model: Any) -> str:
    """Prefix of layer names in a model with a head, such as "bert."; recorded names omit it."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


class SwapInConfig:
    """Mixin of a config's class: the file has our model type and all fields."""

    def to_dict(self) -> dict[str, object]:
        found = super().to_dict()  # type: ignore[misc]
        return {**found, "model_type": MODEL_TYPE, "swapped_type": found["model_type"]}

    def to_diff_dict(self) -> dict[str, object]:
        """All non-private fields, because a reader without the class does not know its defaults."""
        return {key: value for key, value in self.to_dict().items() if not key.startswith("_")}

    def __reduce__(self) -> tuple[object, ...]:
        return _empty_config, (type(self).__mro__[2],), self.__dict__


@functools.cache
def swapped_config_class(kind: Any) -> Any:
    return type(f"Swapped{kind.__name__}", (SwapInConfig, kind), {"__module__": __name__})


def _empty_config(kind: type) -> Any:
    made = swapped_config_class(kind)
    return made.__new__(made)


def swap_attention(
    model: nn.Module,
    mixer: str | type[Mixer],
    where: Where = "*",
    *,
    num_tokens: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    example_inputs: Example | None = None,
    mixer_kwargs: Arguments | None = None,
    drop: Literal["positions"] | None = None,
) -> SwapReport:
    """Replace a model's attention layers by a mixer, in place.

        softmax(Q K^T / sqrt(d)) V W_o   ->   mixer(x),   with W_q, W_k, W_v, W_o kept where they have the same role

    The page on swaps lists the supported attention of timm, torchvision, transformers, MONAI and diffusers.
    `nn.MultiheadAttention` anywhere, our own mixers and kinds added by `register_adapter` are also supported. The
    number of heads, biases and dropout rates carry over if the mixer has them. All weights of a new layer train, even
    if the old layer was frozen. Create optimisers afterwards. If an error is raised, the model is unchanged.

    Args:
        model: a model, or a module that contains attention.
        mixer: a name of `tokenmix.list_mixers()`, or a mixer class.
        where: a glob over module names, a list of names, or a function of name and module. Matches of a glob or
            function that cannot be swapped are skipped and listed in the report; a name in a list raises an error.
        num_tokens: N, for mixers with weights over tokens (default: found by a forward pass).
        img_size: for that pass (default: the model's own).
        example_inputs: arguments of that pass in order, or by name (such as a transformers tokenizer's output), for
            models whose input cannot be inferred.
        mixer_kwargs: arguments of the mixer.
        drop: "positions" drops rotary and relative positions inside an attention, which otherwise prevent a swap. The
            rows of the report name the dropped parts.

    Returns:
        The report; `report.model` is `model`.

    Raises:
        UserError: the mixer or an argument is unknown; `where` matches nothing; a named or the only site cannot be
            swapped; or the model would not run.
    """
    check_model(model)
    if drop not in (None, "positions"):
        raise UserError(f"drop={drop!r} is unknown; give drop='positions', or leave it out")
    warn_untested()
    label, layer, fixed = resolve_mixer(mixer)
    named = mixer if isinstance(mixer, str) else f"{mixer.__module__}:{mixer.__qualname__}"
    sites = find_sites(model)
    chosen = select_sites(sites, where)
    example = example_of(model, img_size) if example_inputs is None else example_inputs
    probe = probe_model(model, [(site.module, site.adapter) for site in chosen], example)
    if probe.note and (example_inputs is not None or img_size is not None):
        given = f"img_size={img_size} does" if example_inputs is None else "example_inputs do"
        raise UserError(f"{given} not match the model: {probe.note}; give arguments that its forward takes")
    request = SwapRequest(
        label=label,
        layer=layer,
        kwargs={**fixed, **(mixer_kwargs or {})},
        num_tokens=num_tokens,
        grid=_grid(model),
        probe=probe,
        strict=not isinstance(where, str) and not callable(where),
        drop_positions=drop == "positions",
    )
    replacements, skipped = plan_replacements(chosen, request)
    kinds = {id(one.site.adapter): one.site for one in reversed(replacements)}
    misread = [note for site in kinds.values() if (note := misread_weights(site))]
    hooked = [one.site.name for one in replacements if lost_hooks(one.site)]
    if hooked:
        misread.append(f"forward hooks on {', '.join(hooked)} are gone; register them on the new layers")
    before = count_parameters(model)
    undo, put_notes = _put(model, replacements, label, whole=len(replacements) == sum(site.known for site in sites))
    notes = [*misread, *put_notes]
    if probe.note:
        remedy = "give img_size (--img-size in a command) or example_inputs"
        notes.append(f"multiply-adds of the model are not known: {probe.note}; {remedy}")
    macs = None if probe.macs is None or example is None else check_runs(model, example, undo, probe.device)
    rows = tuple(replacement.row for replacement in replacements)
    record_swap(model, named, rows, mixer_kwargs or {}, drop)
    return SwapReport(
        model=model,
        mixer=label,
        rows=rows,
        skipped=tuple(skipped),
        parameters_before=before,
        parameters_after=count_parameters(model),
        macs_before=probe.macs,
        macs_after=macs,
        notes=tuple(notes),
    )


def set_input_size(model: nn.Module, img_size: int | tuple[int, int]) -> None:
    """Change the image size of a timm model, including swapped-in matrices over tokens.

    Gates and the transforms of less-attention are interpolated over the grid, see `tokenmix.ops.resize_gate`.

    Args:
        model: a model with `set_input_size`, changed in place.
        img_size: the new size.

    Raises:
        UserError: the model lacks that method; or a matrix covers more tokens than the grid, such as class tokens.
    """
    sized: Any = model
    old = _grid(model)
    if not hasattr(model, "set_input_size") or not hasattr(model, "patch_embed") or old is None:
        raise UserError(f"{type(model).__name__} has no set_input_size; build it for its size, then swap")
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    mixers = outer_mixers(model).values()
    for mixer in mixers:
        count = getattr(mixer, "num_tokens", old[0] * old[1])
        if count != old[0] * old[1]:
            raise UserError(
                f"{type(mixer).__name__} has a matrix over {count} tokens, and the grid has {old[0]} x {old[1]}; set "
                "the size first, then swap"
            )
    # The new grid comes from a copy, so that a mixer that cannot be resized leaves the model unchanged.
    patches = copy.deepcopy(sized.patch_embed)
    patches.set_input_size(size)
    for mixer in mixers:
        mixer.set_grid(old, patches.grid_size)
    sized.set_input_size(size)


def _grid(model: nn.Module) -> tuple[int, int] | None:
    for holder in (model, getattr(model, "patch_embed", None)):
        grid = getattr(holder, "grid_size", None)
        if isinstance(grid, Sequence) and len(grid) == 2:
            return int(grid[0]), int(grid[1])
    return None


def _put(
    model: nn.Module, replacements: Sequence[Replacement], label: str, *, whole: bool
) -> tuple[Callable[[], None], tuple[str, ...]]:
    """Install the replacements; return a function that undoes this, and remarks on other changes."""
    _set(model, [(replacement, replacement.replacement) for replacement in replacements])
    unwatch = watch_blocks([(r.site.holder, r.carrying) for r in replacements if r.carrying is not None])
    holding = holders(model, [replacement.replacement for replacement in replacements])
    packing = unpack_padded(holding)
    # Our models report their mixer. If `mixer_name` is a property, a part of the model reports it.
    told = [m for m in holding if not isinstance(getattr(type(m), "mixer_name", None), property)]
    named = [(m, name) for m in told if isinstance(name := getattr(m, "mixer_name", None), str)]
    for module, old_name in named:
        module.mixer_name = label if whole else f"{old_name}, {label}"  # type: ignore[assignment]

    def undo() -> None:
        _set(model, [(replacement, replacement.site.module) for replacement in replacements])
        unwatch()
        for encoder in packing:
            encoder.use_nested_tensor = True
        for module, old_name in named:
            module.mixer_name = old_name  # type: ignore[assignment]

    note = "use_nested_tensor of nn.TransformerEncoder is off: mixers take padded batches with their mask"
    return undo, (note,) if packing else ()


def _set(model: nn.Module, modules: Sequence[tuple[Replacement, nn.Module]]) -> None:
    for replacement, module in modules:
        for name in replacement.site.names:
            model.set_submodule(name, module)
