"""One GAN with no attention, with SAGAN's, with external attention: equal budget, three seeds, two real sets.

    python -m recipes.generation.generation_nano [--out runs/generation] [--seeds 0,1,2] [--quick]

Each data set's images are judged by a classifier that is trained first, on all of its classes. The same command
goes on where it was stopped. Then a training step of each is timed, in turns, with its peak memory. Writes
recipes/generation/generation_nano.json and .md, and docs/images/generation_*.png, the first seed's samples.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image

from recipes.over_seeds import commits, over_seeds, read_result, shown
from recipes.program import run_program
from tokenmix.environment import environment
from tokenmix.lab.train.config import Numbers, TrainConfig
from tokenmix.lab.train.finish import finish_run
from tokenmix.lab.train.sources import make_config
from tokenmix.models.generation import GAN, create_gan
from tokenmix.profiling.memory import peak_memory
from tokenmix.profiling.speed import time_interleaved

HERE = Path(__file__).parent
IMAGES = HERE.parents[1] / "docs" / "images"
MODELS = {"none": "resnet_gan_nano", "sagan": "sagan_nano", "external": "eagan_nano"}
BUDGETS: dict[str, dict[str, Any]] = {
    "fashion-mnist": {"limit": 12_800, "limit_eval": 2_000, "epochs": 4},
    "emoji": {"epochs": 16},
}
CLASSES: dict[str, tuple[str, ...] | None] = {
    "fashion-mnist": None,
    # The three with the most drawings.
    "emoji": ("People & Body", "Flags", "Objects"),
}
JUDGES: dict[str, dict[str, Any]] = {
    "fashion-mnist": {"epochs": 3, "limit": 12_000, "augment": "none"},
    "emoji": {"epochs": 12},
}
SHARED: dict[str, Any] = {"img_size": 32, "threads": 1, "device": "cpu"}
SETTINGS: dict[str, Any] = {"lr_g": 5e-4, "lr_d": 1e-3, "ema": 0.995}
SCORES = ("feature_fd", "feature_kd", "class_score", "class_match", "thumbnail_fd")
BATCH = 32
COLORS = {"fashion-mnist": 20, "emoji": 96}
QUICK: dict[str, Any] = {"max_steps": 5, "limit_eval": 100}


@dataclass(frozen=True)
class Args:
    """Train what is not yet trained, then write the table."""

    out: Path = Path("runs/generation")
    """Folder of the run folders."""
    seeds: Numbers = (0, 1, 2)
    """Seeds, separated by commas."""
    quick: bool = False
    """A few steps of each, to see that all of it works; nothing is written outside the folder."""


def one_run(config: TrainConfig) -> dict[str, Any]:
    """The result of one run, trained now, or to its end, if need be."""
    run = finish_run(config, quiet=True)
    result = read_result(run)
    scores = " ".join(
        f"{name} {result['final'][name]:.4g}" for name in (*SCORES, "accuracy") if name in result["final"]
    )
    print(run.name, scores, f"{result['seconds']:.0f} s", flush=True)
    return result


def judge(args: Args, data: str) -> dict[str, Any]:
    """The classifier by which a data set's images are judged."""
    steps = QUICK if args.quick else {}
    return one_run(
        make_config(
            model="gmlp_nano",
            data=data,
            batch_size=64,
            out=args.out / f"judge-{data}",
            **SHARED,
            **JUDGES[data],
            **steps,
        )
    )


def gan(args: Args, data: str, attention: str, seed: int) -> dict[str, Any]:
    """One GAN."""
    settings = {**SETTINGS, "features": str(args.out / f"judge-{data}"), "classes": CLASSES[data]}
    budget: dict[str, Any] = {**BUDGETS[data], **(QUICK if args.quick else {})}
    return one_run(
        make_config(
            task="image-generation",
            model=MODELS[attention],
            data=data,
            batch_size=BATCH,
            seed=seed,
            precision="bf16-mixed",
            **settings,
            out=args.out / f"{data}-{attention}-{seed}",
            **SHARED,
            **budget,
        )
    )


