"""Weights of another run or file as the start of a model: of another size or length, or with another head."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tokenmix import checkpoints
from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log
from tokenmix.lab.train.checkpoint import read_weights
from tokenmix.lab.train.distributed import distributed_info
from tokenmix.lab.train.sources import read_description


def initial_weights(source: Path, model: Any) -> dict[str, Tensor]:
    """The weights in a safetensors file or a run folder, fitted to the model.

    What is learned over the tokens is interpolated to the model's image size; a head for another number of classes is
    left fresh, and a line reports it. Anything else that differs is unchanged, for `put_weights` to refuse.
    """
    description = read_description(source) if (source / "data.json").is_file() else {}
    _check_channels(source, description, model)
    weights = checkpoints.rename(read_weights(source), model)
    size = description.get("img_size")
    trained = (size[0], size[1]) if isinstance(size, list) else None
    try:
        if hasattr(model, "starting_weights"):
            # By the model's own rule, as a detector's, which takes the weights of classifiers too.
            weights, line = model.starting_weights(weights, trained)
            if line is not None and distributed_info().first:
                log(f"{source}: {line}")
            return weights
        if hasattr(model, "set_input_size") and not hasattr(model, "img_size"):
            weights = _resized_by_timm(weights, model)
        elif hasattr(model, "set_input_size") and hasattr(model, "feature_info"):
            weights = checkpoints.resize(weights, model, img_size=trained)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return _with_fresh_head(weights, model, source)


def _resized_by_timm(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Learned positions of a model of timm's at its image size, by the rule of its family, if there is one."""
    own = model.state_dict()
    rule = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if rule is None or all(weights[k].shape == own[k].shape for k in ("pos_embed",) if k in weights and k in own):
        return weights
    return dict(rule(weights, model))


def _check_channels(source: Path, description: Mapping[str, Any], model: Any) -> None:
    theirs = description.get("channels")
    ours = getattr(model, "in_chans", theirs)
    if theirs is not None and theirs != ours:
        raise UserError(
            f"{source} was trained on images of {theirs} channel(s) and this data has {ours}; "
            f"start from a run with {ours}, or without --init-from, or read images so with --in-chans {theirs}"
        )


def _with_fresh_head(weights: dict[str, Tensor], model: Any, source: Path) -> dict[str, Tensor]:
    if not hasattr(model, "get_classifier"):
        return weights
    head = model.get_classifier()
    prefix = next((name for name, module in model.named_modules() if module is head), None)
    own = {key: value for key, value in model.state_dict().items() if prefix and key.startswith(f"{prefix}.")}
    other = {
        key: weights[key] for key, value in own.items() if key in weights and weights[key].shape[0] != value.shape[0]
    }
    # A head of another width is of another model.
    if not other or any(value.shape[1:] != own[key].shape[1:] for key, value in other.items()):
        return weights
    if distributed_info().first:
        theirs, ours = (next(iter(part.values())).shape[0] for part in (other, own))
        log(f"the head starts fresh: {source} has {theirs} classes, this run {ours}")
    return {**weights, **own}
