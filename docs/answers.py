"""The pictures of what trained networks predict: `python docs/predictions.py FOLDER [NAME ...]`.

FOLDER has the run folders of the commands in `RUNS`, by name. A missing one is an error that shows its command.
"""

import argparse
import tomllib
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from figures import IMAGES, STYLE, bare, label, save, signed
from matplotlib.figure import Figure
from stamps import digest, stamp

from tokenmix.lab.compare.report import make_examples
from tokenmix.lab.inspect import toeplitz_share
from tokenmix.lab.train.load import load_task

RECIPES = IMAGES.parents[1] / "recipes"
RUNS = {
    "climates": "tokenmix compare --config compare_climates --seeds 0",
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


def climates(runs: Path) -> Figure:
    """A column for each of the first three test tiles of Blue Marble: the tile, the truth, three predictions."""
    names = {"none": "none", "self-attention": "self", "external attention": "external-S8"}
    tasks = {title: load_task(folder(runs, "climates") / "runs" / f"{name}-seed0") for title, name in names.items()}
    first = next(iter(tasks.values()))
    found = make_examples(tasks, type(first).load_data(first.config, like=first.data), 3)
    rows = {"image": [one.input for one in found], "truth": [one.truth for one in found]}
    rows |= {title: [one.predictions[title] for one in found] for title in names}
    figure, axes = plt.subplots(len(rows), 3, figsize=(3.7, 4.9), layout="constrained")
    for line, (title, pictures) in zip(axes, rows.items(), strict=True):
        for place, picture in zip(line, pictures, strict=True):
            place.imshow(picture, interpolation="nearest")
            bare(place)
        label(line[0], title.replace(" ", "\n"))
    colours = {name: colour for one in found for name, colour in one.legend.items()}
    patches = [mpl.patches.Patch(facecolor=c, edgecolor="#777777", linewidth=0.5, label=n) for n, c in colours.items()]
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


PICTURES: dict[str, tuple[Callable[[Path], Figure], list[str]]] = {
    "segmentation_answers.png": (climates, ["climates"]),
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
