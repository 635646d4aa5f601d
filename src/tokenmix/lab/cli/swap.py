"""The model of `tokenmix swap`, by a name or a run folder."""

import timm
import torch
from torch import nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import user_path
from tokenmix.models.registry import create_model, create_on_meta
from tokenmix.registry import MODELS, list_models


def load_model(target: str, img_size: int | None) -> nn.Module:
    """A model of ours or timm's, or `torchvision:NAME`, with shapes only; or the model of a run folder.

    Raises:
        UserError: there is none, its mixer is one of its arguments, or it has no image size to choose.
    """
    folder = user_path(target)
    if folder.is_dir():
        if img_size is not None:
            raise UserError(f"{target} is a run with a fixed image size; omit --img-size")
        from tokenmix.lab.train.load import load_run

        return load_run(folder)[0]
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
    if "image-classification" not in tasks:
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
