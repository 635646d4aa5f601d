"""A trained self-attention network with other mixers swapped in: accuracy after so many steps, by way of training.

    python -m recipes.classification.swap_nano [--out runs/swap] [--seeds 0,1,2] [--hours 2] [--jobs 2]

Every cell starts from the same teacher, whose attention is replaced in all layers or in the last half, and sees as many
images as the others of its column. Ways of training with all labels: `fine-tuning`; `mixers first`, half of the steps
with the rest of the network frozen; `layers first`, half of the steps on the teacher's layer outputs; `distillation`,
on labels and the teacher's logits alike. Without a label: `layers`; `logits`, distillation with weight 1; `layers,
logits`, half of the steps each. With few labels: `fine-tuning`, and `layers first`, on the layer outputs of all images.

Every finished accuracy is kept in swap_nano_cells.json and the teacher's run folder in swap_teacher, both next to this
file, so that the same command continues where it stopped, on another machine and with `--hours` or `--jobs` too. Writes
swap_nano.json and .md next to it and docs/images/swap_nano.svg from what is there; `--quick` tries everything on the
digits in `--out` instead.
"""

import itertools
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from recipes.over_seeds import over_seeds, read_result, shown
from recipes.program import run_program
from tokenmix.environment import environment
from tokenmix.files import read_json, write_json
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.config import Numbers
from tokenmix.lab.train.finish import finish_run
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.sources import make_config
from tokenmix.lab.train.trainer import validate
from tokenmix.swap import swap_attention

