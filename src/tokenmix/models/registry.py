"""Create models by name, register our image classifiers with timm, and load pretrained weights."""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from timm.models import (
    PretrainedCfg,
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
    resolve_pretrained_cfg,
)
from torch import Tensor, nn

from tokenmix import checkpoints
from tokenmix.environment import warn_untested
from tokenmix.errors import UserError, as_user_error, unknown_name
from tokenmix.models.interface import Classifier, pair
from tokenmix.registry import MODELS, NO_WEIGHTS, Arguments, ModelEntry, load_object, without_timm
from tokenmix.trust import check_typed, from_caller, texts_in, typed

# Arguments of timm's factory: for the location of weights, and all, in addition to a model's arguments.
PLACES = ("pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")
FACTORY = (*PLACES, "pretrained", "features_only", "out_indices", "feature_cls")


@from_caller
def create_model(name: str, **kwargs: object) -> nn.Module:
    """Build a model of `list_models()` or of timm by name.

    Args:
        name: a name of `list_models()` or of `timm.list_models()`; `"local-dir:PATH"` for a folder written by
            `timm.models.save_for_hf`, `"hf-hub:OWNER/NAME"` for a model of the hub.
        **kwargs: arguments of the model: `num_classes`, `in_chans`, `img_size`, `mixer`, ... Image classifiers also
            accept arguments of timm's factory: `pretrained`, `checkpoint_path`, `features_only`, `out_indices`, ...
            Unknown arguments raise `UserError`.

    Raises:
        UserError: the name or an argument is unknown; or a file, such as a run folder's config, names a user's mixer, a
            model of the hub or of a folder, or a location of weights.
    """
    warn_untested()
    if not isinstance(name, str):
        raise UserError(f"a model is built by its name, one of tokenmix.list_models(), got {name!r}")
    name = without_timm(name)
    architecture = name.split(".")[0]
    if architecture not in MODELS:
        if timm.is_model(name) or name.startswith(("hf-hub:", "local-dir:")):
            return timm_model(name, kwargs)
        raise unknown_name("model", name, MODELS.names())
    entry = MODELS[architecture]
    build = load_object(entry.build)
    in_timm = entry.pretrained_cfg is not None
    parameters = inspect.signature(build).parameters
    accepted = {*parameters, *(FACTORY if in_timm else ())}
    unknown = sorted(set(kwargs) - accepted)
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise UserError(f"model {name!r} has no argument {unknown[0]!r}; it takes {', '.join(sorted(parameters))}")
    if in_timm:
        register_with_timm(entry)
        return by_timm(name, **kwargs)
    # Arguments for the preset's own backbone or embedding do not fit another one.
    dropped = ("backbone_kwargs",) if "backbone" in kwargs else ()
    if kwargs.get("embedding") == "naive":
        dropped += ("stem_dim", "stage_dims", "centres", "num_neighbours")
    preset = {key: value for key, value in entry.arguments.items() if key not in dropped}
    return build(**{**preset, **kwargs})


def create_on_meta(name: str, **kwargs: object) -> nn.Module:
    with torch.device("meta"):
        return create_model(name, **kwargs)


def of_size(build: Callable[..., nn.Module], size: int | tuple[int, ...] | None) -> nn.Module:
    """A model in this image size; convolutional networks lack the argument, and take any size."""
    try:
        return build() if size is None else build(img_size=size)
    except (TypeError, UserError) as error:
        # torchvision's name is image_size.
        if not re.search(r"unexpected keyword argument 'ima?ge?_size'", str(error)):
            raise
        return build()


default_cfgs: dict[str, object] = {}
"""timm reads this when a name of this module is registered."""


def register_with_timm(entry: ModelEntry) -> None:
    """Register a model with a `pretrained_cfg`, unless it is registered already.

    timm's builder creates the preset with the image size and number of classes of its `default_cfgs`. The caller's
    arguments take precedence. timm also passes `pretrained`, `pretrained_cfg`, `pretrained_cfg_overlay`, `cache_dir`,
    `features_only` and `out_indices`. Missing or unreachable weights raise `UserError`.
    """
    if entry.pretrained_cfg is None or entry.name in default_cfgs:
        return
    cfg = dict(entry.pretrained_cfg)
    tag = cfg.pop("tag", None)
    default_cfgs.update(generate_default_cfgs({f"{entry.name}.{tag}" if tag else entry.name: cfg}))

    def build(**kwargs: Any) -> nn.Module:
        pretrained, from_caller = kwargs.pop("pretrained", False), _from_caller(kwargs)
        if pretrained:
            overlay = kwargs.get("pretrained_cfg_overlay")
            source = resolve_pretrained_cfg(entry.name, kwargs.get("pretrained_cfg"), overlay)
            check_source(entry.name, source, kwargs.get("cache_dir"))
        with typed(from_caller), fetching(entry.name) if pretrained else nullcontext():
            return build_model_with_cfg(
                load_object(entry.build),
                entry.name,
                pretrained,
                pretrained_filter_fn=checkpoint_filter_fn,
                feature_cfg={"out_indices": 3, "feature_cls": "getter"},
                **{**entry.arguments, **kwargs},
            )

    build.__name__, build.__doc__ = entry.name, entry.about
    register_model(build)


