"""`tokenmix swap`: what a swap would change, and what it would cost. Nothing is written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.models.registry import create_model, create_on_meta
from tokenmix.registry import MODELS, get_task, list_models
from tokenmix.swap.swap import swap_attention


def print_swap(
    target: str,
    mixer: str,
    where: str = "*",
    *,
    img_size: int | None = None,
    mixer_kwargs: Mapping[str, Any] | None = None,
    as_json: bool = False,
) -> int:
    """Print the report of a swap in a temporary model; returns the exit code.

    Args:
        target: a model of ours or timm's, `torchvision:NAME`, or a run folder.
        mixer: a name of `list_mixers()`.
        where: a glob over the names of modules.
        img_size: side of the images that the model is built for.
        mixer_kwargs: arguments of the mixer.
        as_json: print JSON instead of a table.

    Raises:
        UserError: no such model, or a swap that is not possible.
    """
    report = swap_attention(_model(target, img_size), mixer, where, mixer_kwargs=mixer_kwargs)
    if as_json:
        print(json.dumps({"model": target, **report.to_json()}, indent=2))
    else:
        print(report)
    return 0


def _model(target: str, img_size: int | None) -> nn.Module:
    """The model; with shapes only unless it is a run's."""
    if Path(target).is_dir():
        if img_size is not None:
            raise UserError(f"{target} is a run with a fixed image size; omit --img-size")
        from tokenmix.train.load import load_run

        return load_run(Path(target))[0]
    size = {} if img_size is None else {"img_size": img_size}
    if target in MODELS:
        _check_swappable(target)
        return create_on_meta(target, **size)
    with torch.device("meta"):
        if target.startswith("torchvision:"):
            return _torchvision(target.removeprefix("torchvision:"), img_size)
        if not timm.is_model(target):
            raise unknown_name("model", target, [*list_models(), *timm.list_models()])
        try:
            return create_model(target, **size)
        except TypeError as error:
            if img_size is None:
                raise
            raise UserError(f"{target} is built without an image size; omit --img-size ({error})") from None


def _check_swappable(target: str) -> None:
    tasks = MODELS[target].tasks
    if get_task(tasks[0]).comparison is not None:
        raise UserError(
            f"{target} is a model of {', '.join(tasks)}, whose mixer is one of its arguments; by name, swap takes "
            "image classifiers only"
        )


def _torchvision(name: str, img_size: int | None) -> nn.Module:
    from torchvision.models import get_model, list_models

    if name not in list_models():
        raise unknown_name("model of torchvision", name, list_models())
    try:
        return get_model(name, weights=None, **({} if img_size is None else {"image_size": img_size}))
    except TypeError as error:
        if img_size is None:
            raise
        raise UserError(f"{name} is built without an image size; omit --img-size ({error})") from None
