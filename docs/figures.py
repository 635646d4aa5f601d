"""The pictures of the documentation, made by our own layers: `python docs/figures.py [NAME ...] [--weights FOLDER]`.

Each function draws one file of docs/images. The small networks after some of them are trained by trained.py.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from stamps import numbers, stamp
from torch import Tensor, nn
from trained import GRID, Trained, of_networks, test_images

from tokenmix.lab.inspect import SIGNED
from tokenmix.layers import (
    AttentionResidual,
    ExternalAttention,
    MultiHeadExternalAttention,
    OffsetAttention,
    SelfAttention,
)
from tokenmix.ops import double_normalize, resize_gate, toeplitz_matrix
from tokenmix.ops.attention import attention_probabilities
from tokenmix.ops.less import Scores

IMAGES = Path(__file__).parent / "images"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "tokenmix",
}
BLUE, ORANGE, GREY = "#2b5fb3", "#d9731a", "#777777"
BAG, SHIRT, BOOT = 48, 50, 45
QUERIES = ((3, 9), (9, 4), (7, 1))


def photo(axes: Axes, picture: Tensor, query: tuple[int, int] | None = None) -> None:
    """The image itself, with the query's place in orange."""
    axes.imshow(picture, cmap="gray_r", extent=frame(picture), vmin=0, vmax=1.15)
    mark(axes, picture, query)
    bare(axes)


def over_image(axes: Axes, picture: Tensor, values: Tensor, query: tuple[int, int] | None = None) -> None:
    """A map of numbers from 0 up over the grid, with the outline of the object."""
    axes.imshow(values, cmap="Blues", extent=frame(picture), vmin=0)
    outline(axes, picture)
    mark(axes, picture, query)
    bare(axes)


def signed(axes: Axes, values: Tensor, limit: float | None = None) -> None:
    """In the colours of `tokenmix.lab.inspect`, positive red and negative blue; numbers beyond the limit saturate."""
    limit = limit or values.abs().quantile(0.995).item()
    axes.imshow(values, cmap=SIGNED, vmin=-limit, vmax=limit, interpolation="nearest")
    bare(axes)


def frame(picture: Tensor) -> tuple[float, float, float, float]:
    """Corners of the image in pixels."""
    return 0, picture.shape[1], picture.shape[0], 0


def outline(axes: Axes, picture: Tensor) -> None:
    """Where the object ends."""
    axes.contour(
        torch.arange(picture.shape[1]) + 0.5,
        torch.arange(picture.shape[0]) + 0.5,
        picture,
        [0.12],
        colors=GREY,
        linewidths=0.6,
    )


def mark(axes: Axes, picture: Tensor, query: tuple[int, int] | None, tokens: int = 1) -> None:
    """A frame around a token of the 14 x 14 grid, or around a square of tokens."""
    if query is not None:
        cell = picture.shape[0] / GRID[0]
        corner, side = (query[1] * cell, query[0] * cell), tokens * cell
        axes.add_patch(plt.Rectangle(corner, side, side, fill=False, edgecolor=ORANGE, linewidth=1.8))


def colour_bars(figure: Figure) -> None:
    """A bar for each kind of map in a figure: every map has its own largest value."""
    axes = figure.get_axes()
    used = {image.get_cmap().name for one in axes for image in one.get_images()}
    for name, low, ticks in (("Blues", 0, {0: "0", 1: "max"}), (SIGNED, -1, {-1: "−max", 0: "0", 1: "max"})):
        if name in used:
            shown = mpl.cm.ScalarMappable(mpl.colors.Normalize(low, 1), name)
            bar = figure.colorbar(shown, ax=axes, shrink=0.7, aspect=18, pad=0.015, ticks=list(ticks))
            bar.ax.set_yticklabels(list(ticks.values()), fontsize=7)
            bar.outline.set_linewidth(0.5)


def bare(axes: Axes) -> None:
    """No ticks, a thin frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_linewidth(0.5)
        spine.set_color("#bbbbbb")


def label(axes: Axes, text: str) -> None:
    """What a row shows, on its left."""
    axes.set_ylabel(text, rotation=0, ha="right", va="center", labelpad=6)


def place(query: tuple[int, int], grid: tuple[int, int] = GRID) -> int:
    """Number of the token at (row, column)."""
    return query[0] * grid[1] + query[1]


def maps_of(model: Any, images: Tensor) -> list[Any]:
    """The blocks' maps on these images."""
    return model.attention_maps(images)


