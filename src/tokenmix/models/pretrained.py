"""Pretrained weights: where they are, in which layout, for which image size."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from timm.models import PretrainedCfg, resolve_pretrained_cfg
from torch import Tensor

from tokenmix import checkpoints
from tokenmix.errors import UserError, one_line
from tokenmix.models.interface import Classifier, pair
from tokenmix.trust import check_typed, texts_in

FILES = ("model.safetensors", "pytorch_model.bin")
ELSEWHERE = "fetch model.safetensors where there is one and give pretrained_cfg_overlay={'file': PATH}"


def check_source(
    name: str, cfg: PretrainedCfg, cache_dir: str | Path | None = None, elsewhere: str = ELSEWHERE
) -> None:
    """Raise `UserError` if there are no weights, or if they lie on the hub and it cannot be reached: then `elsewhere`.

    One short question is asked first, because the download itself repeats its attempts for most of a minute.
    """
    if not (cfg.has_weights or cfg.state_dict):
        raise UserError(
            f"{name} has no pretrained weights; build it with pretrained=False and train it, or give a file of yours "
            "with pretrained_cfg_overlay={'file': PATH}"
        )
    if cfg.file or cfg.state_dict or not cfg.hf_hub_id:
        return
    repo = cfg.hf_hub_id.split("@")[0]
    if any(isinstance(try_to_load_from_cache(repo, file, cache_dir=cache_dir), str) for file in FILES):
        return
    try:
        HfApi().model_info(repo, timeout=10)
    except HfHubHTTPError as error:
        raise UserError(
            f"the weights of {name} were not found at {repo} on the hub: {one_line(error)}; {elsewhere}"
        ) from error
    except Exception as error:
        # Which errors a missing network raises depends on the hub's HTTP library and on proxies.
        raise UserError(
            f"the weights of {name} are in {repo} on huggingface.co, which cannot be reached ({one_line(error)}): "
            f"connect to the internet, or {elsewhere}"
        ) from error


@contextmanager
def fetching(name: str, elsewhere: str = ELSEWHERE) -> Iterator[None]:
    """Errors of a file or a download as a `UserError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"the weights of {name} could not be read ({one_line(error)}): {elsewhere}") from error


# Arguments of timm's factory that say where weights are.
PLACES = ("pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


def by_timm(name: str, **kwargs: Any) -> Any:
    """`timm.create_model`; `UserError` for a model of the hub or a folder, or a place of weights, that a file names."""
    if ":" in name:
        check_typed(name, "a model's place", "opened")
    for key in PLACES:
        for text in texts_in(kwargs.get(key)):
            check_typed(text, f"a place of weights, {key}", "opened")
    return timm.create_model(name, **kwargs)


def timm_model(name: str, *, pretrained: bool, **kwargs: Any) -> Any:
    """A model of timm's, its weights fetched with one line on what goes wrong."""
    if not pretrained:
        return by_timm(name, **kwargs)
    check_source(name, resolve_pretrained_cfg(name))
    with fetching(name):
        return by_timm(name, pretrained=True, **kwargs)


def timm_resnet(name: str, *, pretrained: bool, **kwargs: Any) -> Any:
    """The same; `UserError` unless it is a ResNet."""
    if name.split(".")[0] not in timm.list_models(module="resnet"):
        raise UserError(
            f"backbone {name!r} is not one of timm's ResNets; give one of timm.list_models(module='resnet')"
        )
    return timm_model(name, pretrained=pretrained, **kwargs)


def checkpoint_filter_fn(state_dict: Mapping[str, Tensor], model: Classifier) -> dict[str, Tensor]:
    """A checkpoint from timm's loaders, in our layout and at the model's image size.

    Known layouts are ours, the authors' EAMLP and timm's gMLP. timm itself drops a head of other classes and adapts a
    first convolution to other channels; EAMLP has none and adapts its stem itself.
    """
    state_dict = model.adapt_channels(checkpoints.rename(state_dict, model))
    # The image size that the configuration next to the weights states, if there is one.
    size = getattr(model, "pretrained_model_args", {}).get("img_size")
    return checkpoints.resize(state_dict, model, img_size=None if size is None else pair(size))
