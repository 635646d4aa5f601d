"""More seeds of the probe for the rows of the ledger, since `tokenmix probe --full` has five.

    python -m recipes.probe_seeds

Adds seeds 5 to 9 of each mixer and task that claims.toml names, and ten seeds of the multi-head block of external
attention with all its width in one head. recipes/probe_seeds.json is written after each; the same command goes on.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from recipes.claims import CLAIMS
from recipes.program import run_program
from tokenmix.environment import environment
from tokenmix.files import read_json, write_json
from tokenmix.layers import MultiHeadExternalAttention
from tokenmix.testing.probe import SEEDS, STEPS, TASKS, train_one

RESULTS = Path(__file__).with_suffix(".json")


class OneHead(MultiHeadExternalAttention):
    """The multi-head block with all its width in one head, and so in one attention map; its memories are wider."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, num_heads=1)
        self.memory = MultiHeadExternalAttention(4 * dim, num_heads=1, expansion=1).memory
        self.expansion = 1  # what cuts the inner width of 4 dim into heads


OTHERS = {"one-head-external": OneHead}


@dataclass(frozen=True)
class Args:
    """Train more seeds of the probe for the ledger."""


def main(args: Args) -> None:
    """Train what is missing."""
    torch.set_num_threads(1)
    now = environment()
    told = read_json(RESULTS) if RESULTS.exists() else {"scores": {}}
    told["environment"] = {key: now[key] for key in ("date", "cpu", "commit")}
    asked = dict.fromkeys(
        (row["comparison"].removeprefix("probe "), row[side])
        for claim in CLAIMS
        for row in claim["rows"]
        for side in "ab"
        if row["comparison"].startswith("probe ")
    )
    for task, mixer in asked:
        scores = told["scores"].setdefault(task, {})
        if mixer in scores:
            continue
        first = 0 if mixer in OTHERS else len(SEEDS)
        scores[mixer] = [
            train_one(OTHERS.get(mixer, mixer), TASKS[task], seed, steps=STEPS[task])[task] for seed in range(first, 10)
        ]
        write_json(RESULTS, told)
        print(f"{task}, {mixer}: {scores[mixer]}", flush=True)


if __name__ == "__main__":
    run_program(main, Args)