def summarise(data: str, attention: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread over seeds of the scores after the last epoch."""
    return {
        "data": data,
        "attention": attention,
        "images": results[0]["images"],
        **{name: over_seeds([result["final"][name] for result in results]) for name in SCORES},
        "commits": commits(results),
    }


def training_step(model: GAN) -> Callable[[], object]:
    """A step of both networks on noise in the place of images."""
    images, labels = torch.randn(BATCH, 1, 32, 32), torch.arange(BATCH) % 10
    generator, discriminator = model.generator, model.discriminator
    adams = [torch.optim.Adam(network.parameters(), lr=1e-4) for network in (discriminator, generator)]

    def step() -> None:
        noise = torch.randn(BATCH, generator.latent_dim)
        with torch.no_grad():
            fake = generator(noise, labels)
        loss = F.relu(1 - discriminator(images, labels)).mean() + F.relu(1 + discriminator(fake, labels)).mean()
        adams[0].zero_grad()
        loss.backward()
        adams[0].step()
        discriminator.requires_grad_(False)
        adams[1].zero_grad()
        (-discriminator(generator(noise, labels), labels).mean()).backward()
        adams[1].step()
        discriminator.requires_grad_(True)

    return step


def costs(repeats: int) -> dict[str, dict[str, float]]:
    """Parameters, multiply-adds, milliseconds of a step (in turns, one thread) and its peak memory."""
    torch.set_num_threads(1)
    models = {
        name: create_gan(model, channels=1).to(memory_format=torch.channels_last) for name, model in MODELS.items()
    }
    steps = {name: training_step(model) for name, model in models.items()}
    times = time_interleaved(steps, repeats=repeats)
    return {
        name: {
            "generator": sum(p.numel() for p in models[name].generator.parameters()),
            "discriminator": sum(p.numel() for p in models[name].discriminator.parameters()),
            "macs": models[name].macs(),
            "milliseconds": 1e3 * times[name].median,
            "peak_memory": peak_memory(step),
        }
        for name, step in steps.items()
    }


def markdown(rows: Sequence[dict[str, Any]], cost: dict[str, dict[str, float]], command: str) -> str:
    """Both tables."""
    lines = [
        f"Made by `{command}` on {environment()['cpu']}, one thread; scores after the last epoch, mean ± sample",
        "standard deviation over the seeds. Distances: less is better; score and match: more is better.",
        "",
        "| data | attention | feature_fd | feature_kd | class_score | class_match | thumbnail_fd |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [shown(row[name], 3) for name in SCORES]
        lines.append(f"| {row['data']} | {row['attention']} | {' | '.join(cells)} |")
    lines += [
        "",
        f"A training step of {BATCH} grey images of 32 px, median of turns, and what it holds at its peak:",
        "",
        "| attention | generator | discriminator | MACs / image | step | peak memory |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, one in cost.items():
        lines.append(
            f"| {name} | {one['generator']:,.0f} | {one['discriminator']:,.0f} | {one['macs'] / 1e6:.1f} M "
            f"| {one['milliseconds']:.0f} ms | {one['peak_memory'] / 1e6:.0f} MB |"
        )
    return "\n".join(lines) + "\n"


def pictures(out: Path, data: str, seed: int, folder: Path) -> None:
    """The last grids of the three models side by side."""
    grids = [Image.open(sorted((out / f"{data}-{name}-{seed}" / "samples").glob("step-*.png"))[-1]) for name in MODELS]
    width, height, gap = grids[0].width, grids[0].height, 16
    page = Image.new("RGB", (len(grids) * (width + gap) - gap, height), "white")
    for place, grid in enumerate(grids):
        page.paste(grid, (place * (width + gap), 0))
    # Few colours, so that the page of the docs is small.
    page.quantize(COLORS[data], dither=Image.Dither.NONE).save(
        folder / f"generation_{data.replace('-', '_')}.png", optimize=True
    )


def main(args: Args) -> None:
    """Run, then write."""
    judges = {data: judge(args, data)["final"]["accuracy"] for data in BUDGETS}
    # All models of a seed before the next seed: a run that is stopped early can be compared.
    results = {
        (data, name, seed): gan(args, data, name, seed) for seed in args.seeds for data in BUDGETS for name in MODELS
    }
    rows = [
        summarise(data, name, [results[data, name, seed] for seed in args.seeds]) for data in BUDGETS for name in MODELS
    ]
    cost = costs(2 if args.quick else 15)
    seeds = ",".join(map(str, args.seeds))
    command = f"python -m recipes.generation.generation_nano --seeds {seeds}{' --quick' * args.quick}"
    kept = {
        "command": command,
        "environment": environment(),
        "budgets": BUDGETS,
        "settings": SETTINGS,
        "judges": judges,
        "rows": rows,
        "costs": cost,
    }
    home, images = (args.out, args.out) if args.quick else (HERE, IMAGES)
    (home / "generation_nano.json").write_text(json.dumps(kept, indent=1) + "\n")
    (home / "generation_nano.md").write_text(markdown(rows, cost, command))
    for data in BUDGETS:
        pictures(args.out, data, args.seeds[0], images)
    print(markdown(rows, cost, command))


if __name__ == "__main__":
    run_program(main, Args)
