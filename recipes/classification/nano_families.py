"""Every family at nano size next to a self-attention variant, equal budget, three seeds, on two real sets.

    python -m recipes.classification.nano_families [--out runs/families] [--seeds 0,1,2]

Finished runs are kept, so the same command continues where it stopped. Writes nano_families.json and .md next to it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from recipes.over_seeds import SECONDS_NOTE, over_seeds, read_result, seconds_and_commits, shown
from tokenmix.environment import environment
from tokenmix.train.config import Numbers
from tokenmix.train.finish import finish_run
from tokenmix.train.sources import make_config

MODELS = ("vit_nano", "eamlp_nano", "gmlp_nano", "amlp_nano", "lavit_nano", "eanet_nano")
BUDGETS: dict[str, dict[str, Any]] = {
    "fashion-mnist": {"epochs": 2, "limit": 12_000, "augment": "none"},
    "emoji": {"epochs": 8, "augment": "light", "img_size": 32},
}
SHARED: dict[str, Any] = {"batch_size": 64, "lr": 2e-3, "threads": 1}
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Args:
    """Train what is not yet trained, then write the table."""

    out: Path = Path("runs/families")
    """Folder of the run folders."""
    seeds: Numbers = (0, 1, 2)
    """Seeds, separated by commas."""


def one_run(out: Path, data: str, model: str, seed: int) -> dict[str, Any]:
    """The result of one run, trained now, or to its end, if need be."""
    folder = out / f"{data}-{model}-{seed}"
    finish_run(make_config(model=model, data=data, seed=seed, out=folder, **SHARED, **BUDGETS[data]), quiet=True)
    result = read_result(folder)
    print(data, model, seed, f"{result['final']['accuracy']:.4f}", f"{result['seconds']:.0f} s", flush=True)
    return result


def summarise(data: str, model: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread over seeds of the accuracy after the last epoch, and what the model costs."""
    found = over_seeds([result["final"]["accuracy"] for result in results])
    return {
        "data": data,
        "model": model,
        "accuracy": found["mean"],
        "deviation": found["deviation"],
        "runs": found["runs"],
        "parameters": results[0]["parameters"],
        "macs": results[0]["macs"],
        "images": results[0]["images"],
        **seconds_and_commits(results),
    }


def markdown(rows: list[dict[str, Any]], command: str) -> str:
    """The rows as one table."""
    lines = [
        f"Made by `{command}` on {environment()['cpu']}, one thread; accuracy after the last epoch, mean ± sample",
        "standard deviation over the seeds; every model sees the same images in the same order. Seconds of one run,",
        f"where other programs were running too: for planning, not for comparing. {SECONDS_NOTE}",
        "",
        "| data | model | accuracy | parameters | MACs / image | images seen | seconds |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        accuracy = shown({"mean": row["accuracy"], "deviation": row["deviation"]}, 4)
        lines.append(
            f"| {row['data']} | `{row['model']}` | {accuracy} | {row['parameters']:,} "
            f"| {row['macs'] / 1e6:.2f} M | {row['images']:,} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(args: Args) -> None:
    """Run, then write."""
    rows = [
        summarise(data, model, [one_run(args.out, data, model, seed) for seed in args.seeds])
        for data in BUDGETS
        for model in MODELS
    ]
    command = f"python -m recipes.classification.nano_families --seeds {','.join(map(str, args.seeds))}"
    kept = {"command": command, "environment": environment(), "budgets": BUDGETS, "shared": SHARED, "rows": rows}
    (HERE / "nano_families.json").write_text(json.dumps(kept, indent=1) + "\n")
    (HERE / "nano_families.md").write_text(markdown(rows, command))
    print(markdown(rows, command))


if __name__ == "__main__":
    main(tyro.cli(Args))
