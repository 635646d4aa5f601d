"""`tokenmix inspect`: the maps of a run or a model on one image, as pictures and numbers in a folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.inspect.maps import attention_maps
from tokenmix.inspect.numbers import map_numbers
from tokenmix.inspect.pictures import draw_depth, draw_tiles
from tokenmix.inspect.tiles import tiles_of
from tokenmix.inspect.view import view_of
from tokenmix.models.families import build_model, list_all_models, task_of
from tokenmix.registry import TEXT_TASKS
from tokenmix.tasks.detection.models import Detector
from tokenmix.tasks.segmentation.models import Segmenter
from tokenmix.tasks.segmentation.output import shares
from tokenmix.train.files import make_folder

__all__ = ["inspect_run"]

TILES = 15
NO_IMAGE = ("image-generation", "point-classification", "point-segmentation")


def inspect_run(target: str | Path, file: str | Path | None, out: Path) -> Path:
    """Write one picture for each block, one of the numbers over depth, and numbers.json.

    Args:
        target: a run folder, or the name of a model, which then has random weights.
        file: an image; for a run on text a sentence or nothing, see `tokenmix.inspect.gates.inspect_text`.
        out: the folder to write into.

    Returns:
        `out`.

    Raises:
        UserError: neither a run folder nor a model; an image that cannot be read; a model without token mixers.
    """
    text = _text_task(target)
    if text is not None:
        from tokenmix.inspect.gates import inspect_text

        return inspect_text(text, str(target), None if file is None else str(file), out)
    _check_looks(target)
    if file is None:
        raise UserError(f"{target} looks at images; name one")
    file = Path(file)
    model, description, trained = _load(target)
    shown, images = view_of(model, file, description)
    maps = attention_maps(model, images)
    numbers = map_numbers(maps)
    title = f"{target}, {file.name}"
    make_folder(out)
    for i, block in enumerate(maps):
        draw_tiles(shown, tiles_of(block, limit=TILES), f"{title}: {block.name}", out / f"block-{i:02d}.png")
    draw_depth(numbers, title, out / "depth.png")
    told = {
        "target": str(target),
        "file": str(file),
        "trained": trained,
        "answer": _answer(model, images, description),
        "blocks": [block.to_json() for block in numbers],
    }
    (out / "numbers.json").write_text(json.dumps(told, indent=1) + "\n")
    return out


def _task_name(target: str | Path) -> str | None:
    """The task of a run, or the one that a model is for."""
    config = Path(target) / "config.json"
    return json.loads(config.read_text())["config"]["task"] if config.is_file() else task_of(str(target))


def _check_looks(target: str | Path) -> None:
    """Raise `UserError` unless the target's model looks at an image."""
    task = _task_name(target)
    if task in NO_IMAGE:
        raise UserError(f"{target} is of {task}; inspect shows what models see in an image or a text")


def _text_task(target: str | Path) -> Any:
    """The task of a run on text; None for any other target."""
    if _task_name(target) not in TEXT_TASKS:
        return None
    from tokenmix.train.run import load_task

    return load_task(Path(target))[0]


def _load(target: str | Path) -> tuple[nn.Module, Mapping[str, Any], bool]:
    if Path(target).is_dir():
        from tokenmix.train.run import load_run

        model, _, description = load_run(Path(target))
        return model.cpu().float().eval(), description, True
    if "_text_" in str(target):
        raise UserError(f"{str(target)!r} is a text model; inspect a run of it: tokenmix inspect RUN [SENTENCE]")
    if str(target) not in list_all_models():
        known = ", ".join(list_all_models())
        raise UserError(f"{str(target)!r} is neither a run folder nor a model; models: {known}")
    model: Any = build_model(str(target)).eval()
    half = [0.5] * model.in_chans
    return model, {"channels": model.in_chans, "img_size": model.img_size, "mean": half, "std": half}, False


@torch.no_grad()
def _answer(model: nn.Module, images: Tensor, description: Mapping[str, Any]) -> dict[str, Any] | None:
    """A classifier's most probable class, a segmenter's shares of them; None without classes, or of a detector."""
    classes = description.get("classes")
    if not classes or isinstance(model, Detector):
        return None
    if isinstance(model, Segmenter):
        return {"shares": shares(model(images)[0].argmax(0), classes)}
    top = model(images).softmax(-1)[0].max(-1)
    return {"label": classes[int(top.indices)], "probability": float(top.values)}