HERE = Path(__file__).parent
FIGURE = HERE.parents[1] / "docs" / "images" / "swap_nano.svg"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and at what size.

    Attributes:
        mixers: with the arguments of each.
        layers: where they are swapped in, as globs.
        steps: optimiser steps after the swap; 0 is the swapped network as it is.
        apart: steps of the cells with few or no labels.
        few: training images of the cells with few labels.
        teacher: options of the teacher's run.
        student: options of every other run.
        least: what the teacher has to reach.
    """

    mixers: Mapping[str, Mapping[str, Any]]
    layers: Mapping[str, str]
    steps: tuple[int, ...]
    apart: tuple[int, ...]
    few: int
    teacher: Mapping[str, Any]
    student: Mapping[str, Any]
    least: float


# Nothing is chosen by the results, so that no validation images are needed.
DATA = {"data": "fashion-mnist", "augment": "none", "validation": 0}
# With four heads for each of attention's, multi-head external attention would keep none of its projections.
FULL = Plan(
    mixers={"external": {}, "multihead-external": {"expansion": 1}, "gating": {}, "less": {}},
    layers={"all": "*", "last half": "blocks.[23].*"},
    steps=(0, 50, 200, 1000, 5000),
    apart=(200, 1000),
    few=2000,
    teacher={
        **DATA,
        # A ViT of timm's, four blocks over the 49 positions that a convolution and a pooling leave. mixer_nano, whose
        # stem cuts patches, ends at 0.891 with 49 of them and 20 epochs, and at 0.895 with 16 and 30.
        "model": "vit_tiny_r_s16_p8_224",
        "model_kwargs": {
            "patch_size": 1,
            "embed_dim": 64,
            "depth": 4,
            "num_heads": 4,
            "mlp_ratio": 2.0,
            "class_token": False,
            "global_pool": "avg",
            "drop_path_rate": 0.1,
        },
        "epochs": 15,
        "batch_size": 128,
        "lr": 2e-3,
        "ema": 0.9995,
    },
    student={**DATA, "epochs": 50, "batch_size": 32, "lr": 1e-3},
    least=0.90,
)
QUICK_DATA = {**DATA, "data": "digits", "limit": 128, "limit_eval": 64, "batch_size": 16, "device": "cpu"}
QUICK = Plan(
    mixers={"external": {}, "gating": {}},
    layers={"all": "*"},
    steps=(0, 8),
    apart=(8,),
    few=64,
    teacher={
        **QUICK_DATA,
        "model": "mixer_nano",
        "model_kwargs": {"depth": 2, "embed_dim": 16},
        "epochs": 4,
        "lr": 5e-3,
    },
    student={**QUICK_DATA, "epochs": 2, "lr": 1e-3},
    least=0.0,
)
WAYS = {
    "all": ("fine-tuning", "mixers first", "layers first", "distillation"),
    "none": ("layers", "logits", "layers, logits"),
    "few": ("fine-tuning", "layers first"),
}
"""Ways of training by the labels that there are."""


@dataclass(frozen=True)
class Args:
    """Train what is not yet trained, then write the tables and the curve."""

    out: Path = Path("runs/swap")
    """Folder of the run folders."""
    seeds: Numbers = (0, 1, 2)
    """Seeds, separated by commas."""
    hours: float | None = None
    """Start no further run after this long; the same command continues."""
    jobs: int = 1
    """Cells at a time, of one thread each."""
    quick: bool = False
    """A trial of every cell at a tiny size, in less than a minute."""


@dataclass(frozen=True)
class Cell:
    """One accuracy of one seed."""

    mixer: str
    layers: str
    labels: str
    way: str
    steps: int
    seed: int

    @property
    def folder(self) -> str:
        """Its name on the disk."""
        words = (self.mixer, self.layers, self.labels, self.way.replace(",", " and"), str(self.steps), str(self.seed))
        return "-".join(word.replace(" ", "_") for word in words)


def cells(plan: Plan, seeds: Sequence[int]) -> Iterator[Cell]:
    """All of them: short ones before long ones, then by seed."""
    for steps, layers, seed, mixer in itertools.product(plan.steps, plan.layers, seeds, plan.mixers):
        # Nothing has been trained at step 0, so the ways are one.
        # Whether a frozen body pays shows within a thousand steps.
        ways = [way for way in WAYS["all"] if way != "mixers first" or steps <= 1000]
        for way in ways if steps else ways[:1]:
            yield Cell(mixer, layers, "all", way, steps, seed)
        if layers == "all" and steps in plan.apart:
            for labels in ("none", "few"):
                for way in WAYS[labels]:
                    yield Cell(mixer, "all", labels, way, steps, seed)


def stages(cell: Cell, plan: Plan, teacher: Path) -> list[dict[str, Any]]:
    """The options of the cell's runs, one after the other; only the last is evaluated on all test images."""
    layers: dict[str, Any] = {"teacher": str(teacher), "distill_from": "layers"}
    labelled: dict[str, Any] = {"limit": plan.few} if cell.labels == "few" else {}
    ways: dict[str, list[dict[str, Any]]] = {
        "fine-tuning": [labelled],
        "mixers first": [{"train_only": "mixers"}, {}],
        "layers first": [layers, labelled],
        "distillation": [{"teacher": str(teacher), "distill": 0.5, "temperature": 2.0}],
        "layers": [layers],
        "logits": [{"teacher": str(teacher), "distill": 1.0, "temperature": 2.0}],
        "layers, logits": [layers, {"teacher": str(teacher), "distill": 1.0, "temperature": 2.0}],
    }
    chosen = ways[cell.way]
    parts = [cell.steps] if len(chosen) == 1 else [cell.steps // 2, cell.steps - cell.steps // 2]
    options = [{**plan.student, **stage, "max_steps": steps, "seed": cell.seed} for stage, steps in zip(chosen, parts)]
    return [*({"limit_eval": 250, **first} for first in options[:-1]), options[-1]]


def measure(cell: Cell, plan: Plan, teacher: Path, out: Path) -> tuple[Cell, float]:
    """The accuracy on the test images after the last step, trained now, or to the end, if need be."""
    swap = {"swap": cell.mixer, "swap_where": plan.layers[cell.layers], "swap_kwargs": dict(plan.mixers[cell.mixer])}
    if cell.steps == 0:
        return cell, untrained(cell, plan, teacher, swap)
    start, runs = teacher, out / cell.folder
    for number, options in enumerate(stages(cell, plan, teacher)):
        first = swap if number == 0 else {}
        finish_run(make_config(init_from=start, out=runs / str(number), threads=1, **first, **options), quiet=True)
        start = runs / str(number)
    accuracy = read_result(start)["final"]["accuracy"]
    shutil.rmtree(runs)
    return cell, accuracy


def as_they_end(waiting: Iterator[Cell], jobs: int, *more: Any) -> Iterator[tuple[Cell, float]]:
    """What `measure` finds of the cells, that many at a time, each in a process of its own if there are several."""
    if jobs == 1:
        yield from (measure(cell, *more) for cell in waiting)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        running = {pool.submit(measure, cell, *more) for cell in itertools.islice(waiting, jobs)}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(measure, cell, *more) for cell in itertools.islice(waiting, len(ended))}
            yield from (one.result() for one in ended)


