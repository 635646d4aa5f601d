"""Predictions about points as files: a coloured cloud, and an image of it."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tokenmix.errors import UserError

_DRAWN = 4000


def colors_of(parts: Tensor) -> Tensor:
    """Colours uint8 (N, 3) of parts (N,), the same for a part everywhere."""
    import matplotlib as mpl

    table = torch.tensor(mpl.colormaps["tab20"].colors).mul(255).round().byte()  # type: ignore[attr-defined]
    # Strong colours first, as matplotlib pairs them with pale ones.
    order = torch.cat([torch.arange(0, 20, 2), torch.arange(1, 20, 2)])
    return table[order[parts % 20]]


def scatter(axis: Any, points: Tensor, parts: Tensor) -> None:
    """Points as dots on a three-dimensional axis, at most 4,000 of them."""
    step = -(-len(points) // _DRAWN)
    x, y, z = points[::step].unbind(1)
    axis.scatter(x, z, -y, c=colors_of(parts[::step]).float().div(255).numpy(), s=4, linewidths=0, depthshade=False)
    axis.set_box_aspect([max(float(side.max() - side.min()), 1e-3) for side in (x, z, y)])
    axis.set_axis_off()


def cloud_image(points: Tensor, parts: Tensor) -> Image.Image:
    """A small image of the cloud, its parts in colours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6, 1.6))
    buffer = io.BytesIO()
    axis: Any = figure.add_axes((0, 0, 1, 1), projection="3d")
    scatter(axis, points[:, :3], parts)
    axis.view_init(elev=25, azim=-60)
    figure.savefig(buffer, dpi=100, format="png")
    return Image.open(buffer).convert("RGB")


def draw_cloud(path: Path, points: Tensor, parts: Tensor, names: Mapping[str, int]) -> Path:
    """An image of the cloud from two sides, with the names of its parts."""
    from matplotlib.figure import Figure

    from tokenmix.files import save_figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    for place, turn in enumerate((-60, 120)):
        axis: Any = figure.add_subplot(1, 2, place + 1, projection="3d")
        scatter(axis, points, parts)
        axis.view_init(elev=25, azim=turn)
    for name, number in names.items():
        figure.axes[0].plot([], [], "o", color=colors_of(torch.tensor([number]))[0].div(255).tolist(), label=name)
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False)
    try:
        save_figure(figure, path, dpi=110)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); give a folder that exists and is writable") from None
    return path