def self_attention(trained: Trained) -> Figure:
    """Three queries, four heads of the last block."""
    pictures, images = test_images([BOOT])
    used = maps_of(trained("self"), images)[-1].map[0]
    figure, rows = plt.subplots(3, 5, figsize=(6.4, 3.95), layout="constrained")
    for row, query in zip(rows, QUERIES):
        photo(row[0], pictures[0], query)
        for head, axes in enumerate(row[1:]):
            over_image(axes, pictures[0], used[head, place(query)].view(GRID), query)
            if query is QUERIES[0]:
                axes.set_title(f"head {head}")
    rows[0, 0].set_title("query token")
    return figure


def simplified(trained: Trained) -> Figure:
    """What is left of the map off the diagonal, as tokens grow wider, with and without the scale."""
    torch.manual_seed(0)
    widths = [4, 8, 16, 32, 64, 128, 256]
    figure, axes = plt.subplots(figsize=(4.6, 2.7), layout="constrained")
    for name, colour, power in (("as printed, scale 1", ORANGE, 0.0), ("1/√D", BLUE, -0.5), ("1/D", GREY, -1.0)):
        kept = []
        for width in widths:
            tokens = nn.functional.layer_norm(torch.randn(8, 1, 196, width), (width,))
            used = attention_probabilities(tokens, tokens, scale=width**power)
            kept.append(used.diagonal(dim1=-2, dim2=-1).mean().item())
        axes.plot(widths, kept, "o-", color=colour, label=name, markersize=4)
    axes.set(xscale="log", xlabel="width D of the tokens", ylabel="a token's weight on itself", ylim=(-0.02, 1.02))
    axes.set_xticks(widths, [str(w) for w in widths])
    axes.minorticks_off()
    axes.legend(frameon=False)
    return figure


def sagan(trained: Trained) -> Figure:
    """Two queries on the pooled keys of two blocks."""
    pictures, images = test_images([BOOT, BAG])
    used = maps_of(trained("sagan"), images)
    figure, rows = plt.subplots(2, 5, figsize=(6.4, 2.75), layout="constrained")
    for row, picture, image in zip(rows, pictures, range(2)):
        photo(row[0], picture)
        for axes, (query, block) in zip(row[1:], ((q, b) for b in (1, 3) for q in QUERIES[:2])):
            over_image(axes, picture, used[block].map[image, 0, place(query)].view(7, 7), query)
            if image == 0:
                axes.set_title(f"block {block}")
    rows[0, 0].set_title("image")
    return figure


def external_slots(trained: Trained) -> Figure:
    """The slots that take most in the first block, over two images."""
    pictures, images = test_images([BOOT, BAG])
    used = maps_of(trained("external"), images)[0].map[:, 0]
    slots = used.mean((0, 1)).topk(7).indices.tolist()
    figure, rows = plt.subplots(2, 8, figsize=(7.4, 2.1), layout="constrained")
    for row, picture, shares in zip(rows, pictures, used):
        photo(row[0], picture)
        for axes, slot in zip(row[1:], slots):
            over_image(axes, picture, shares[:, slot].view(GRID))
    for axes, slot in zip(rows[0, 1:], slots):
        axes.set_title(f"slot {slot}")
    rows[0, 0].set_title("image")
    return figure


def external_normalisation(trained: Trained) -> Figure:
    """Row sums of the published two divisions and of the one softmax, as the logits grow."""
    torch.manual_seed(0)
    spreads = [1, 2, 4, 8, 16, 24, 32]
    figure, panels = plt.subplots(1, 2, figsize=(6.6, 2.6), layout="constrained", sharey=True)
    for axes, dtype in zip(panels, (torch.float32, torch.float16)):
        for name, colour, norm in (
            ("two divisions, ε = 1e-9", ORANGE, _two_divisions),
            ("one softmax (ours)", BLUE, double_normalize),
        ):
            shares = [_rows_that_hold(norm, spread, dtype) for spread in spreads]
            axes.plot(spreads, shares, "o-", color=colour, label=name, markersize=4)
        axes.set(xlabel="standard deviation of the logits", title=str(dtype).removeprefix("torch."), ylim=(0.2, 1.04))
    panels[0].set_ylabel("share of rows that sum to 1")
    panels[0].legend(frameon=False, loc="lower left")
    return figure


def _two_divisions(logits: Tensor) -> Tensor:
    shares = logits.softmax(-2)
    return shares / (1e-9 + shares.sum(-1, keepdim=True))


