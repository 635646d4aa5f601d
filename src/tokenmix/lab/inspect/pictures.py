"""Maps as figures: tiles over the image, numbers over depth."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tokenmix.files import save_figure
from tokenmix.lab.inspect.maps import SIGNED, MapNumbers, Tile

COLUMNS = 4


def display_image(image: Tensor) -> np.ndarray:
    """(C, H, W) in any range to (H, W, 3) in 0..1."""
    values = image.detach().float().cpu()
    values = (values - values.min()) / (values.max() - values.min()).clamp_min(1e-8)
    if values.shape[0] not in (1, 3):
        values = values.mean(0, keepdim=True)
    return values.expand(3, -1, -1).permute(1, 2, 0).numpy()


def draw_tiles(image: Tensor, tiles: Sequence[Tile], title: str, file: Path) -> None:
    """One figure: the image, then every tile over it, each on its own colour scale (its range is printed below)."""
    shown = display_image(image)
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
