"""`tokenmix inspect`: the maps of a model's mixers on given images, as numbers and figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import Values, make_folder, plain_text, save_figure, to_frame, to_html, user_path, write_json
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.folder import is_run
from tokenmix.lab.train.load import load_task
from tokenmix.layers.base import Mixer, near_square, outer_mixers
from tokenmix.models import BlockMap
from tokenmix.models.registry import create_model
from tokenmix.registry import MODELS
from tokenmix.trust import from_caller

if TYPE_CHECKING:
    import pandas as pd

    from tokenmix.lab.tasks.text.task import TextTask
    from tokenmix.lab.train.task import TaskModule

TILES = 15
MOST_PREFIX = 8
"""Class tokens and registers of a model that is not ours."""


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor) -> list[BlockMap]:
    """Maps of a model's mixers on images, from the first block to the last, in the model's current mode.

    Each layer's `attention_map` computes its map from the layer's input, so fused attention works too.

    Args:
        model: one of ours, or any module that calls tokenmix mixers.
        images: input of the model.

    Raises:
        UserError: the model has no token mixer, or called none; the result is never empty.
    """
    own = getattr(model, "attention_maps", None)
    maps: list[BlockMap] = own(images) if callable(own) else _watched(model, images)
    if not maps:
        raise UserError(
            f"{type(model).__name__} has no token mixer with a map that was called, so there is none to show; "
            "take a model of `tokenmix list models`, put a layer of tokenmix.layers into yours, or give a mixer of "
            "yours whose capabilities say map=None an attention_map"
        )
    return maps


def _watched(model: nn.Module, images: Tensor) -> list[BlockMap]:
    """Run a third-party model and collect each mixer's map on its input, in the order of the calls."""
    mixers = {mixer: name for name, mixer in outer_mixers(model).items()}
    found: list[BlockMap] = []

    def note(mixer: Mixer, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], _out: Tensor) -> None:
        given, kind = {**dict(zip(("x", "mask"), args)), **kwargs}, mixer.capabilities.map
        if kind is not None:
            x = given["x"]
            used, windows = mixer.attention_map(x, given.get("mask")), max(1, len(x) // len(images))
            if x.dim() == 4:
                prefix, grid = 0, (int(x.shape[-2]), int(x.shape[-1]))
            else:
                whole = images.dim() == 4 and windows == 1
                aspect = images.shape[-2] / images.shape[-1] if whole else math.nan
                known: Any = getattr(model, "num_prefix_tokens", None)
                prefix, grid = grid_of(used.shape[-2], aspect, known)
            found.append(BlockMap(mixers[mixer], kind, used, grid, prefix, windows))

    hooks = [mixer.register_forward_hook(note, with_kwargs=True) for mixer in mixers]
    run: Any = getattr(model, "watched", model)
    try:
        if hooks:
            run(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def grid_of(num_tokens: int, aspect: float, known: int | None = None) -> tuple[int, tuple[int, int]]:
    """The fewest tokens in front, such as a class token, without which the others form a grid shaped as the image.

    The `known` number of them, as timm's models tell it, is tried first.
    """
    fewest = range(min(MOST_PREFIX + 1, num_tokens) if aspect > 0 else 0)
    for prefix in sorted(fewest, key=lambda number: number != known):
        rows = round(((num_tokens - prefix) * aspect) ** 0.5)
        if rows and (num_tokens - prefix) % rows == 0 and abs(rows**2 / (num_tokens - prefix) / aspect - 1) < 0.05:
            return prefix, (rows, (num_tokens - prefix) // rows)
    return 0, near_square(num_tokens)


@dataclass(frozen=True)
class MapNumbers:
    """Numbers of one block's map, means over images, heads and unmasked tokens. Gates are |W| with rows summing to 1.

    Attributes:
        name: the mixer's path in the model.
        kind: slots, tokens or gate.
        shape: shape of the map.
        entropy: entropy of a row over its upper bound: 0 = all weight on one column, 1 = uniform.
        effective_columns: exp(entropy of the mean row): number of slots (or tokens) in use.
        saturation: share of a row's weight on its largest column.
        diagonality: share of a row's weight on the token itself; None for slots.
        distance: 1 - linear CKA with the previous block's map: 0 = tokens are distinguished in the same way, 1 =
            unrelated; None for the first block and for a map with equal rows.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    entropy: float
    effective_columns: float
    saturation: float
    diagonality: float | None
    distance: float | None


def map_numbers(maps: list[BlockMap]) -> list[MapNumbers]:
    """Numbers of each block's map, from the first block to the last."""
    found: list[MapNumbers] = []
    previous: Tensor | None = None
    for block in maps:
        # Nonnegative, each row summing to 1; a masked token's row is 0 and does not count.
        values = block.map.detach().double().abs()
        values = values[None, None] if values.dim() == 2 else values
        total = values.sum(-1, keepdim=True)
        rows, live = values / total.where(total > 0, 1.0), total.squeeze(-1) > 0
        square = block.kind != "slots" and rows.shape[-1] == rows.shape[-2]
        live |= ~live.any()
        tokens = live.sum(-1, keepdim=True, dtype=rows.dtype).clamp_min(1)
        columns = tokens if square else torch.full_like(tokens, rows.shape[-1])
        numbers = MapNumbers(
            name=block.name,
            kind=block.kind,
            shape=tuple(block.map.shape),
            entropy=(_entropy(rows) / columns.clamp_min(2).log())[live].mean().item(),
            effective_columns=_entropy(rows.sum(-2) / tokens).exp().mean().item(),
            saturation=rows.amax(-1)[live].mean().item(),
            diagonality=rows.diagonal(dim1=-2, dim2=-1)[live].mean().item() if square else None,
            distance=None if previous is None else _distance(rows, previous),
        )
        found.append(numbers)
        previous = rows
    return found


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


def _distance(rows: Tensor, previous: Tensor) -> float | None:
    """1 - CKA, mean over images; the concatenated columns of the heads are the features of a token."""
    size = max(rows.shape[0], previous.shape[0])
    if rows.shape[-2] != previous.shape[-2] or not {rows.shape[0], previous.shape[0]} <= {1, size}:
        return None

    def centred(maps: Tensor) -> Tensor:
        flat = maps.permute(0, 2, 1, 3).flatten(2)
        live = flat.sum(2, keepdim=True) > 0
        mean = flat.sum(1, keepdim=True) / live.sum(1, keepdim=True).clamp_min(1)
        return ((flat - mean) * live).expand(size, -1, -1)

    mine, other = centred(rows), centred(previous)
    shared = (mine.transpose(1, 2) @ other).square().sum((1, 2))
    norms = [(f.transpose(1, 2) @ f).square().sum((1, 2)).sqrt() for f in (mine, other)]
    scale = norms[0] * norms[1]
    # Equal rows leave only rounding errors after centring.
    return None if (scale < 1e-20).any() else (1 - shared / scale).mean().item()


SIGNED = "coolwarm"
"""matplotlib's colour map of signed numbers in all figures: positive red, negative blue."""


@dataclass(frozen=True)
class Tile:
    """One small figure.

    Attributes:
        label: title.
        values: (h, w), on the tokens' grid, or a whole matrix.
        signed: whether values may be negative, with 0 as the neutral colour.
        mark: position (row, column) of the token whose row is shown.
        on_image: whether `values` are drawn over the image.
    """

    label: str
    values: Tensor
    signed: bool = False
    mark: tuple[int, int] | None = None
    on_image: bool = True

    @property
    def range(self) -> tuple[float, float]:
        """Values at the ends of the colour scale, which is symmetric for signed values."""
        low, high = self.values.min().item(), self.values.max().item()
        most = max(abs(low), abs(high), 1e-12)
        return (-most, most) if self.signed else (low, high)

    @property
    def scale(self) -> str:
        """Name of the colour scale."""
        return SIGNED if self.signed else "inferno"


def tiles_of(block: BlockMap, image: int = 0, limit: int = 8) -> list[Tile]:
    """At most `limit` tiles of one block's map on one image of the batch.

    Self-attention: the centre token's row and the mean weight on each token, for as many heads as fit. Slots: those
    whose weight varies most over the image. Gates: the whole matrix, then rows on the grid, the centre token's first. A
    class token has no position on the image and is left out. Of several windows the first is shown.
    """
    if block.windows > 1:
        first = block._replace(map=block.map if block.kind == "gate" else block.map[:: block.windows], windows=1)
        tiles = tiles_of(first, image, limit)
        return [replace(tile, label=f"window 1 of {block.windows}, {tile.label}", on_image=False) for tile in tiles]
    values = (block.map if block.kind == "gate" else block.map[image]).detach().float().cpu()
    values, (height, width) = values[..., block.prefix :, :], block.grid
    centre = height // 2 * width + width // 2
    if block.kind == "slots":
        heads, _, slots = values.shape
        by_slot = values.permute(0, 2, 1).flatten(0, 1)
        chosen = by_slot.std(-1, correction=0).argsort(descending=True)[:limit].tolist()
        name = "head {}, slot {}" if heads > 1 else "slot {1}"
        return [Tile(name.format(*divmod(i, slots)), by_slot[i].view(block.grid)) for i in chosen]
    values = values[..., block.prefix :]
    if block.kind == "gate":
        others = torch.linspace(0, height * width - 1, max(2, limit - 1)).long().tolist()
        chosen = list(dict.fromkeys([centre, *others]))[: limit - 1]
        return [
            Tile("whole matrix", values, signed=True, on_image=False),
            *(Tile(f"row of token {i}", values[i].view(block.grid), True, divmod(i, width)) for i in chosen),
        ]
    # The keys may be pooled: both sides of their grid are those of the tokens' divided by one factor, rounded up.
    factor = math.ceil((height * width / values.shape[-1]) ** 0.5)
    keys = -(-height // factor), -(-width // factor)
    mark = divmod(centre, width) if keys == block.grid else None
    heads = range(min(values.shape[0], max(1, limit // 2)))
    looks = [Tile(f"head {h}, centre token", values[h, centre].view(keys), mark=mark) for h in heads]
    return [*looks, *(Tile(f"head {h}, received", values[h].mean(0).view(keys)) for h in heads)][:limit]


@dataclass(frozen=True)
class Inspection:
    """Behaviour of a model's mixers on one input.

    Attributes:
        target: run folder or model.
        file: path of the image, or the sentence; None without input.
        trained: False for a model by name, whose weights are random.
        answer: the run's prediction for the image.
        blocks: numbers of each block, from the first to the last: fields of `MapNumbers`, or of the gates of a text
            model.
        maps: attention maps, slots and gates of the image; empty for text.
        figures: matplotlib figures by name: "block-00" and others, "depth"; for text "gates" and "attention".
        path: folder with the figures and numbers.json; None if nothing was written.
    """

    target: str
    file: str | None
    trained: bool
    answer: Values | None
    blocks: tuple[Values, ...]
    maps: tuple[BlockMap, ...]
    figures: Mapping[str, Figure]
    path: Path | None = None

    @property
    def best(self) -> Values | None:
        """Numbers of the most selective block: that with the lowest entropy, or the largest rms of its gate."""
        return min(self.blocks, key=lambda block: block.get("entropy", -block.get("rms", 0)), default=None)

    def write(self, out: str | Path) -> Path:
        """Write each figure as PNG, and numbers.json; return the folder."""
        out = user_path(out)
        make_folder(out)
        for name, figure in self.figures.items():
            save_figure(figure, out / f"{name}.png", dpi=120)
        given = "file" if self.maps else "text"
        told = {"target": self.target, given: self.file, "trained": self.trained, "answer": self.answer}
        write_json(out / "numbers.json", {**told, "blocks": self.blocks})
        return out

    def to_pandas(self) -> "pd.DataFrame":
        """A row per block; needs pandas."""
        return to_frame(self.blocks)

    def plot(self, name: str | None = None) -> Figure:
        """One of `figures`; by default the last, which for images shows the numbers over depth."""
        if name is not None and name not in self.figures:
            raise unknown_name("figure", name, self.figures)
        return self.figures[[*self.figures][-1] if name is None else name]

    def rows(self) -> list[list[str]]:
        names = [name for name in (self.blocks[0] if self.blocks else {}) if name not in ("shape", "kind")]
        return [names, *([_cell(block[name]) for name in names] for block in self.blocks)]

    def __str__(self) -> str:
        trained = "" if self.trained else " (random weights)"
        answer = "" if self.answer is None else f", prediction {self.answer}"
        return f"{self.target}{trained} on {self.file}{answer}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return to_html(self.rows(), str(self))


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


@from_caller
def inspect(target: str | Path, file: str | Path | None = None, *, out: str | Path | None = None) -> Inspection:
    """Show what a model's mixers do with an image, or a text model's with a sentence.

    Args:
        target: a run folder; or the name of an image model, which then has random weights.
        file: an image; for a run on text a sentence, needed only for attention maps.
        out: a folder for the figures and numbers.json; `.write(folder)` does the same later.

    Returns:
        `.blocks`, `.best`, `.maps`, `.figures`, `.path`, `.to_pandas()`, `.plot()`.

    Raises:
        UserError: neither a run folder nor a model; an unreadable image; a model without token mixers.
    """
    if isinstance(target, nn.Module):
        raise UserError(
            f"inspect takes a run folder or a model's name, got a {type(target).__name__}; "
            "tokenmix.lab.inspect.attention_maps takes a module and images"
        )
    task = load_task(user_path(target)) if is_run(str(target)) else None
    of = MODELS[str(target)].tasks[0] if task is None else task.config.task
    kind = get_task(of)
    if kind.inspects == "nothing":
        raise UserError(f"{target} is of {of}; inspect works on models of images and text")
    if kind.inspects == "images":
        found = _inspect_image(kind, task, target, file)
    elif task is None:
        raise UserError(f"{str(target)!r} is a text model; inspect a run of it: tokenmix inspect RUN [SENTENCE]")
    else:
        found = _inspect_text(cast("TextTask", task), str(target), None if file is None else str(file))
    return found if out is None else replace(found, path=found.write(out))


def _inspect_image(kind: Any, task: "TaskModule | None", target: str | Path, file: str | Path | None) -> Inspection:
    """The maps of an image by a run's model, or by a new model of that name without a run."""
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
    figures = {
        f"block-{i:02d}": draw_tiles(shown, tiles_of(block, limit=TILES), f"{title}: {block.name}")
        for i, block in enumerate(maps)
    }
    figures["depth"] = draw_depth(numbers, title)
    answer = None
    if task is not None:
        with torch.no_grad():
            answer = {name: value for name, value in task.predict([file])[0].items() if name != "file"}
    blocks = tuple(asdict(block) for block in numbers)
    return Inspection(str(target), str(file), task is not None, answer, blocks, tuple(maps), figures)


def toeplitz_share(matrix: Tensor) -> float:
    """Share of a square matrix's variance that the means of its diagonals explain.

        1 - sum_ij (W_ij - mean of diagonal i - j)^2 / sum_ij (W_ij - mean of W)^2

    1 for a Toeplitz matrix that is not constant. 2 / (n + 1) on average for independent entries, since 2n - 1 means fit
    this share of noise. nan for a constant matrix, which has no variance.
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


def _inspect_text(task: "TextTask", title: str, given: str | None) -> Inspection:
    """The gates, and with a sentence the attention; `UserError` if there is nothing to show."""
    model: Any = task.model.float().cpu().eval()
    if "architecture" in task.data:
        raise UserError(f"{title} is a model of transformers; its maps come from output_attentions=True in Python")
    mixers = ((i, layer.mixer) for i, layer in enumerate(model.base_model.layers))
    gatings = [(i, mixer.gating) for i, mixer in mixers if hasattr(mixer, "gating")]
    gates = [gating.matrix(gating.num_tokens).detach().float() for _, gating in gatings]
    numbers: list[Values] = [
        {"block": i, "gate": gating.gate, "toeplitz_share": toeplitz_share(w), "rms": float(w.square().mean().sqrt())}
        for (i, gating), w in zip(gatings, gates)
    ]
    if not numbers and given is None:
        raise UserError(f"{title} has no gates, and its attention depends on the text: give a sentence")
    figures = {}
    if numbers:
        titles = [f"block {row['block']}: {row['toeplitz_share']:.3f}" for row in numbers]
        figures["gates"] = draw_matrices(gates, titles, f"{title}: gates")
    if given is not None:
        from tokenmix.lab.tasks.text.task import read_sentences

        sentence, length = read_sentences([given])[0].text, int(task.data["seq_len"])
        words = task.tokenizer()(sentence, truncation=True, max_length=length, return_tensors="pt")
        with torch.no_grad():
            maps = model(input_ids=words["input_ids"], output_attentions=True).attentions
        if maps is not None:
            titles = [f"block {i}" for i in range(len(maps))]
            figures["attention"] = draw_matrices([one[0].mean(0) for one in maps], titles, f"{title}: {sentence}")
    return Inspection(title, given, True, None, tuple(numbers), (), figures)


COLUMNS = 4


def draw_tiles(image: Tensor, tiles: Sequence[Tile], title: str) -> Figure:
    """One figure: the image, then each tile over the image, with its own colour scale (range printed below)."""
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
        low, high = tile.range
        style: Any = {"cmap": tile.scale, "vmin": low, "vmax": high, "interpolation": "nearest"}
        if tile.on_image:
            extent = (-0.5, width - 0.5, height - 0.5, -0.5)
            axis.imshow(shown.mean(-1), cmap="gray", extent=extent, vmin=0, vmax=1)
            axis.imshow(values, extent=extent, alpha=0.72, **style)
            if tile.mark is not None:
                y, x = ((tile.mark[i] + 0.5) * (height, width)[i] / values.shape[i] - 0.5 for i in (0, 1))
                axis.plot(x, y, marker="o", markersize=5, markerfacecolor="none", markeredgecolor="#00e5ff")
        else:
            axis.imshow(values, **style)
        axis.set_title(tile.label, fontsize=8)
        axis.set_xlabel(f"{low:.2g} to {high:.2g}", fontsize=7)
    return plain_text(figure)


def _panel(count: int, title: str) -> tuple[Figure, list[Axes]]:
    rows = -(-count // COLUMNS)
    figure = Figure(figsize=(2.1 * COLUMNS, 2.35 * rows + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axis in axes:
        axis.set(xticks=[], yticks=[], frame_on=False)
    return figure, axes


def draw_matrices(matrices: Sequence[Tensor], titles: Sequence[str], title: str) -> Figure:
    """Square matrices side by side, each on its own colour scale: signed around 0, else from 0 (its largest value)."""
    figure, axes = _panel(len(matrices), title)
    for axis, matrix, label in zip(axes, matrices, titles):
        values = matrix.detach().float().cpu().numpy()
        signed, high = bool((values < 0).any()), max(float(np.abs(values).max()), 1e-12)
        axis.imshow(values, cmap=SIGNED if signed else "inferno", vmin=-high if signed else 0, vmax=high)
        axis.set_title(label, fontsize=8)
        axis.set_xlabel(f"{'±' if signed else '0 to '}{high:.2g}", fontsize=7)
    return plain_text(figure)


def draw_depth(numbers: Sequence[MapNumbers], title: str) -> Figure:
    """Saturation, entropy, diagonality and distance to the previous block, over depth."""
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
    return plain_text(figure)
