"""Mean and standard deviation that normalise the images of a classifier."""

import statistics
from collections.abc import Mapping
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import resolve_pretrained_cfg

from tokenmix.errors import UserError, as_user_error
from tokenmix.files import Values, read_json
from tokenmix.lab.data.images import ImageData
from tokenmix.lab.tasks.foreign import folder_of
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.folder import DESCRIPTION, RunFolder
from tokenmix.lab.train.schema import fitted
from tokenmix.registry import MODELS, TORCHVISION, is_foreign, is_transformers

STATS = ("mean", "std")
IMAGENET: Values = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}


def of_channels(cfg: Mapping[str, Any], channels: int) -> Values:
    """Mean and standard deviation of a timm config for this number of channels."""
    # timm adapts three-channel weights to another number of channels; they expect the mean of the statistics.
    return {k: list(cfg[k]) if len(cfg[k]) == channels else [statistics.mean(cfg[k])] * channels for k in STATS}


def normalisation(config: TrainConfig, images: ImageData) -> tuple[Values, str]:
    """Mean and standard deviation of a run: the given ones, those of its initial weights, or those of the data.

    The text is a note on those that are not simply the data's.
    """
    options, start, resume = config.options, config.loop.init_from, config.loop.resume
    pretrained = config.model.pretrained or any(name.startswith("pretrained") for name in config.model.model_kwargs)
    pretrained = pretrained or "weights" in config.model.model_kwargs
    found: Mapping[str, Any] = {"mean": images.mean, "std": images.std}
    if options.mean is None and start is None and not pretrained:
        return of_channels(found, images.channels), ""
    if resume is not None:
        return of_channels(RunFolder(resume).description, images.channels), ""
    run = None if start is None else RunFolder.of_weights(start)
    if options.mean is not None:
        found, source = {"mean": options.mean, "std": options.std}, "as given"
        if len(options.mean) != images.channels:
            raise UserError(f"mean has {len(options.mean)} numbers, and the images {images.channels} channels")
    elif run is not None and "mean" in run.description:
        found, source = run.description, f"as in {run.path}"
    elif (cfg := _expected(config.model.model, backbone=start is None)) is not None:
        found, source = cfg, f"as published weights of {config.model.model} expect"
    else:
        source = "those of the data; if the weights were trained with others, give --mean and --std"
    stats = of_channels(found, images.channels)
    mean, std = (",".join(f"{value:.4g}" for value in stats[k]) for k in STATS)
    return stats, f"images are normalised with mean {mean} and std {std}, {source}"


def _expected(name: str, *, backbone: bool) -> Mapping[str, Any] | None:
    """Config with the mean and std that published weights of a model expect, or those of its backbone; else None."""
    if name.startswith(TORCHVISION):
        return IMAGENET
    if is_foreign(name):
        return None
    if is_transformers(name):
        file = folder_of(name) / "preprocessor_config.json"
        if not file.exists():
            return None
        with as_user_error(f"{file} is damaged (", "); put a whole one back"):
            cfg = read_json(file)
            theirs = {k: cfg.get(f"image_{k}") for k in STATS}
            return {k: fitted(DESCRIPTION[k], theirs[k], k) for k in STATS} if all(theirs.values()) else None
    if name.split(".")[0] in MODELS:
        cfg = MODELS[name.split(".")[0]].pretrained_cfg
        if cfg is None:
            return IMAGENET if backbone else None
        return cfg if "hf_hub_id" in cfg else None
    return resolve_pretrained_cfg(name).to_dict()