def untrained(cell: Cell, plan: Plan, teacher: Path, swap: Mapping[str, Any]) -> float:
    """Right after the swap."""
    task, config, _ = load_task(teacher)
    torch.manual_seed(cell.seed)
    swap_attention(task.model, swap["swap"], swap["swap_where"], mixer_kwargs=swap["swap_kwargs"])
    config = config.replace(**{k: v for k, v in plan.student.items() if k in ("limit", "limit_eval")})
    return validate(task, get_task(config.task).load_data(config), config, 250)["accuracy"]


def train_teacher(plan: Plan, run: Path) -> dict[str, Any]:
    """The result of the run that every cell starts from."""
    finish_run(make_config(out=run, threads=1, **plan.teacher), quiet=True)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)  # a finished run needs none
    result = read_result(run)
    if result["final"]["accuracy"] < plan.least:
        raise SystemExit(f"the teacher reaches {result['final']['accuracy']:.4f}, and {plan.least} is wanted")
    return result


def read_cells(file: Path, plan: Plan) -> dict[Cell, float]:
    """The accuracies of earlier calls; none if the plan was another."""
    kept = read_json(file) if file.exists() else {}
    if kept.get("plan") != json.loads(json.dumps(asdict(plan))):
        return {}
    return {Cell(**{k: v for k, v in row.items() if k != "accuracy"}): row["accuracy"] for row in kept["cells"]}


def write_cells(file: Path, plan: Plan, found: Mapping[Cell, float]) -> None:
    """For the next call."""
    rows = [{**asdict(cell), "accuracy": accuracy} for cell, accuracy in found.items()]
    write_json(file, {"plan": asdict(plan), "cells": rows})


