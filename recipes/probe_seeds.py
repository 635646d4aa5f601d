"""The probe for the rows of the ledger: ten seeds, and what each network had right in each test sample.

    python -m recipes.probe_seeds [--jobs 2]

Trains each mixer and task that claims.toml names, `identity` beside them, and the multi-head block of external
attention with all its width in one head. The same command goes on where it stopped. It writes recipes/probe_seeds.npz,
which the ledger reads, and recipes/probe_seeds.json, which says when and where.
"""

import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from recipes.claims import CLAIMS
from recipes.program import run_program
from tokenmix.environment import environment
from tokenmix.files import make_folder, read_json, write_json
from tokenmix.layers import MultiHeadExternalAttention
from tokenmix.testing.probe import STEPS, TASKS, train_one

RESULTS = Path(__file__).with_suffix(".npz")
SEEDS = range(10)


class OneHead(MultiHeadExternalAttention):
    """The multi-head block with all its width in one head, and so in one attention map; its memories are wider."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, num_heads=1)
        self.memory = MultiHeadExternalAttention(4 * dim, num_heads=1, expansion=1).memory
        self.expansion = 1  # what cuts the inner width of 4 dim into heads


OTHERS = {"one-head-external": OneHead}


@dataclass(frozen=True)
class Args:
    """Train the probe for the ledger."""

    jobs: int = 1
    """Runs at a time."""
    runs: Path = Path("runs/all/probe")
    """Folder with a file for each run."""


def runs_of(folder: Path) -> Iterator[tuple[str, str, int, Path]]:
    """Task, mixer, seed and file of each run, seed by seed."""
    rows = [(row["comparison"].partition("probe ")[2], row) for claim in CLAIMS for row in claim["rows"]]
    asked = {(task, mixer) for task, row in rows if task for mixer in (row["a"], row["b"], "identity")}
    for seed in SEEDS:
        for task, mixer in sorted(asked):
            yield task, mixer, seed, folder / task / f"{mixer}-seed{seed}.json"


def train(run: tuple[str, str, int, Path]) -> str:
    """Train one network, write its file, and say what it reached."""
    task, mixer, seed, file = run
    torch.set_num_threads(1)
    started = time.monotonic()
    hits, asked = train_one(OTHERS.get(mixer, mixer), TASKS[task], seed, steps=STEPS[task])[task]
    where = {key: environment()[key] for key in ("date", "cpu", "commit")}
    make_folder(file.parent)
    seconds = time.monotonic() - started
    write_json(file, {**where, "seconds": seconds, "right": hits.tolist(), "asked": asked.tolist()})
    return f"{task}, {mixer}, seed {seed}: {hits.sum() / asked.sum():.3f}"


def main(args: Args) -> None:
    """Train what is missing, then keep all."""
    missing = [run for run in runs_of(args.runs) if not run[-1].exists()]
    # Ctrl-C reaches the whole group of processes; a run that has begun ends.
    deaf = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), deaf) as pool:
        try:
            for line in (map if args.jobs == 1 else pool.map)(train, missing):
                print(line, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    columns, told, seconds = {}, [], defaultdict[str, list[float]](list)
    for task, mixer, seed, file in runs_of(args.runs):
        told.append(read_json(file))
        seconds[task].append(told[-1]["seconds"])
        columns[f"{task}/asked"] = np.array(told[-1]["asked"], np.uint8)
        columns[f"{task}/{mixer}-seed{seed}"] = np.array(told[-1]["right"], np.uint8)
    np.savez_compressed(RESULTS, **columns)
    where = {key: ", ".join(dict.fromkeys(one[key] for one in told)) for key in ("cpu", "commit")}
    minutes = {task: float(np.median(times)) / 60 for task, times in seconds.items()}
    write_json(RESULTS.with_suffix(".json"), {"date": max(one["date"] for one in told), **where, "minutes": minutes})


if __name__ == "__main__":
    run_program(main, Args)
