"""Mixers in one skeleton, trained towards their plateau: on Fashion-MNIST, with ablations, and on drawings of emoji.

    python -m recipes.classification.plateau [--part families|ablations|emoji] [--jobs 2] [--hours 3]

Learning rates are chosen for each family on validation images, from runs of a fifth of the budget. Then every family
is trained with three seeds on equal images; on Fashion-MNIST also on as many images as self-attention's multiply-adds
pay for, and on as many as its time pays for. The test images are evaluated once per run. Finished runs are kept, so the
same command goes on where it stopped. Writes plateau.json and .md next to it, and docs/images/plateau.png.
"""

import csv
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from recipes.cells import Cell, Runner, read_cell
from recipes.over_seeds import over_seeds, shown
from recipes.program import run_program
from recipes.small_pictures import save_small
from tokenmix.environment import environment
from tokenmix.files import write_json
from tokenmix.lab.compare.compare import predict_steps
from tokenmix.lab.inspect.maps import map_numbers
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.config import CompareConfig, Numbers
from tokenmix.lab.train.load import load_run

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs" / "images" / "plateau.png"
VARIANTS = "recipes.classification.variants"
# 16 tokens of 7 x 7 pixels: a third of the time of 49 tokens of 4 x 4, so that three times as many images are seen.
NET: dict[str, Any] = {"stem": "patch", "patch_size": 7, "embed_dim": 64, "depth": 4}
SHARED: dict[str, Any] = {
    "data": "fashion-mnist",
    "model": "mixer_nano",
    "batch_size": 128,
    "validation": 5000,
    "threads": 1,
    "device": "cpu",
    "log_every": 1000,
    "checkpoint_every": 1000,
    # Mirrored and shifted, self-attention has 0.825 after four epochs; as they are, 0.872 (dev/LOG.md).
    "augment": "none",
}
# 3,008 training pictures, 64 tokens; after 45 epochs self-attention's validation loss falls no further.
EMOJI = {**SHARED, "data": "emoji", "img_size": 32, "augment": "light", "batch_size": 64, "validation": 300}
EMOJI_NET = {**NET, "patch_size": 4}
# Multi-head external attention last, as in the ablations.
FAMILIES = ("self", "external", "gating", "gating-attention", "less", "multihead-external")
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
EPOCHS, TUNING, ABLATION = 15, 3, 4
EMOJI_EPOCHS, EMOJI_TUNING = 60, 12
LESS = {"mixer": "less"}
# What is changed, by the family whose learning rate it takes; what an ablation is compared with stands first.
ABLATIONS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "normalisation": {
        "double": ("external", {"mixer": "external"}),
        "softmax over slots": ("external", {"mixer": "external-softmax"}),
        "none": ("external", {"mixer": f"{VARIANTS}:Unnormalized"}),
        "three Sinkhorn steps": ("external", {"mixer": "external", "mixer_kwargs": {"num_steps": 3}}),
        "self, softmax": ("self", {"mixer": "self"}),
        "self, double": ("self", {"mixer": "self-double"}),
    },
    "slots": {
        "S 64": ("external", {"mixer": "external"}),
        **{
            f"S {slots}": ("external", {"mixer": "external", "mixer_kwargs": {"num_slots": slots}})
            for slots in (8, 32, 256)
        },
    },
    # Without halves to multiply, 1.5 times the width has the parameters that the split gate has with twice the width.
    "gate": {
        "split": ("gating", {"mixer": "gating"}),
        **{
            name: ("gating", {"mixer": "gating", "mixer_kwargs": {"variant": name, "expansion": 1.5}})
            for name in ("multiplicative", "additive", "linear")
        },
    },
    "gate's start": {
        "near identity": ("gating", {"mixer": "gating"}),
        "as a linear layer": ("gating", {"mixer": f"{VARIANTS}:LinearStart"}),
    },
    "less-attention's loss": {
        "without": ("less", LESS),
        "with": ("less", {**LESS, "diagonality": 0.1}),
    },
    # Four stages: another network, and fewer images.
    "attention residual": {
        name: ("less", {"model": "lavit_nano", "residuals": residuals, "epochs": 5, "limit": 12_000})
        for name, residuals in (("with", (True, True, True)), ("without", (False, False, False)))
    },
    "depth": {"self, 8 blocks": ("self", {"mixer": "self", "depth": 8})},
    "simplified": {"simplified": ("self", {"mixer": "simplified"})},
    # 8 D^2 weights in a block of either.
    "sizes": {
        f"{name}, width {width}": (family, {**kwargs, "embed_dim": width})
        for width in (24, 48, 96)
        for name, family, kwargs in (
            ("self", "self", {"mixer": "self"}),
            ("gMLP", "gating", {"model": "gmlp_nano", "expansion": 16 / 3}),
        )
    },
    # Last, since multi-head external attention takes four times as long.
    "heads": {
        "4 heads": ("multihead-external", {"mixer": "multihead-external"}),
        "1 head": ("multihead-external", {"mixer": "multihead-external", "num_heads": 1}),
        "8 heads": ("multihead-external", {"mixer": "multihead-external", "num_heads": 8}),
    },
    "memories": {
        "shared by heads": ("multihead-external", {"mixer": "multihead-external"}),
        "one for each head": ("multihead-external", {"mixer": f"{VARIANTS}:HeadMemories"}),
    },
    "norm": {
        "LayerNorm": ("multihead-external", {"mixer": "multihead-external"}),
        "BatchNorm": ("multihead-external", {"mixer": "multihead-external", "norm": "batch"}),
    },
}
# Of the settings above, those that are no arguments of the model.
OPTIONS = ("model", "epochs", "limit", "diagonality")
MAPS = ("depth", "simplified")
FILE_NAME = str.maketrans(" ", "_", ",")


