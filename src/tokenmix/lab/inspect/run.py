"""`tokenmix inspect`: the maps of a run or a model on one image, as figures and numbers in a folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tokenmix.errors import UserError
from tokenmix.files import make_folder, user_path, write_json
from tokenmix.lab.inspect.maps import attention_maps, map_numbers, tiles_of
from tokenmix.lab.inspect.pictures import draw_depth, draw_tiles
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.task import TaskModule
from tokenmix.models.registry import create_model
from tokenmix.registry import MODELS, list_models

TILES = 15


def inspect_run(target: str | Path, file: str | Path | None, out: Path) -> Path:
    """Write one figure for each block, one of the numbers over depth, and numbers.json.

    Args:
        target: a run folder, or the name of a model, which then has random weights.
        file: an image; for a run on text a sentence or nothing, see `tokenmix.lab.inspect.gates.inspect_text`.
        out: the folder to write into.

    Returns:
        `out`.

    Raises:
        UserError: neither a run folder nor a model; an image that cannot be read; a model without token mixers.
    """
    if user_path(target).is_dir():
        task = load_task(user_path(target))
        kind, description, trained = type(task), task.data, True
        _check_looks(target, task.config.task, kind)
        if kind.looks_at == "text":
            from tokenmix.lab.inspect.gates import inspect_text

            text_task: Any = task
            return inspect_text(text_task, str(target), None if file is None else str(file), out)
        model = task.model.cpu().float().eval()
    else:
        kind, model, description, trained = _load_target(target)
    if file is None:
        raise UserError(f"{target} needs an image; give one")
    file = user_path(file)
    shown, images = kind.view(model, file, description)
    maps = attention_maps(model, images)
    numbers = map_numbers(maps)
    title = f"{Path(target).name}, {file.name}"
    make_folder(out)
    for i, block in enumerate(maps):
        draw_tiles(shown, tiles_of(block, limit=TILES), f"{title}: {block.name}", out / f"block-{i:02d}.png")
    draw_depth(numbers, title, out / "depth.png")
    told = {
        "target": str(target),
        "file": str(file),
        "trained": trained,
        "answer": kind.name_prediction(model, images, description),
        "blocks": [block.to_json() for block in numbers],
    }
    write_json(out / "numbers.json", told)
    return out


def _load_target(target: str | Path) -> tuple[type[TaskModule], nn.Module, Mapping[str, Any], bool]:
    """The task of a model by name, the model, what its images are like, and whether it has been trained."""
    name = str(target)
    if name not in MODELS:
        raise UserError(
            f"{name!r} is neither a run folder nor a model; give a run folder or one of {', '.join(list_models())}"
        )
    kind: type[TaskModule] = get_task(MODELS[name].tasks[0])
    _check_looks(target, MODELS[name].tasks[0], kind)
    if kind.looks_at == "text":
        raise UserError(f"{name!r} is a text model; inspect a run of it: tokenmix inspect RUN [SENTENCE]")
    model: Any = create_model(name).eval()
    half = [0.5] * model.in_chans
    return kind, model, {"channels": model.in_chans, "img_size": model.img_size, "mean": half, "std": half}, False


def _check_looks(target: str | Path, name: str, task: type[TaskModule]) -> None:
    """Raise `UserError` unless the models of the task look at an image or a text."""
    if task.looks_at == "nothing":
        raise UserError(f"{target} is of {name}; inspect works on models of images and text")
