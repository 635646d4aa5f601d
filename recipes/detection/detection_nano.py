"""Detection of trees and masks of composed items: no attention, self-attention, external attention; equal budget.

    python -m recipes.detection.detection_nano [--out runs/detection] [--seeds 0,1,2]

Detection of tree crowns on photographs of places that were not trained on, and instance segmentation on composed scenes
of real items, each with the block behind the last stage of a thin ResNet-18 as `none`, `self` and `external`. Finished
runs are kept, so the same command goes on where it stopped. Writes recipes/detection/detection_nano.json and .md, and
docs/images/detection_*.png.
"""

import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from recipes.over_seeds import commits, over_seeds, read_result, shown
from recipes.program import run_program
from recipes.small_pictures import save_small
from tokenmix.environment import environment
from tokenmix.lab.registry import get_task
from tokenmix.lab.tasks.detection.output import class_color
from tokenmix.lab.tasks.detection.task import ObjectTask
from tokenmix.lab.train.config import Numbers, TrainConfig
from tokenmix.lab.train.finish import finish_run
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.plan import seed_everything
from tokenmix.lab.train.sources import make_config
from tokenmix.lab.train.trainer import validate

HERE = Path(__file__).parent
PICTURES = HERE.parents[1] / "docs" / "images"
MIXERS = ("none", "self", "external")
# Two minutes of training make no network that is sure of itself.
SHOWN = 0.25
# Of the pictures: ten classes are told apart by their colours, and photographs would take more than 100 kB.
COLORS = {"trees": 64, "composed": 256}
SHARED: dict[str, Any] = {
    "batch_size": 8,
    "lr": 2e-3,
    "clip_grad": 10.0,
    "threads": 1,
    "device": "cpu",
    "log_every": 25,
    "checkpoint_every": 100_000,
}
# Crowns, most of 25 to 50 px, are looked at at half their size, 256 px of a photograph at a time, in training as in
# testing: the network learns four times as many of them in the same time.
JOBS: dict[str, dict[str, Any]] = {
    "trees": {
        "task": "detection",
        "data": "trees",
        "model": "faster_rcnn_nano",
        "epochs": 8,
        "batch_size": 4,
        "color_jitter": 0.2,
        "crop": 256,
        "crops": 8,
        "min_size": 128,
        "max_size": 128,
        "window": 256,
        "overlap": 0.3,
        "scales": (0.8, 1.0, 1.25),
        "validation": 6,
    },
    "composed": {
        "task": "instance-segmentation",
        "data": "composed",
        "model": "mask_rcnn_nano",
        "epochs": 2,
        "limit": 1300,
        "limit_eval": 100,
        "min_size": 128,
        "max_size": 128,
    },
}
METRICS = {
    "trees": ("map", "map_50", "mar"),
    "composed": ("map", "map_50", "box_map", "box_map_50"),
}


@dataclass(frozen=True)
class Args:
    """Train what is not yet trained, then write tables and pictures."""

    out: Path = Path("runs/detection")
    """Folder of the run folders."""
    seeds: Numbers = (0, 1, 2)
    """Seeds, separated by commas."""
    quick: bool = False
    """A few steps of everything, to see that it runs; nothing is written beside the runs."""
    one: str | None = None
    """Train this run alone, a name such as trees-self-0: what the script calls for each, in a process of its own."""


def config_of(args: Args, job: str, mixer: str, seed: int) -> TrainConfig:
    """The settings of a run."""
    folder = args.out / f"{job}-{mixer}-{seed}"
    settings = {**SHARED, **JOBS[job], "model_kwargs": {"mixer": mixer}, "seed": seed, "out": folder}
    if args.quick:
        settings |= {"max_steps": 4, "epochs": 1, "limit_eval": 2, "log_every": 1}
    return make_config(**settings)