def summarise(found: Mapping[Cell, float]) -> list[dict[str, Any]]:
    """Mean and spread over the seeds of each cell."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for cell, accuracy in found.items():
        groups.setdefault((cell.mixer, cell.layers, cell.labels, cell.way, cell.steps), []).append(accuracy)
    names = ("mixer", "layers", "labels", "way", "steps")
    return [{**dict(zip(names, key)), **over_seeds(values)} for key, values in groups.items()]


def _seeds(rows: Sequence[Mapping[str, Any]]) -> str:
    counts = {len(row["runs"]) for row in rows}
    return f"{max(counts)} seeds" if len(counts) == 1 else f"{min(counts)} to {max(counts)} seeds"


def _value(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> str:
    fitting = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return shown(fitting[0], 3) if fitting else ""


def markdown(found: Mapping[str, Any]) -> str:
    """The tables of the guide."""
    rows, teacher = found["rows"], found["teacher"]
    lines = [
        f"Made by `{found['command']}` on {found['environment']['cpu']}, one thread; accuracy after the last step,",
        f"mean ± sample standard deviation over {_seeds(rows)}. The teacher has {teacher:.3f}.",
    ]
    for labels, layers in dict.fromkeys((row["labels"], row["layers"]) for row in rows):
        part = [row for row in rows if (row["labels"], row["layers"]) == (labels, layers)]
        steps = sorted({row["steps"] for row in part})
        named = {"all": "all labels", "none": "no label", "few": f"{found['few']:,} labelled images"}[labels]
        lines += ["", f"Swapped layers: {layers}; {named}; steps:", "", f"| to | way | {' | '.join(map(str, steps))} |"]
        lines.append(f"|---|---|{'---:|' * len(steps)}")
        named_ways = dict.fromkeys(row["mixer"] for row in part), WAYS[labels]
        for mixer, way in itertools.product(*named_ways):
            # Before the first step all ways are one.
            values = [_value(part, mixer=mixer, steps=n, **({"way": way} if n else {})) for n in steps]
            lines.append(f"| `{mixer}` | {way} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Mapping[str, Any]], teacher: float, file: Path) -> None:
    """Accuracy over steps: a panel for each mixer, a line for each way, all layers swapped and all labels given.

    Untrained networks, far below the others, are in the tables only.
    """
    from matplotlib.figure import Figure

    chosen = [row for row in rows if row["labels"] == "all" and row["layers"] == "all" and row["steps"]]
    mixers, ticks = (list(dict.fromkeys(row[name] for row in chosen)) for name in ("mixer", "steps"))
    figure = Figure(figsize=(2.6 * len(mixers), 2.8), layout="constrained")
    for axis, mixer in zip(figure.subplots(1, len(mixers), sharey=True, squeeze=False)[0], mixers, strict=True):
        for number, way in enumerate(WAYS["all"]):
            # Next to each other, as ways of equal accuracy would cover each other.
            points = [
                (ticks.index(row["steps"]) + 0.08 * number, row["mean"], row["deviation"] or 0.0)
                for row in chosen
                if row["mixer"] == mixer and row["way"] == way
            ]
            axis.errorbar(*zip(*sorted(points), strict=True), marker="o", markersize=3, linewidth=0.8, label=way)
        axis.axhline(teacher, color="grey", linewidth=0.8, linestyle="--")
        axis.set_xticks(range(len(ticks)), [f"{steps:,}" for steps in ticks])
        axis.set_title(mixer, fontsize=9)
        axis.set_xlabel("steps")
    figure.axes[0].set_ylabel("accuracy")
    figure.axes[0].legend(fontsize=7)
    figure.savefig(file, metadata={"Date": None})


def main(args: Args) -> bool:
    """Run, then write; False if the time was over first."""
    plan, start = QUICK if args.quick else FULL, time.monotonic()
    home, figure = (args.out, args.out / FIGURE.name) if args.quick else (HERE, FIGURE)
    teacher, file = home / "swap_teacher", home / "swap_nano_cells.json"
    result = train_teacher(plan, teacher)
    found, wanted = read_cells(file, plan), list(cells(plan, args.seeds))
    waiting = itertools.takewhile(
        lambda _: args.hours is None or time.monotonic() - start <= 3600 * args.hours,
        [cell for cell in wanted if cell not in found],
    )
    for cell, accuracy in as_they_end(waiting, args.jobs, plan, teacher, args.out):
        found[cell] = accuracy
        write_cells(file, plan, found)
        print(f"{time.monotonic() - start:.0f} s", *asdict(cell).values(), f"{accuracy:.4f}", flush=True)
    complete = all(cell in found for cell in wanted)
    if not complete:
        print(f"{len(found)} of {len(wanted)} cells; the same command continues", flush=True)
    if not found:
        return complete
    found = {cell: found[cell] for cell in (*wanted, *found) if cell in found}
    kept = {
        "command": f"python -m recipes.classification.swap_nano --seeds {','.join(map(str, args.seeds))}",
        "environment": environment(),
        "plan": asdict(plan),
        "few": plan.few,
        "teacher": result["final"]["accuracy"],
        "rows": summarise(found),
    }
    write_json(home / "swap_nano.json", kept)
    (home / "swap_nano.md").write_text(markdown(kept))
    draw(kept["rows"], kept["teacher"], figure)
    print(markdown(kept))
    return complete


if __name__ == "__main__":
    run_program(main, Args)
