"""`tokenmix inspect`: the maps of a run or a model on one image, as figures and numbers in a folder."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import make_folder, user_path, write_json
from tokenmix.lab.inspect.maps import attention_maps, map_numbers, tiles_of
from tokenmix.lab.inspect.pictures import draw_depth, draw_matrices, draw_tiles
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
        file: an image; for a run on text a sentence or nothing, see `inspect_text`.
        out: the folder to write into.

    Returns:
        `out`.

    Raises:
        UserError: neither a run folder nor a model; an image that cannot be read; a model without token mixers.
    """
    task: TaskModule | None = None
    if user_path(target).is_dir():
        task = load_task(user_path(target))
        kind, of = type(task), task.config.task
    elif str(target) in MODELS:
        of = MODELS[str(target)].tasks[0]
        kind = get_task(of)
    else:
        raise UserError(
            f"{str(target)!r} is neither a run folder nor a model; give a run folder or one of "
            f"{', '.join(list_models())}"
        )
    if kind.looks_at == "nothing":
        raise UserError(f"{target} is of {of}; inspect works on models of images and text")
    if kind.looks_at == "text" and task is None:
        raise UserError(f"{str(target)!r} is a text model; inspect a run of it: tokenmix inspect RUN [SENTENCE]")
    if kind.looks_at == "text":
        return inspect_text(task, str(target), None if file is None else str(file), out)
    model: Any = create_model(str(target)).eval() if task is None else task.model.cpu().float().eval()
    if task is None:
        half = [0.5] * model.in_chans
        description = {"channels": model.in_chans, "img_size": model.img_size, "mean": half, "std": half}
    else:
        description = task.data
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
    answer = None
    if task is not None:
        with torch.no_grad():
            answer = {name: value for name, value in task.predict([file])[0].items() if name != "file"}
    told = {
        "target": str(target),
        "file": str(file),
        "trained": task is not None,
        "answer": answer,
        "blocks": [asdict(block) for block in numbers],
    }
    write_json(out / "numbers.json", told)
    return out


def toeplitz_share(matrix: Tensor) -> float:
    """Share of a square matrix's variance that its diagonals' means explain.

        1 - sum_ij (W_ij - mean of diagonal i - j)^2 / sum_ij (W_ij - mean of W)^2

    1 for a Toeplitz matrix that is not constant; 2 / (n + 1) in the mean for independent entries, since 2n - 1 means
    fit that much of noise. Of a constant matrix, which has no variance, nan.
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise UserError(f"toeplitz_share needs a square matrix, got {tuple(matrix.shape)}")
    w = matrix.detach().double().cpu()
    n = len(w)
    place = torch.arange(n)
    shift = (place[:, None] - place + n - 1).flatten()
    sums = torch.zeros(2 * n - 1, dtype=w.dtype).index_add_(0, shift, w.flatten())
    means = sums / torch.bincount(shift, minlength=2 * n - 1)
    total = (w - w.mean()).square().sum()
    if not total > 0:
        return float("nan")
    return float(1 - (w.flatten() - means[shift]).square().sum() / total)


def inspect_text(task: Any, title: str, given: str | None, out: Path) -> Path:
    """Write gates.png, with a sentence attention.png, and numbers.json; `UserError` where there is nothing to show."""
    model: Any = task.model.float().cpu().eval()
    mixers = ((i, layer.mixer) for i, layer in enumerate(model.base_model.layers))
    gatings = [(i, mixer.gating) for i, mixer in mixers if hasattr(mixer, "gating")]
    gates = [gating.matrix(gating.num_tokens).detach().float() for _, gating in gatings]
    numbers = [
        {"block": i, "gate": gating.gate, "toeplitz_share": toeplitz_share(w), "rms": float(w.square().mean().sqrt())}
        for (i, gating), w in zip(gatings, gates)
    ]
    if not numbers and given is None:
        raise UserError(f"{title} has no gates, and its attention depends on the text: give a sentence")
    make_folder(out)
    if numbers:
        titles = [f"block {row['block']}: {row['toeplitz_share']:.3f}" for row in numbers]
        draw_matrices(gates, titles, f"{title}: gates", out / "gates.png")
    if given is not None:
        from tokenmix.lab.tasks.text.task import read_sentences

        sentence, length = read_sentences([given])[0].text, int(task.data["seq_len"])
        words = task.tokenizer()(sentence, truncation=True, max_length=length, return_tensors="pt")
        with torch.no_grad():
            maps = model(input_ids=words["input_ids"], output_attentions=True).attentions
        if maps is not None:
            titles = [f"block {i}" for i in range(len(maps))]
            draw_matrices([one[0].mean(0) for one in maps], titles, f"{title}: {sentence}", out / "attention.png")
    told = {"target": title, "text": given, "blocks": numbers}
    write_json(out / "numbers.json", told)
    return out