def untrained(config: TrainConfig) -> dict[str, float]:
    """What the run's first weights score."""
    kind = get_task(config.task)
    data = kind.load_data(config)
    seed_everything(config.loop.seed, 0, 0)
    description = json.loads(json.dumps(data.describe()))
    task = kind(kind.build_model(config, description), config, description)
    found = validate(task, data, config, config.loop.batch_size)
    return {name: found[name] for name in METRICS[config.data.data]}


def train_one(config: TrainConfig) -> None:
    """One run, with what its first weights score beside it."""
    assert config.loop.out is not None
    first = untrained(config)
    finish_run(config, quiet=True)
    (config.loop.out / "untrained.json").write_text(json.dumps(first) + "\n")


def one_run(args: Args, job: str, mixer: str, seed: int) -> dict[str, Any]:
    """The result of one run, trained now, in a process of its own whose memory is measured, if need be."""
    config = config_of(args, job, mixer, seed)
    folder = config.loop.out
    assert folder is not None
    if not (folder / "untrained.json").exists():
        command = [
            sys.executable,
            "-m",
            "recipes.detection.detection_nano",
            "--out",
            str(args.out),
            "--one",
            f"{job}-{mixer}-{seed}",
        ]
        subprocess.run([*command, *(["--quick"] if args.quick else [])], check=True)
    result = read_result(folder)
    result["untrained"] = json.loads((folder / "untrained.json").read_text())
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    result["curve"] = [(int(row["images"]), float(row["val_map"])) for row in rows if row["val_map"]]
    result["losses"] = [(int(row["images"]), float(row["train_loss"])) for row in rows if row["train_loss"]]
    found = {name: round(result["final"][name], 4) for name in METRICS[job]}
    print(job, mixer, seed, found, f"{result['seconds']:.0f} s", flush=True)
    return result


def summarise(job: str, mixer: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and spread over seeds of what is found after the last epoch, and what a run costs."""
    spread: dict[str, Any] = {}
    for name in METRICS[job]:
        first = statistics.mean(result["untrained"][name] for result in results)
        spread[name] = {**over_seeds([result["final"][name] for result in results]), "untrained": first}
    return {
        "job": job,
        "mixer": mixer,
        **spread,
        "parameters": results[0]["parameters"],
        "macs": results[0]["macs"],
        "images": results[0]["images"],
        "commits": commits(results),
        "peak_memory": statistics.median(result["peak_memory"]["process"] for result in results),
        "curves": [result["curve"] for result in results],
        "losses": [result["losses"] for result in results],
    }


def draw_curves(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Loss and average precision over the images seen, a line for each seed."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes: Any = figure.subplots(2, len(JOBS), squeeze=False)
    for column, job in enumerate(JOBS):
        for color, row in zip(("tab:grey", "tab:orange", "tab:blue"), [r for r in rows if r["job"] == job]):
            # What the seeds' first weights score on the average stands for each of them.
            scores = [[(0, row["map"]["untrained"]), *line] for line in row["curves"]]
            for axis, lines in zip(axes[:, column], (row["losses"], scores)):
                for i, line in enumerate(lines):
                    axis.plot(*zip(*line), color=color, alpha=0.8, label=row["mixer"] if i == 0 else None)
        axes[0, column].set(title=f"{job}: loss in training")
        axes[1, column].set(title=f"{job}: mAP, held out", xlabel="images seen", ylim=(0, None))
        axes[1, column].legend(frameon=False)
    save_small(figure, file, dpi=70)


@torch.no_grad()
def draw_scenes(args: Args, job: str, file: Path) -> None:
    """Test images with what is there and what external attention's first seed finds from a score of `SHOWN` on."""
    count = 3
    figure = Figure(figsize=(2.6 * count, 5.6), layout="constrained")
    axes: Any = figure.subplots(2, count)
    shown_labels: set[int] = set()
    task, config, description = load_task(args.out / f"{job}-external-{args.seeds[0]}")
    assert isinstance(task, ObjectTask)
    test = type(task).load_data(config, like=description).test
    for column, index in enumerate(torch.linspace(0, len(test) - 1, count).long()):
        batch = test.read(index[None], 0)
        image = batch["images"][0]
        answers = task.find([image])[0]
        found = {name: value[answers["scores"] >= SHOWN] for name, value in answers.items()}
        for row, objects, title in ((0, batch["targets"][0], "there"), (1, found, "found")):
            _show(axes[row, column], image, objects, title)
            shown_labels |= set(objects["labels"].tolist())
    names = [Patch(color=_unit(label), label=description["classes"][label]) for label in sorted(shown_labels)]
    figure.legend(handles=names, loc="outside lower center", ncols=5, frameon=False)
    save_small(figure, file, dpi=70, colors=COLORS[job])


def _unit(label: int) -> tuple[float, ...]:
    return tuple(level / 255 for level in class_color(label))


def _show(axis: Axes, image: torch.Tensor, objects: Mapping[str, torch.Tensor], title: str) -> None:
    """An image with a box around each object, and its mask over it."""
    axis.imshow(image.permute(1, 2, 0).numpy())
    colors = [_unit(label) for label in objects["labels"].tolist()]
    for mask, color in zip(objects.get("masks", []), colors):
        axis.imshow(torch.cat([torch.tensor(color).expand(*mask.shape, 3), 0.5 * mask[..., None].float()], 2).numpy())
    for (left, top, right, bottom), color in zip(objects["boxes"].tolist(), colors, strict=True):
        axis.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, color=color, linewidth=1))
    axis.set(title=title, xticks=[], yticks=[])