def _from_caller(kwargs: Arguments) -> Arguments:
    """The arguments except those that timm read from a config.json of a folder or of the hub."""
    cfg, saved = kwargs.get("pretrained_cfg"), kwargs.get("pretrained_model_args", {})
    if not saved and isinstance(cfg, Mapping) and "source" in cfg:
        # timm before 1.0.31 does not mark arguments from the file.
        return {}
    ours = {key: value for key, value in kwargs.items() if key not in saved or value is not saved[key]}
    return {key: value for key, value in ours.items() if not key.startswith("pretrained")}


FILES = ("model.safetensors", "pytorch_model.bin")
ELSEWHERE = (
    "fetch model.safetensors where there is one and give --init-from FILE, "
    "in Python pretrained_cfg_overlay={'file': FILE}"
)


def check_source(
    name: str, cfg: PretrainedCfg, cache_dir: str | Path | None = None, elsewhere: str = ELSEWHERE
) -> None:
    """Raise `UserError` if there are no weights or the hub is unreachable; the download would retry for a minute."""
    if not (cfg.has_weights or cfg.state_dict):
        raise UserError(f"{name} {NO_WEIGHTS}")
    if cfg.file or cfg.state_dict or not cfg.hf_hub_id:
        return
    repo = cfg.hf_hub_id.split("@")[0]
    if any(isinstance(try_to_load_from_cache(repo, file, cache_dir=cache_dir), str) for file in FILES):
        return
    missing = as_user_error(
        f"the weights of {name} were not found at {repo} on the hub: ", f"; {elsewhere}", HfHubHTTPError
    )
    # The errors of a missing network depend on the hub's HTTP library and on proxies.
    unreachable = as_user_error(
        f"the weights of {name} are in {repo} on huggingface.co, which cannot be reached (",
        f"): connect to the internet, or {elsewhere}",
    )
    with unreachable, missing:
        HfApi().model_info(repo, timeout=10)


def fetching(name: str, elsewhere: str = ELSEWHERE) -> AbstractContextManager[None]:
    """Turn errors of a file or a download into `UserError`."""
    return as_user_error(f"the weights of {name} could not be read (", f"): {elsewhere}", OSError, SafetensorError)


def by_timm(name: str, **kwargs: Any) -> Any:
    """`timm.create_model`; `UserError` if a file names a model of the hub or of a folder, or a location of weights."""
    _check_places(name, kwargs)
    return timm.create_model(name, **kwargs)


def _check_places(name: str, kwargs: Arguments) -> None:
    if ":" in name:
        check_typed(name, "a model's place", "opened")
    for key in PLACES:
        for text in texts_in(kwargs.get(key)):
            check_typed(text, f"a place of weights, {key}", "opened")


def timm_model(name: str, given: Arguments) -> Any:
    """A timm model with these arguments; errors of downloads become one line."""
    if not given.get("pretrained"):
        remedy = "); give a folder that timm's save_for_hf wrote, or connect to the internet"
        unopened = as_user_error(f"{name} cannot be opened (", remedy)
        with unopened if ":" in name else nullcontext():
            return by_timm(name, **given)
    _check_places(name, given)
    if ":" not in name:
        place = given.get("pretrained_cfg"), given.get("pretrained_cfg_overlay")
        check_source(name, resolve_pretrained_cfg(name, *place), given.get("cache_dir"))
    with fetching(name):
        return by_timm(name, **given)


def timm_resnet(name: str, given: Arguments) -> Any:
    """`timm_model`; `UserError` unless the model is a ResNet."""
    if name.split(".")[0] not in timm.list_models(module="resnet"):
        raise UserError(
            f"backbone {name!r} is not one of timm's ResNets; give one of timm.list_models(module='resnet')"
        )
    return timm_model(name, given)


def checkpoint_filter_fn(state_dict: Mapping[str, Tensor], model: Classifier) -> dict[str, Tensor]:
    """Convert a checkpoint from timm's loaders to our layout and the model's image size.

    Accepted layouts are ours, the authors' EAMLP and timm's gMLP. timm drops a head with other classes and adapts a
    first convolution to other channels. EAMLP has no first convolution and adapts its stem here.
    """
    state_dict = model.adapt_channels(checkpoints.rename(state_dict, model))
    # The image size in the configuration next to the weights, if there is one.
    arguments: Any = getattr(model, "pretrained_model_args", {})
    size = arguments.get("img_size")
    return checkpoints.resize(state_dict, model, img_size=None if size is None else pair(size))
