"""Offset attention against external attention on LDraw's bricks: classes and parts, equal budget, three seeds.

    python -m recipes.points.points_nano [--out runs/points] [--seeds 0,1,2] [--quick]

Accuracy and part IoU on moulds that were not trained on, time and peak memory of one attention layer from 1,024 to
65,536 points. The same command goes on where it was stopped. Writes recipes/points/points_nano.json and .md, and
docs/images/points_parts.png and points_cost.png.
"""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from recipes.over_seeds import commits, over_seeds, read_result, shown
from recipes.program import run_program
from recipes.small_pictures import save_small
from tokenmix.environment import environment
from tokenmix.lab.tasks.points.data import CloudSamples, load_points
from tokenmix.lab.tasks.points.output import scatter
from tokenmix.lab.train.config import Numbers
from tokenmix.lab.train.finish import finish_run
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.sources import make_config
from tokenmix.layers import create_mixer
from tokenmix.profiling.memory import peak_memory

HERE = Path(__file__).parent
IMAGES = HERE.parents[1] / "docs" / "images"
SHARED: dict[str, Any] = {
    "data": "ldraw",
    "batch_size": 16,
    "weight_decay": 0.01,
    "model_kwargs": {"drop_rate": 0.1},
    "threads": 1,
    "device": "cpu",
    # Nothing is chosen by epoch, so nothing is held out.
    "validation": 0,
}
CLOUDS: dict[str, Any] = {"num_points": 384, "scale": 1.25, "shift": 0.1}
TASKS: dict[str, dict[str, Any]] = {
    "point-classification": {
        "epochs": 28,
        "lr": 1.5e-3,
        "options": {"smoothing": 0.0},
        "metric": "accuracy",
        "also": ("balanced_accuracy",),
        "models": {"offset": "pct_cls_nano", "external": "eapct_cls_nano"},
    },
    "point-segmentation": {
        "epochs": 4,
        "lr": 2e-3,
        "metric": "part_miou",
        "also": ("instance_miou", "category_miou"),
        "models": {"offset": "pct_part_nano", "external": "eapct_part_nano"},
    },
}
# The baseline to be beaten.
BASES = {"point-classification": 0.54, "point-segmentation": 0.34}
SIZES, DIM, MOST = (1024, 4096, 16384, 65536), 64, 8192
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "offset, whole map": ("offset", {}),
    "offset, chunks of 256": ("offset", {"chunk_size": 256}),
    "external": ("external", {"output_projection": False}),
}


@dataclass(frozen=True)
class Args:
    """Train what is not yet trained, then write the tables and pictures."""

    out: Path = Path("runs/points")
    """Folder of the run folders."""
    seeds: Numbers = (0, 1, 2)
    """Seeds, separated by commas."""
    quick: bool = False
    """A few steps of everything, to see that it runs; nothing is written beside the runs."""


def one_run(args: Args, task: str, mixer: str, seed: int) -> dict[str, Any]:
    """The result of one run, trained now, or to its end, if need be."""
    plan, folder = TASKS[task], args.out / f"{task}-{mixer}-{seed}"
    short: dict[str, Any] = {"max_steps": 3, "limit_eval": 32} if args.quick else {}
    finish_run(
        make_config(
            task=task,
            model=plan["models"][mixer],
            seed=seed,
            out=folder,
            epochs=plan["epochs"],
            lr=plan["lr"],
            **CLOUDS,
            **plan.get("options", {}),
            **SHARED,
            **short,
        ),
        quiet=True,
    )
    result = read_result(folder)
    print(task, mixer, seed, f"{result['final'][plan['metric']]:.4f}", f"{result['seconds']:.0f} s", flush=True)
    return result


