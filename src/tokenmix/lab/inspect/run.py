"""`tokenmix inspect`: the maps of a run or a model on one image, as figures and numbers in a folder."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import make_folder, save_figure, user_path, write_json
from tokenmix.lab.inspect.maps import (
    SIGNED,
    MapNumbers,
    Tile,
    attention_maps,
    map_numbers,
    tiles_of,
)
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.folder import is_run
from tokenmix.lab.train.load import load_task
from tokenmix.models.registry import create_model
from tokenmix.registry import MODELS

if TYPE_CHECKING:
    from tokenmix.lab.tasks.text.task import TextTask

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
    task = load_task(user_path(target)) if is_run(str(target)) else None
    of = MODELS[str(target)].tasks[0] if task is None else task.config.task
    kind = get_task(of)
    if kind.looks_at == "nothing":
        raise UserError(f"{target} is of {of}; inspect works on models of images and text")
    if kind.looks_at == "text" and task is None:
        raise UserError(f"{str(target)!r} is a text model; inspect a run of it: tokenmix inspect RUN [SENTENCE]")
    if kind.looks_at == "text":
        return inspect_text(cast("TextTask", task), str(target), None if file is None else str(file), out)
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


def inspect_text(task: "TextTask", title: str, given: str | None, out: Path) -> Path:
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


COLUMNS = 4


def draw_tiles(image: Tensor, tiles: Sequence[Tile], title: str, file: Path) -> None:
    """One figure: the image, then every tile over it, each on its own colour scale (its range is printed below)."""
    values = image.detach().float().cpu()
    values = (values - values.min()) / (values.max() - values.min()).clamp_min(1e-8)
    values = values if values.shape[0] in (1, 3) else values.mean(0, keepdim=True)
    shown = values.expand(3, -1, -1).permute(1, 2, 0).numpy()
    figure, axes = _panel(len(tiles) + 1, title)
    axes[0].imshow(shown)
    axes[0].set_title("image", fontsize=8)
    height, width = shown.shape[:2]
    for axis, tile in zip(axes[1:], tiles):
        values = tile.values.numpy()
        low, high = float(values.min()), float(values.max())
        high = max(abs(low), abs(high), 1e-12) if tile.signed else high
        low = -high if tile.signed else low
        colours = SIGNED if tile.signed else "magma"
        if tile.on_image:
            extent = (-0.5, width - 0.5, height - 0.5, -0.5)
            axis.imshow(shown.mean(-1), cmap="gray", extent=extent, vmin=0, vmax=1)
            axis.imshow(values, cmap=colours, extent=extent, vmin=low, vmax=high, alpha=0.72, interpolation="nearest")
            if tile.mark is not None:
                y, x = ((tile.mark[i] + 0.5) * (height, width)[i] / values.shape[i] - 0.5 for i in (0, 1))
                axis.plot(x, y, marker="o", markersize=5, markerfacecolor="none", markeredgecolor="#00e5ff")
        else:
            axis.imshow(values, cmap=colours, vmin=low, vmax=high, interpolation="nearest")
        axis.set_title(tile.label, fontsize=8)
        axis.set_xlabel(f"{low:.2g} to {high:.2g}", fontsize=7)
    save_figure(figure, file, dpi=120)


def _panel(count: int, title: str) -> tuple[Figure, list[Axes]]:
    """A figure with axes for at least `count` images, without ticks or frames."""
    rows = -(-count // COLUMNS)
    figure = Figure(figsize=(2.1 * COLUMNS, 2.35 * rows + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axis in axes:
        axis.set(xticks=[], yticks=[], frame_on=False)
    return figure, axes


def draw_matrices(matrices: Sequence[Tensor], titles: Sequence[str], title: str, file: Path) -> None:
    """Square matrices side by side, each on its own colour scale: signed around 0, else from 0 (its largest value)."""
    figure, axes = _panel(len(matrices), title)
    for axis, matrix, label in zip(axes, matrices, titles):
        values = matrix.detach().float().cpu().numpy()
        signed, high = bool((values < 0).any()), max(float(np.abs(values).max()), 1e-12)
        axis.imshow(values, cmap=SIGNED if signed else "magma", vmin=-high if signed else 0, vmax=high)
        axis.set_title(label, fontsize=8)
        axis.set_xlabel(f"{'±' if signed else '0 to '}{high:.2g}", fontsize=7)
    save_figure(figure, file, dpi=120)


def draw_depth(numbers: Sequence[MapNumbers], title: str, file: Path) -> None:
    """Saturation, entropy, diagonality and distance to the block before, over depth."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    depth = range(len(numbers))
    for field, marker in (("saturation", "o"), ("entropy", "s"), ("diagonality", "^"), ("distance", "D")):
        values = [getattr(n, field) for n in numbers]
        if any(v is not None for v in values):
            axis.plot(depth, [np.nan if v is None else v for v in values], marker=marker, label=field)
    axis.set(xlabel="block", xticks=list(depth), ylim=(-0.03, 1.03), title=title)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    save_figure(figure, file, dpi=120)
