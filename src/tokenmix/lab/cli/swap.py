"""The model of `tokenmix swap`, by a name or a run folder."""

from typing import Any

import timm
import torch
from torch import nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import user_path
from tokenmix.models.foreign import IMAGENET, load_foreign
from tokenmix.models.registry import create_model, create_on_meta
from tokenmix.registry import MODELS, TORCHVISION, is_foreign, list_models


def load_model(target: str, img_size: int | None) -> nn.Module:
    """A model of ours or timm's, or `torchvision:NAME`, with shapes only; of `module:factory`; or of a run folder.

    Raises:
        UserError: there is none, its mixer is one of its arguments, or it has no image size to choose.
    """
    folder = user_path(target)
    if folder.is_dir():
        if img_size is not None:
            raise UserError(f"{target} is a run with a fixed image size; omit --img-size")
        from tokenmix.lab.train.load import load_run

        return load_run(folder)[0]
    size: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
    if target in MODELS:
        _check_swappable(target)
        return create_on_meta(target, **size)
    if not (is_foreign(target) or timm.is_model(target)):
        raise unknown_name("model", target, [*list_models(), *timm.list_models()])
    if is_foreign(target) and not target.startswith(TORCHVISION):
        return load_foreign(target, IMAGENET, **size)
    try:
        with torch.device("meta"):
            if target.startswith(TORCHVISION):
                image_size: dict[str, Any] = {} if img_size is None else {"image_size": img_size}
                return load_foreign(target, {}, **image_size)
            return create_model(target, **size)
    except TypeError as error:
        if img_size is None:
            raise
        raise UserError(f"{target} is built without an image size; omit --img-size ({error})") from None


def _check_swappable(target: str) -> None:
    tasks = MODELS[target].tasks
    if "image-classification" not in tasks:
        raise UserError(
            f"{target} is a model of {', '.join(tasks)}, whose mixer is one of its arguments; by name, swap takes "
            "image classifiers only"
        )