def summarise(task: str, mixer: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and spread over seeds after the last epoch, and what the model costs."""
    names = (TASKS[task]["metric"], *TASKS[task]["also"])
    return {
        "task": task,
        "mixer": mixer,
        "metrics": {name: over_seeds([result["final"][name] for result in results]) for name in names},
        "parameters": results[0]["parameters"],
        "macs": results[0]["macs"],
        "clouds": results[0]["clouds"],
        "commits": commits(results),
    }


def cost(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Time and peak memory of a forward pass of one layer, batch 1; the whole map only up to `MOST` points."""
    rows = []
    for label, (mixer, kwargs) in LAYERS.items():
        layer = create_mixer(mixer, DIM, **kwargs).eval()
        for size in sizes:
            if label == "offset, whole map" and size > MOST:
                rows.append({"layer": label, "points": size, "map_bytes": 4 * size**2})
                continue
            x = torch.randn(1, size, DIM)
            with torch.no_grad():
                memory = peak_memory(lambda layer=layer, x=x: layer(x))
                times = [_seconds(layer, x) for _ in range(3 if size < 20_000 else 1)]
            row = {"layer": label, "points": size, "seconds": statistics.median(times), "peak_bytes": int(memory)}
            print(row, flush=True)
            rows.append({**row, "macs": layer.macs(size)})
    return rows


def _seconds(layer: torch.nn.Module, x: torch.Tensor) -> float:
    start = time.perf_counter()
    layer(x)
    return time.perf_counter() - start


def draw_cost(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Time and memory against the number of points."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, key, name in zip(figure.subplots(1, 2), ("seconds", "peak_bytes"), ("seconds", "peak memory, bytes")):
        for label in LAYERS:
            found = [(row["points"], row[key]) for row in rows if row["layer"] == label and key in row]
            axis.loglog(*zip(*found), "o-", label=label)
        axis.set(xlabel="points", ylabel=name)
    figure.axes[0].legend(frameon=False)
    save_small(figure, file, dpi=90)


def draw_parts(folders: Mapping[str, Path], file: Path) -> None:
    """Clouds of the test side: true parts, and those that each model answers."""
    data = load_points("ldraw", want="parts")
    tasks = {name: load_task(folder)[0] for name, folder in folders.items()}
    shown = torch.arange(0, len(data.test), max(1, len(data.test) // 6))[:6]
    features = next(iter(tasks.values())).data["features"]
    batch = CloudSamples(data.test, want="parts", features=features, num_points=2048).read(shown, 0)
    figure = Figure(figsize=(2.1 * len(shown), 2.2 * (1 + len(tasks))), layout="constrained")
    axes = figure.subplots(1 + len(tasks), len(shown), subplot_kw={"projection": "3d"})
    answers = {"true": batch["part"]}
    for name, task in tasks.items():
        model: Any = task.model
        with torch.no_grad():
            answers[name] = model(batch["points"], batch["label"], batch["mask"]).argmax(-1)
    for row, (name, parts) in zip(axes, answers.items()):
        for axis, points, part, mask in zip(row, batch["points"], parts, batch["mask"]):
            scatter(axis, points[mask, :3], part[mask])
        row[0].set_title(name, loc="left")
    save_small(figure, file, dpi=90)


def markdown(rows: Sequence[Mapping[str, Any]], costs: Sequence[Mapping[str, Any]], command: str) -> str:
    """The findings as tables."""
    lines = [
        f"Made by `{command}` on {environment()['cpu']}, one thread; after the last epoch, mean ± sample standard",
        "deviation over the seeds, on moulds that were not trained on. Both mixers see the same clouds in order. "
        f"Bases: classes {BASES['point-classification']}, parts (`part_miou`) {BASES['point-segmentation']}.",
        "",
        "| task | mixer | result | parameters | MACs / cloud | clouds seen |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in rows:
        told = ", ".join(f"`{name}` {shown(value, 4)}" for name, value in row["metrics"].items())
        lines.append(
            f"| {row['task']} | {row['mixer']} | {told} | {row['parameters']:,} | {row['macs'] / 1e6:.1f} M "
            f"| {row['clouds']:,} |"
        )
    lines += [
        "",
        f"One layer, width {DIM}, one cloud, forward.",
        "",
        "| layer | points | ms | peak, MB |",
        "|---|---:|---:|---:|",
    ]
    for row in costs:
        times = (
            f"{row['seconds'] * 1e3:.1f} | {row['peak_bytes'] / 1e6:.1f}"
            if "seconds" in row
            else (f"not run | a map alone is {row['map_bytes'] / 1e6:,.0f}")
        )
        lines.append(f"| {row['layer']} | {row['points']:,} | {times} |")
    return "\n".join(lines) + "\n"


def main(args: Args) -> None:
    """Run, then write."""
    rows = [
        summarise(task, mixer, [one_run(args, task, mixer, seed) for seed in args.seeds])
        for task in TASKS
        for mixer in TASKS[task]["models"]
    ]
    torch.set_num_threads(1)
    costs = cost(SIZES[:2] if args.quick else SIZES)
    images = args.out if args.quick else IMAGES
    draw_cost(costs, images / "points_cost.png")
    runs = {mixer: args.out / f"point-segmentation-{mixer}-{args.seeds[0]}" for mixer in ("offset", "external")}
    draw_parts(runs, images / "points_parts.png")
    command = f"python -m recipes.points.points_nano --seeds {','.join(map(str, args.seeds))}{' --quick' * args.quick}"
    print(markdown(rows, costs, command))
    if not args.quick:
        kept = {"command": command, "environment": environment(), "shared": SHARED, "tasks": TASKS, "rows": rows}
        (HERE / "points_nano.json").write_text(json.dumps({**kept, "bases": BASES, "cost": costs}, indent=1) + "\n")
        (HERE / "points_nano.md").write_text(markdown(rows, costs, command))


if __name__ == "__main__":
    run_program(main, Args)
