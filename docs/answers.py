"""The pictures of what trained networks predict: `python docs/answers.py FOLDER [NAME ...]`.

FOLDER has the run folders of the commands in `RUNS`, by name. A missing one is an error that shows its command.
"""

import argparse
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from figures import IMAGES, STYLE, bare, label, save, signed
from matplotlib.figure import Figure
from PIL import Image
from stamps import digest, stamp

from tokenmix.lab.compare.report import make_examples
from tokenmix.lab.inspect import toeplitz_share
from tokenmix.lab.train.load import load_task

RECIPES = IMAGES.parents[1] / "recipes"
GANS = {"none": "resnet_gan", "SAGAN": "sagan", "external attention": "eagan"}
GAN = (
    "tokenmix train image-generation --data fashion-mnist --img-size 32 --limit 12800 --limit-eval 500 --batch-size 32"
    " --epochs 4 --lr-g 5e-4 --lr-d 1e-3 --ema 0.995 --precision bf16-mixed --model"
)
RUNS = {
    "climates": "tokenmix compare --config compare_climates --data blue-marble:450-1 --seeds 0",
    "trees": "tokenmix compare --config compare_trees --seeds 0 --mixers external",
    "parts": "tokenmix compare --config compare_parts --seeds 0",
    **{f"gan-{name}": f"{GAN} {name}_nano" for name in GANS.values()},
    "gates": "tokenmix train masked-lm --data english --model gmlp_text_nano --seq-len 64"
    " --model-kwargs gate=dense initializer_range=0.08 --batch-size 32 --epochs 100 --max-steps 1200"
    " --warmup-steps 100 --limit-eval 2000 --lr 5e-3 --opt-eps 1e-6 --min-lr 0 --schedule linear"
    " --weight-decay 0.01 --precision bf16-mixed",
}
"""Name of a folder -> the command that makes it, without its `--out`."""


def folder(runs: Path, name: str) -> Path:
    """The folder of one command of `RUNS`."""
    if not (runs / name).is_dir():
        raise SystemExit(f"no {runs / name}; make it by: {RUNS[name]} --out {runs / name}")
    return runs / name


def answers(runs: Path, comparison: str, names: Mapping[str, str], number: int = 3, side: float = 1.1) -> Figure:
    """A column for each of some test samples: the sample, the truth, and the predictions of runs with seed 0.

    Pictures are `side` inches wide.
    """
    tasks = {title: load_task(folder(runs, comparison) / "runs" / f"{name}-seed0") for title, name in names.items()}
    first = next(iter(tasks.values()))
    found = make_examples(tasks, type(first).load_data(first.config, like=first.data), number)
    rows = {"sample": [one.input for one in found], "truth": [one.truth for one in found]}
    rows |= {title: [one.predictions[title] for one in found] for title in names}
    rows = {title: pictures for title, pictures in rows.items() if pictures[0] is not None}
    size = (1 + side * number, side * len(rows))
    figure, axes = plt.subplots(len(rows), number, squeeze=False, figsize=size, layout="constrained")
    for line, (title, pictures) in zip(axes, rows.items(), strict=True):
        for place, picture in zip(line, pictures, strict=True):
            place.imshow(picture, interpolation="antialiased")
            bare(place)
        label(line[0], title.replace(" ", "\n"))
    colours = {name: colour for one in found for name, colour in one.legend.items()}
    patches = [mpl.patches.Patch(facecolor=c, edgecolor="#777777", linewidth=0.5, label=n) for n, c in colours.items()]
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=7, columnspacing=1)
    return figure


def gates(runs: Path) -> Figure:
    """The trained dense gates of a text model, with the share of their variance on diagonals."""
    model = load_task(folder(runs, "gates")).model
    found = [layer.mixer.gating.weight.detach() for layer in model.base_model.layers]
    figure, places = plt.subplots(2, -(-len(found) // 2), figsize=(6.4, 4.4), layout="constrained")
    for i, (place, weight) in enumerate(zip(places.flat, found, strict=True)):
        signed(place, weight)
        place.set_title(f"block {i}: {toeplitz_share(weight):.2f}")
    return figure


def garments(runs: Path) -> Figure:
    """The last samples of three GANs, three of each class."""
    figure, places = plt.subplots(1, len(GANS), figsize=(3.6, 2.8), layout="constrained")
    for place, (title, name) in zip(places, GANS.items(), strict=True):
        grid = Image.open(max((folder(runs, f"gan-{name}") / "samples").glob("step-*.png")))
        place.imshow(grid.crop((0, 0, 3 * 34 + 2, grid.height)), cmap="gray", extent=(0, 3, 10, 0))
        place.set(title=title.replace(" ", "\n"), xticks=[], yticks=[])
    classes = load_task(runs / f"gan-{name}").data["classes"]
    places[0].set_yticks([row + 0.5 for row in range(10)], classes)
    places[0].tick_params(length=0)
    return figure


HEADS = {"none": "none", "self-attention": "self", "external attention": "external-S8"}
BOXES = {"external attention": "external"}
PARTS = {"offset attention": "offset", "external attention": "external"}
PICTURES: dict[str, tuple[Callable[[Path], Figure], list[str]]] = {
    "segmentation_answers.png": (partial(answers, comparison="climates", names=HEADS), ["climates"]),
    "detection_trees.png": (partial(answers, comparison="trees", names=BOXES, number=1, side=1.8), ["trees"]),
    "points_parts.png": (partial(answers, comparison="parts", names=PARTS), ["parts"]),
    "generation_fashion_mnist.png": (garments, [f"gan-{name}" for name in GANS.values()]),
    "text_gates.png": (gates, ["gates"]),
}
"""A file of docs/images -> what draws it, and its folders."""


def of_runs(names: list[str]) -> str:
    """A digest of the commands behind these folders, and of the comparisons that they name."""
    commands = [RUNS[name] for name in names]
    files = {file.stem: tomllib.loads(file.read_text()) for file in RECIPES.rglob("compare_*.toml")}
    return digest(commands, [settings for name, settings in files.items() if f"--config {name} " in " ".join(commands)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the run folders are")
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], help="files; all if none is given")
    given = parser.parse_args()
    with mpl.rc_context(STYLE):
        for file in given.names or PICTURES:
            draw, made_by = PICTURES[file]
            save(draw(given.folder), IMAGES / file)
            stamp(file, of_runs(made_by))
            print(f"{IMAGES / file}: {(IMAGES / file).stat().st_size / 1000:.0f} kB")
