"""Models from elsewhere; of transformers by `--model transformers:FOLDER`, or transformers:OWNER/NAME of the hub."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from tokenmix.environment import quiet_transformers
from tokenmix.errors import UserError, as_user_error
from tokenmix.files import Values, read_json, user_path
from tokenmix.lab.data.fetch import log
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distributed import distributed_info
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.programs import Description
from tokenmix.registry import TRANSFORMERS, is_foreign, is_transformers
from tokenmix.trust import check_typed, sealed, texts_in

if TYPE_CHECKING:
    from tokenmix.models.foreign import Kind

LARGEST = 1_000_000
# Entries of config.json about its weights, or with names of code.
LEFT_OUT = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "id2label", "label2id")
FETCHED = ["*.json", "*.txt", "*.model", "*.safetensors"]


def folder_of(model: str) -> Path:
    """Folder of a model, fetched from the hub if needed; no code in it is run. `UserError` if only a file names it."""
    place = model.removeprefix(TRANSFORMERS)
    check_typed(place, "a model's place", "opened")
    folder = user_path(place)
    if not folder.is_dir() and place.count("/") == 1:
        from huggingface_hub import snapshot_download

        remedy = "); connect to the internet, or give transformers:FOLDER"
        with as_user_error(f"{place} cannot be fetched from huggingface.co (", remedy), quiet_transformers():
            folder = Path(snapshot_download(place, allow_patterns=FETCHED))
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} has no config.json; give the folder that save_pretrained wrote")
    return folder


def from_folder(kind: Any, folder: Path, **options: object) -> Any:
    """`from_pretrained` of a class of transformers: no code in the folder is run, and nothing is fetched."""
    with quiet_transformers(), sealed(folder):
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)


def described_architecture(config: TrainConfig, like: Description | None) -> Values:
    """The part of a model's config.json that rebuilds it, for data.json; nothing if the model is not of transformers.

    A run that is loaded or resumed uses its own part. `UserError` for a damaged file, or an implausible size in it.
    """
    if not is_transformers(config.model.model):
        return {}
    if like is None and config.loop.resume is not None:
        like = RunFolder(config.loop.resume).description
    if like is not None:
        return {"architecture": like["architecture"]}
    file = folder_of(config.model.model) / "config.json"
    try:
        found = read_json(file)
    except (ValueError, RecursionError):
        raise UserError(f"{file} is no JSON; put a whole one back") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise UserError(f"{file} names no model_type; give the folder that save_pretrained wrote")
    kept = {name: value for name, value in found.items() if name not in LEFT_OUT and not name.startswith("_")}
    for name, value in kept.items():
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{file}: {name}={value} is more than {LARGEST:,}; put a whole file back")
    return {"architecture": kept}


def class_fields(data: Description) -> Values:
    """Fields of a transformers config for the classes of the data, whose names pipelines show; one for numbers."""
    classes = data.get("classes")
    if not classes:
        return {} if classes is None else {"num_labels": 1}
    return {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}


def model_from_elsewhere(
    config: TrainConfig, data: Description, kind: "Kind", auto: str, **sizes: object
) -> nn.Module | None:
    """An image model of torchvision, a user or, by `build_theirs`, transformers, with our output; None if ours."""
    # Imported here: it needs timm, which text does not.
    from tokenmix.models.foreign import as_ours, create_foreign

    name = config.model.model
    given: Values = {"num_classes": len(data["classes"]), "in_chans": data["channels"]}
    given["img_size"] = tuple(data["img_size"])
    if is_foreign(name):
        return create_foreign(name, kind, **given, **config.model.model_kwargs)
    return as_ours(build_theirs(config, data, auto, **sizes), name, kind, **given) if "architecture" in data else None


def build_theirs(config: TrainConfig, data: Description, auto: str, **sizes: object) -> nn.Module:
    """A transformers model with the task's head, and new weights unless `--pretrained` requests the folder's.

    `auto` is the automatic class that builds it; `sizes` of the data are set where a new model's config has them.
    `UserError` for an unknown architecture; or weights that are missing, pickled or, except for the head, of other
    shapes.
    """
    import transformers

    classes, kwargs = data.get("classes"), dict(config.model.model_kwargs)
    pretrained = kwargs.pop("pretrained", False)
    settings = {**data["architecture"], **class_fields(data), **kwargs}
    if not pretrained:
        settings |= {name: size for name, size in sizes.items() if name in settings and name not in kwargs}
    # The compiled reader of such files opens them unseen by `sealed`.
    for text in texts_in(settings):
        if text.endswith(".safetensors"):
            check_typed(text, "a file", "opened")
    kind = getattr(transformers, auto)
    folder = folder_of(config.model.model) if pretrained else None
    with (
        as_user_error(f"{config.model.model} cannot be built by transformers (", "); give another folder"),
        quiet_transformers(),
        sealed(),
    ):
        theirs = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        if folder is None:
            return cast(nn.Module, kind.from_config(theirs, trust_remote_code=False)).train()
        options: Values = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = from_folder(kind, folder, config=theirs, dtype=torch.float32, **options)
    head = None if classes is None else len(classes) or 1
    other = [key for key, _, shape in info["mismatched_keys"] if shape[0] != head]
    if other:
        raise UserError(f"the weights in {folder} have another {other[0]} than the model; leave --model-kwargs out")
    fresh = dict.fromkeys(key.rpartition(".")[0] or key for key in sorted(info["missing_keys"]))
    if fresh and classes is None and distributed_info().first:
        log(f"{folder} has no {', '.join(fresh)}; these weights start fresh")
    return model.train()