def _rows_that_hold(norm: Callable[[Tensor], Tensor], spread: float, dtype: torch.dtype) -> float:
    rows = norm((spread * torch.randn(64, 196, 64)).to(dtype)).float().sum(-1)
    return ((rows - 1).abs() < 0.01).float().mean().item()


def multihead_cost(trained: Trained) -> Figure:
    """Multiply-adds per token against N, with the crossover."""
    figure, panels = plt.subplots(1, 2, figsize=(6.6, 2.7), layout="constrained")
    tokens = [64 * i for i in range(1, 41)]
    for axes, dim in zip(panels, (256, 384)):
        for name, colour, layer in (
            ("self-attention", GREY, SelfAttention(dim, device="meta")),
            ("multi-head external", BLUE, MultiHeadExternalAttention(dim, num_heads=dim // 64, device="meta")),
        ):
            axes.plot(tokens, [layer.macs(n) / n / 1e6 for n in tokens], color=colour, label=name)
        meet = 2 * dim + 256
        axes.axvline(meet, color=ORANGE, linewidth=1, linestyle="--")
        axes.annotate(f"N = {meet:,}", (meet, 0.1), (meet + 60, 0.08), color=ORANGE)
        axes.axvline(196, color=GREY, linewidth=0.8, linestyle=":")
        axes.annotate("196", (196, 0.1), (210, 0.08), color=GREY)
        axes.set(xlabel="tokens N", title=f"width D = {dim}", ylim=(0, None), xlim=(0, None))
        right = tokens[-1], layer.macs(tokens[-1]) / tokens[-1] / 1e6
        axes.annotate("multi-head external", right, (right[0], right[1] - 0.04), color=BLUE, ha="right", va="top")
        axes.annotate("self-attention", (1500, 1), (0.71, 0.82), textcoords="axes fraction", color=GREY, ha="right")
    panels[0].set_ylabel("million MACs a token")
    return figure


def offset_cost(trained: Trained) -> Figure:
    """Multiply-adds per point against the number of points, of PCT's layer and of external attention in its place."""
    figure, axes = plt.subplots(figsize=(4.6, 2.7), layout="constrained")
    points, dim = [2**i for i in range(8, 17)], 256
    offset, external = OffsetAttention(dim, device="meta"), ExternalAttention(dim, num_slots=64, device="meta")
    # After external attention stands the same linear layer, D^2 a point.
    for name, color, macs in (
        ("offset attention", GREY, [offset.macs(n) / n for n in points]),
        ("external attention, S = 64", BLUE, [external.macs(n) / n + dim**2 for n in points]),
    ):
        axes.loglog(points, [m / 1e6 for m in macs], color=color)
        axes.annotate(name, (points[-1], macs[-1] / 1e6), (-4, 6), textcoords="offset points", color=color, ha="right")
    axes.set(xlabel="points N", ylabel="million MACs a point", title=f"width D = {dim}", ylim=(0.1, 60))
    return figure


def multihead_heads(trained: Trained) -> Figure:
    """One image, the two most uneven slots of six heads."""
    pictures, images = test_images([BAG])
    used = maps_of(trained("multihead-external"), images)[1].map[0]
    uneven = used.std(1)
    heads = uneven.topk(2, -1).values.sum(-1).topk(6).indices.tolist()
    figure, rows = plt.subplots(2, 7, figsize=(7.0, 2.25), layout="constrained")
    photo(rows[0, 0], pictures[0])
    rows[0, 0].set_title("image")
    rows[1, 0].axis("off")
    for column, head in enumerate(heads, start=1):
        for row, slot in enumerate(uneven[head].topk(2).indices.tolist()):
            over_image(rows[row, column], pictures[0], used[head, :, slot].view(GRID))
            rows[row, column].set_xlabel(f"slot {slot}", fontsize=8)
        rows[0, column].set_title(f"head {head}")
    return figure


def spatial_gating(trained: Trained) -> Figure:
    """A learned W, one of its rows on its grid and on a finer one, and the Toeplitz forms."""
    gate = trained("gating").blocks[3].mixer.gating
    weight, query, finer = gate.weight.detach(), QUERIES[1], (20, 20)
    resized, _ = resize_gate(weight, gate.bias.detach(), GRID, finer)
    there = round((query[0] + 0.5) * 20 / 14 - 0.5), round((query[1] + 0.5) * 20 / 14 - 0.5)
    torch.manual_seed(0)
    lags = torch.arange(-48, 49)
    toeplitz = toeplitz_matrix(torch.exp(-(lags**2) / 60.0) * torch.cos(lags / 4.0), 49)
    panels = (
        ("dense, learned", weight, "196 × 196"),
        ("one row", weight[place(query)].view(GRID), "on its 14 × 14 grid"),
        ("resized", resized[place(there, finer)].view(finer), "20 × 20 tokens"),
        ("Toeplitz", toeplitz, "49 × 49 from 97 numbers"),
        ("causal", toeplitz.tril(), "lower triangle"),
    )
    figure, row = plt.subplots(1, 5, figsize=(7.6, 1.95), layout="constrained")
    for axes, (title, matrix, note) in zip(row, panels):
        signed(axes, matrix)
        axes.set_title(title)
        axes.set_xlabel(note, fontsize=8)
    return figure


def gated_mlp(trained: Trained) -> Figure:
    """Rows of W over the grid, block by block, for three tokens."""
    model = trained("gating")
    figure, rows = plt.subplots(3, 4, figsize=(5.4, 4.2), layout="constrained")
    for i, column in enumerate(rows.T):
        weight = model.blocks[i].mixer.gating.weight.detach()
        limit = weight.abs().quantile(0.995).item()
        for axes, query in zip(column, QUERIES):
            signed(axes, weight[place(query)].view(GRID), limit)
            cell = plt.Rectangle((query[1] - 0.5, query[0] - 0.5), 1, 1, fill=False, edgecolor="black", linewidth=1.2)
            axes.add_patch(cell)
        column[0].set_title(f"block {i}")
    for axes, query in zip(rows[:, 0], QUERIES):
        label(axes, f"token\n({query[0]}, {query[1]})")
    return figure


def tiny_attention(trained: Trained) -> Figure:
    """The fixed row of W and the map of tiny attention, for the same token of two images."""
    pictures, images = test_images([BOOT, BAG])
    model = trained("gating-attention")
    query, block = QUERIES[1], 2
    mixer = model.blocks[block].mixer
    with torch.no_grad():
        x = model.tokens(images)
        for before in model.blocks[:block]:
            x, _ = before(x)
        used = mixer.tiny_attention_map(model.blocks[block].norm1(x))
    figure, rows = plt.subplots(2, 3, figsize=(6.0, 3.4), layout="constrained")
    for i, row in enumerate(rows):
        photo(row[0], pictures[i], query)
        signed(row[1], mixer.gating.weight.detach()[place(query)].view(GRID))
        over_image(row[2], pictures[i], used[i, 0, place(query)].view(GRID), query)
    for axes, title in zip(rows[0], ("token", "row of W: the same", "tiny attention: its own")):
        axes.set_title(title)
    return figure


def less_attention(trained: Trained) -> Figure:
    """The map of the vanilla layer, and those made from its scores."""
    pictures, images = test_images([BOOT])
    used = maps_of(trained("less"), images)
    figure, rows = plt.subplots(2, 5, figsize=(6.6, 2.75), layout="constrained")
    for row, query in zip(rows, QUERIES[:2]):
        photo(row[0], pictures[0], query)
        for axes, block in zip(row[1:], used):
            over_image(axes, pictures[0], block.map[0].mean(0)[place(query)].view(GRID), query)
    titles = ("query token", "1: own q, k", "2: from 1", "3: from 2", "4: from 3")
    for axes, title in zip(rows[0], titles):
        axes.set_title(title)
    return figure


def attention_residual(trained: Trained) -> Figure:
    """Scores of 14 x 14 tokens and what reaches the 7 x 7 tokens of the next stage."""
    pictures, images = test_images([BOOT, BAG])
    scores = last_scores(trained("self"), images)
    residual = AttentionResidual(4, 4, init_scale=1.0)
    with torch.no_grad():
        residual.head_weight.copy_(torch.eye(4))
        shrunk = residual(scores, GRID)
    matrix = scores.matrix()
    figure, rows = plt.subplots(2, 3, figsize=(6.0, 3.4), layout="constrained")
    query = (10, 6)
    for i, row in enumerate(rows):
        photo(row[0], pictures[i])
        mark(row[0], pictures[i], query, tokens=2)
        signed(row[1], matrix[i, 0, place(query)].view(GRID))
        signed(row[2], shrunk[i, 0, place((query[0] // 2, query[1] // 2), (7, 7))].view(7, 7))
    for axes, title in zip(rows[0], ("four tokens, one later", "scores of the first", "residual, 7 × 7")):
        axes.set_title(title)
    return figure


@torch.no_grad()
def last_scores(model: Any, images: Tensor) -> Scores:
    """The scores of the last block."""
    x, carry = model.tokens(images), None
    for block in model.blocks:
        x, carry = block(x, carry)
    assert carry is not None
    return carry


def measured(name: str) -> dict[str, Any]:
    """The results in a JSON file of dev."""
    return json.loads((IMAGES.parents[1] / "dev" / f"{name}.json").read_text())


def hybrids(_trained: Trained) -> Figure:
    """Accuracy on tasks of the probe over the number of self-attention layers."""
    figure, axes = plt.subplots(figsize=(4.6, 2.6), layout="constrained")
    found = measured("hybrids")["accuracy"]
    for i, (name, rows) in enumerate(found.items()):
        means = [sum(row) / len(row) for row in rows]
        axes.plot(range(len(rows)), means, "o-" if i < 2 else "s--", color=(BLUE, ORANGE)[i % 2], label=name)
    axes.set(xlabel="self-attention layers of four", ylabel="accuracy", xticks=range(5), ylim=(0, 1.05))
    axes.legend(frameon=False, loc="lower right")
    return figure


def swap_nano(_trained: Trained) -> Figure:
    """Accuracy over training steps after a swap: a panel for each mixer, a line for each way of training."""
    results = measured("swap_nano")
    figure, panels = plt.subplots(2, 2, figsize=(6.4, 4.6), layout="constrained", sharey=True)
    for axes, (mixer, ways) in zip(panels.flat, results["accuracy"].items(), strict=True):
        ticks = [int(steps) for steps in ways["fine-tuning"]]
        for number, (way, found) in enumerate(ways.items()):
            runs = torch.tensor(list(found.values()))
            # Next to each other, since ways of equal accuracy would cover each other.
            places = [ticks.index(int(steps)) + 0.08 * number for steps in found]
            axes.errorbar(places, runs.mean(1), runs.std(1), marker="o", markersize=3, linewidth=0.8, label=way)
        axes.axhline(results["teacher"], color=GREY, linewidth=0.8, linestyle="--", label="teacher")
        axes.set(title=mixer, xlabel="training steps", ylabel="accuracy")
        axes.set_xticks(range(len(ticks)), [f"{steps:,}" for steps in ticks])
    panels[0, 0].legend(frameon=False, fontsize=8)
    return figure


FIGURES: dict[str, Callable[[Trained], Figure]] = {
    "self_attention.png": self_attention,
    "simplified.svg": simplified,
    "sagan.png": sagan,
    "external_slots.png": external_slots,
    "external_normalisation.svg": external_normalisation,
    "multihead_cost.svg": multihead_cost,
    "offset_cost.svg": offset_cost,
    "multihead_heads.png": multihead_heads,
    "spatial_gating.png": spatial_gating,
    "gated_mlp.png": gated_mlp,
    "tiny_attention.png": tiny_attention,
    "less_attention.png": less_attention,
    "attention_residual.png": attention_residual,
    "hybrids.svg": hybrids,
    "swap_nano.svg": swap_nano,
}
NETWORKS = {
    "self_attention.png": ["self"],
    "sagan.png": ["sagan"],
    "external_slots.png": ["external"],
    "multihead_heads.png": ["multihead-external"],
    "spatial_gating.png": ["gating"],
    "gated_mlp.png": ["gating"],
    "tiny_attention.png": ["gating-attention"],
    "less_attention.png": ["less"],
    "attention_residual.png": ["self"],
}
"""The trained networks of a figure; the other figures are of numbers alone."""


def save(figure: Figure, file: Path) -> None:
    """SVG with nothing that changes from run to run; PNG packed as tightly as it goes."""
    file.parent.mkdir(exist_ok=True)
    colour_bars(figure)
    if file.suffix == ".svg":
        figure.savefig(file, metadata={"Date": None})
    else:
        buffer = BytesIO()
        figure.savefig(buffer, dpi=150, format="png")
        Image.open(buffer).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)
    plt.close(figure)


def main(names: Sequence[str], weights: Path | None) -> None:
    """Draw the figures of these names, or all."""
    trained = Trained(weights)
    with mpl.rc_context(STYLE):
        for name, draw in FIGURES.items():
            if not names or name in names:
                figure = draw(trained)
                stamp(name, of_networks(NETWORKS[name]) if name in NETWORKS else numbers(figure))
                save(figure, IMAGES / name)
                print(f"{IMAGES / name}: {(IMAGES / name).stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*FIGURES, []], help="files; all if none is given")
    parser.add_argument("--weights", type=Path, help="folder that keeps the trained networks")
    arguments = parser.parse_args()
    main(arguments.names, arguments.weights)