def markdown(rows: Sequence[Mapping[str, Any]], command: str) -> str:
    """The rows as one table for each job."""
    lines = [
        f"Made by `{command}` on {environment()['cpu']}, one thread; after the last epoch, mean ± sample standard",
        "deviation over the seeds, in brackets what the first weights score. Every mixer sees the same images in the",
        "same order. Peak memory is of one run's process.",
    ]
    for job in JOBS:
        names, chosen = METRICS[job], [row for row in rows if row["job"] == job]
        lines += [
            "",
            " | ".join([f"| {job}, {JOBS[job]['model']}", *names, "parameters", "images", "peak memory |"]),
            "|---|" + "---:|" * (len(names) + 3),
            *(
                f"| {row['mixer']} | "
                + " | ".join(_shown(row[name]) for name in names)
                + f" | {row['parameters']:,} | {row['images']:,} "
                f"| {row['peak_memory'] / 2**20:,.0f} MiB |"
                for row in chosen
            ),
        ]
    return "\n".join(lines) + "\n"


def _shown(score: Mapping[str, Any]) -> str:
    return f"{shown(score, 3)} ({score['untrained']:.3f})"


def main(args: Args) -> None:
    """Run, then write."""
    if args.one is not None:
        job, mixer, seed = args.one.split("-")
        train_one(config_of(args, job, mixer, int(seed)))
        return
    rows = [
        summarise(job, mixer, [one_run(args, job, mixer, seed) for seed in args.seeds])
        for job in JOBS
        for mixer in MIXERS
    ]
    command = f"python -m recipes.detection.detection_nano --seeds {','.join(map(str, args.seeds))}"
    folder = args.out if args.quick else PICTURES
    draw_curves(rows, folder / "detection_curves.png")
    for job in JOBS:
        draw_scenes(args, job, folder / f"detection_{job}.png")
    print(markdown(rows, command))
    if not args.quick:
        kept = {"command": command, "environment": environment(), "jobs": JOBS, "shared": SHARED, "rows": rows}
        (HERE / "detection_nano.json").write_text(json.dumps(kept, indent=1, default=str) + "\n")
        (HERE / "detection_nano.md").write_text(markdown(rows, command))


if __name__ == "__main__":
    run_program(main, Args)