@dataclass(frozen=True)
class Args:
    """Train what is not yet trained, then write the tables."""

    out: Path = Path("runs/plateau")
    """Folder of the run folders."""
    part: Literal["families", "ablations", "emoji"] = "families"
    """families, ablations, whose learning rates are the families', or the families on emoji."""
    seeds: Numbers = (0, 1, 2)
    """Seeds, separated by commas."""
    jobs: int = 1
    """Runs at a time, of one thread each; 0 for one after the other in this process."""
    hours: float = math.inf
    """Stop after this time; the same command goes on."""
    quick: bool = False
    """Four steps of a few cells on scikit-learn's digits, to see that it runs; nothing is written beside the runs."""


class Plateau:
    """The experiment: which cells there are, and what is made of their results."""

    def __init__(self, args: Args) -> None:
        self.args = args
        kept = args.out if args.quick else HERE
        self.runner = Runner(
            args.out, args.jobs, time.monotonic() + args.hours * 3600, kept / "plateau_cells.json", read_run
        )
        self.net, self.shared, self.rates, self.families = NET, SHARED, RATES, FAMILIES
        self.ablations = ABLATIONS
        self.prefix, self.epochs, self.tuning = "", EPOCHS, TUNING
        if args.part == "emoji":
            self.net, self.shared = EMOJI_NET, EMOJI
            self.prefix, self.epochs, self.tuning = "emoji-", EMOJI_EPOCHS, EMOJI_TUNING
        if args.quick:
            self.net = {"patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2}
            self.shared = {
                **SHARED,
                "data": "digits",
                "limit": 64,
                "limit_eval": 32,
                "validation": 16,
                "batch_size": 16,
            }
            self.rates, self.families = RATES[:2], ("self", "gating")
            self.ablations = {"gate's start": ABLATIONS["gate's start"], "depth": ABLATIONS["depth"]}

    def cell(self, name: str, kwargs: Mapping[str, Any], **settings: Any) -> Cell:
        """A run of the skeleton with these arguments; `settings` are options."""
        options = {key: value for key, value in kwargs.items() if key in OPTIONS}
        arguments = {key: value for key, value in kwargs.items() if key not in OPTIONS}
        skeleton = self.net if options.get("model", "mixer_nano") != "lavit_nano" else {}
        if options.get("model") == "gmlp_nano":
            skeleton = {key: value for key, value in skeleton.items() if key != "num_heads"}
        settings = {**self.shared, **settings, **options, "model_kwargs": {**skeleton, **arguments}}
        if self.args.quick:
            settings |= {"epochs": 1}
        return Cell(name, settings)

    def over_seeds(self, name: str, kwargs: Mapping[str, Any], **settings: Any) -> list[Cell]:
        """One cell for each seed."""
        return [self.cell(f"{name}-{seed}", kwargs, seed=seed, **settings) for seed in self.args.seeds]

    def tuned(self) -> dict[str, dict[str, Any]]:
        """For each family the validation accuracy of each learning rate, and the best rate."""
        cells = {
            (family, rate): self.cell(
                f"{self.prefix}tune-{family}-{rate:g}", {"mixer": family}, lr=rate, epochs=self.tuning, seed=0
            )
            for family in self.families
            for rate in self.rates
        }
        results = self.runner.results(list(cells.values()))
        found: dict[str, dict[str, Any]] = {}
        for family in self.families:
            names = {rate: cells[family, rate].name for rate in self.rates}
            # A learning rate is chosen once all are there, so that later runs cannot change it.
            if not all(name in results for name in names.values()):
                continue
            scores = {rate: results[name]["validation_final"]["accuracy"] for rate, name in names.items()}
            found[family] = {"validation": scores, "lr": max(scores, key=scores.__getitem__)}
        return found

    def steps(self, cost: Mapping[str, float]) -> dict[str, int]:
        """Optimiser steps of each family that cost as much as self-attention's."""
        per_epoch = 1 if self.args.quick else 55_000 // SHARED["batch_size"]
        return {family: round(EPOCHS * per_epoch * cost["self"] / cost[family]) for family in self.families}

    def timing(self) -> dict[str, Any]:
        """Seconds of a training step of each family, in turns; measured once, so that another machine can go on."""
        file = self.runner.kept.with_name("plateau_seconds.json")  # type: ignore[union-attr]
        if not file.exists():
            config = CompareConfig().replace(
                mixers=self.families,
                model_kwargs=self.net,
                data=self.shared["data"],
                device="cpu",
                limit=1000,
                batch_size=self.shared["batch_size"],
            )
            write_json(file, {"cpu": environment()["cpu"], "seconds": predict_steps(config, (1,))[1]})
        return json.loads(file.read_text())

    def equal_images(
        self, rates: Mapping[str, Mapping[str, Any]], step_seconds: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """The families that have a learning rate, on equal images."""
        cells = {
            f: self.over_seeds(f"{self.prefix}images-{f}", {"mixer": f}, lr=row["lr"], epochs=self.epochs)
            for f, row in rates.items()
        }
        return self.rows(cells, step_seconds)

    def all_families(self, rates: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The families on equal images, at equal multiply-adds, and at equal time."""
        step_seconds = self.timing()["seconds"]
        found: dict[str, Any] = {"equal images": self.equal_images(rates, step_seconds)}
        costs = {f: row["macs"] for f, row in found["equal images"].items()}
        for kind, cost in (("equal multiply-adds", costs), ("equal time", step_seconds)):
            if "self" not in costs:
                break
            steps = self.steps({f: cost[f] for f in costs})
            cells = {
                f: self.over_seeds(
                    f"{kind.split()[1]}-{f}",
                    {"mixer": f},
                    lr=rates[f]["lr"],
                    max_steps=steps[f],
                    epochs=math.ceil(steps[f] * EPOCHS / steps["self"]),
                )
                for f in costs
                if f != "self"
            }
            found[kind] = {"self": found["equal images"]["self"], **self.rows(cells, step_seconds)}
        return found

    def all_ablations(self, rates: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Every ablation, in the order of the table."""
        found = {}
        for name, rows in self.ablations.items():
            cells = {
                label: self.over_seeds(
                    # A family as it is is the baseline of several ablations, and is trained once.
                    f"base-{family}" if kwargs == {"mixer": family} else f"{name}-{label}".translate(FILE_NAME),
                    kwargs,
                    epochs=ABLATION,
                    lr=rates[family]["lr"],
                )
                for label, (family, kwargs) in rows.items()
                if family in rates
            }
            found[name] = self.rows(cells)
        return {name: rows for name, rows in found.items() if rows}

    def rows(
        self, cells: Mapping[str, Sequence[Cell]], step_seconds: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """The rows of plateau.json: of each group of cells what its seeds found, once all of them are there.

        Seconds are the steps times the time of one, so that what else ran on the machine does not count.
        """
        results = self.runner.results([cell for group in cells.values() for cell in group])
        found = {}
        for label, group in cells.items():
            made = [results[cell.name] for cell in group if cell.name in results]
            if len(made) < len(group):
                continue
            row = {
                **over_seeds([one["final"]["accuracy"] for one in made]),
                "validation": [one["validation_final"]["accuracy"] for one in made],
                "parameters": made[0]["parameters"],
                "macs": made[0]["macs"],
                "images": made[0]["images"],
                "curves": [dict(one["curve"]) for one in made],
                "commits": sorted({one["commit"] for one in made}),
            }
            if step_seconds is not None:
                second = step_seconds[label] / SHARED["batch_size"]
                row["seconds"] = row["images"] * second
                for one in row["curves"]:
                    one["seconds"] = [float(f"{images * second:.6g}") for images in one["images"]]
            if "maps" in made[0]:
                row["maps"] = [one["maps"] for one in made]
            found[label] = row
        return found


def read_run(folder: Path) -> dict[str, Any]:
    """What is kept of a cell: its result, its curve and, where the ledger asks for them, the numbers of its maps."""
    maps = {"maps": maps_of(folder)} if folder.name.split("-")[0] in MAPS else {}
    return {**read_cell(folder), "curve": curve(folder), **maps}


def curve(folder: Path) -> dict[str, list[float]]:
    """Validation accuracy over the images seen."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val_accuracy")]
    columns = {"images": "images", "accuracy": "val_accuracy"}
    return {name: [round(float(row[column]), 4) for row in rows] for name, column in columns.items()}


def maps_of(folder: Path) -> list[dict[str, Any]]:
    """The numbers of each block's map on validation images."""
    model, config, description = load_run(folder)
    data = get_task(config.task).load_data(config, like=description)
    batch = next(iter(data.validation_batches(batch_size=min(256, data.num_validation))))
    with torch.no_grad():
        return [numbers.to_json() for numbers in map_numbers(model.attention_maps(batch["image"]))]  # type: ignore[operator]


def crossing(row: Mapping[str, Any], other: Mapping[str, Any], over: str) -> float | None:
    """Where the mean curve of `row` stays above that of `other`: images, or seconds. None if it does not at the end."""
    mean = [_mean_curve(each, over) for each in (row, other)]
    end = min(xs[-1] for xs, _ in mean)
    last = None
    for place in [end * step / 200 for step in range(200, 0, -1)]:
        if _at(*mean[0], place) <= _at(*mean[1], place):
            break
        last = place
    return last


def _mean_curve(row: Mapping[str, Any], over: str) -> tuple[list[float], list[float]]:
    curves = row["curves"]
    return tuple([sum(v) / len(v) for v in zip(*(one[name] for one in curves))] for name in (over, "accuracy"))  # type: ignore[return-value]


def _at(xs: Sequence[float], ys: Sequence[float], place: float) -> float:
    """The curve at a place, straight between its points, from 0.1, chance, at 0."""
    points = [(0.0, 0.1), *zip(xs, ys)]
    for (x0, y0), (x1, y1) in pairwise(points):
        if place <= x1:
            return y0 + (y1 - y0) * (place - x0) / (x1 - x0)
    return points[-1][1]


def draw(families: Mapping[str, Any], file: Path) -> None:
    """Mean validation accuracy of each family over images and over seconds."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axis, over in zip(figure.subplots(1, 2), ("images", "seconds")):
        for family, row in families["equal images"].items():
            axis.plot(*_mean_curve(row, over), label=family)
        axis.set(xlabel={"images": "training images seen", "seconds": "seconds of training"}[over], ylim=(0.8, None))
        axis.xaxis.set_major_formatter(EngFormatter())
        axis.set_ylabel("validation accuracy")
    figure.axes[0].legend(frameon=False, fontsize=8)
    save_small(figure, file, colors=128)


def markdown(found: Mapping[str, Any], command: str) -> str:
    """The tables of all that is there."""
    lines = [
        f"Made by `{command}`; accuracy on the 10,000 test",
        "images after the last epoch, mean ± sample standard deviation over the seeds. Learning rates were chosen on",
        "5,000 validation images. Rows appear once all their seeds are trained.",
    ]
    if "timed_on" in found:
        lines += [
            "Seconds are the steps times the time of a step, of all in turns on one thread of",
            f"{found['timed_on']}.",
        ]
    lines += _rates("validation accuracy", found.get("rates", {}))
    for kind, rows in found.get("families", {}).items():
        lines += _table(kind, rows)
    own = found.get("families", {}).get("equal images", {})
    if "self" in own and len(own) > 1:
        lines += ["", "Where the mean validation curve of a mixer stays above self-attention's, on equal images:", ""]
        lines += ["| | images | seconds |", "|---|---:|---:|"]
        for family in own:
            if family != "self":
                places = [crossing(own[family], own["self"], over) for over in ("images", "seconds")]
                lines.append(
                    f"| {family} | " + " | ".join("never" if p is None else f"{p:,.0f}" for p in places) + " |"
                )
    for name, rows in found.get("ablations", {}).items():
        lines += _table(f"ablation: {name}", rows)
    if "emoji" in found:
        lines += ["", f"Made by `{found['emoji']['command']}`:"]
        lines += [
            "emoji, 752 test pictures of concepts that no training picture shows; 300 of the training pictures are"
        ]
        lines += ["the validation pictures, which may show the concepts of the others."]
        lines += _rates("emoji, validation accuracy", found["emoji"]["rates"])
        lines += _table("emoji, equal images", found["emoji"]["equal images"])
    return "\n".join(lines) + "\n"


def _rates(title: str, families: Mapping[str, Any]) -> list[str]:
    """The validation accuracy of each learning rate."""
    if not families:
        return []
    rates = next(iter(families.values()))["validation"]
    return [
        "",
        f"| {title} | " + " | ".join(f"lr {float(rate):g}" for rate in rates) + " | chosen |",
        "|---|" + "---:|" * (len(rates) + 1),
        *(
            f"| {family} | "
            + " | ".join(f"{score:.4f}" for score in row["validation"].values())
            + f" | {row['lr']:g} |"
            for family, row in families.items()
        ),
    ]


def _table(title: str, rows: Mapping[str, Any]) -> list[str]:
    timed = any("seconds" in row for row in rows.values())
    heads = [title, "accuracy", "parameters", "MACs / image", "images seen", *["seconds"] * timed]
    return [
        "",
        f"| {' | '.join(heads)} |",
        "|---|" + "---:|" * (len(heads) - 1),
        *(
            f"| {label} | {shown(row, 4)} | {row['parameters']:,} | {row['macs'] / 1e6:.2f} M | {row['images']:,} |"
            + (f" {row['seconds']:.0f} |" if timed else "")
            for label, row in rows.items()
        ),
    ]


def main(args: Args) -> bool:
    """Run, then write; False if the time was over first."""
    plateau = Plateau(args)
    home = args.out if args.quick else HERE
    file = home / "plateau.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    rates = plateau.tuned()
    command = f"python -m recipes.classification.plateau --part {args.part} --seeds {','.join(map(str, args.seeds))}"
    about = {
        "command": command,
        "environment": environment(),
        "net": plateau.net,
        "shared": plateau.shared,
        "epochs": {"families": plateau.epochs, "tuning": plateau.tuning},
        "rates": rates,
    }
    if args.part == "emoji":
        found["emoji"] = {**about, "equal images": plateau.equal_images(rates)}
    elif args.part == "ablations":
        found |= {**about, "ablation_epochs": ABLATION, "ablations": plateau.all_ablations(rates)}
    else:
        found |= {**about, "families": plateau.all_families(rates), "timed_on": plateau.timing()["cpu"]}
    if not plateau.runner.complete:
        print("the time is over; the same command continues", flush=True)
    found = json.loads(json.dumps(found))
    write_json(file, found)
    (home / "plateau.md").write_text(markdown(found, found.get("command", command)))
    if "families" in found:
        draw(found["families"], args.out / "plateau.png" if args.quick else PICTURE)
    return plateau.runner.complete


if __name__ == "__main__":
    run_program(main, Args)
