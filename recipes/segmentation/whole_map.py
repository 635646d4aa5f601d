"""Training and prediction on the whole Blue Marble at once, 5,400 x 2,700 pixels, its rows split over processes.

    python -m recipes.segmentation.whole_map [--out runs/whole-map] [--steps 2]

First the peak memory of a process over R = 1, 2 and 4 processes, in runs of one step. Then a limit of memory between
those of one process and of two, under which one process fails and two train and predict the map. Finished runs are
kept, so the same command continues where it stopped. Writes recipes/segmentation/whole_map.json, and the predicted map
as limited-2/predicted.png in the folder of the runs.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.distributed.device_mesh import init_device_mesh

from recipes.datasets.images.blue_marble import PALETTE, turned, whole_map
from recipes.program import run_program
from tokenmix.environment import environment
from tokenmix.files import write_json
from tokenmix.lab.train.distributed import distributed_info, process_group
from tokenmix.lab.train.load import load_task

HERE = Path(__file__).parent
SHARDS = (2, 1, 4)
SETTINGS: dict[str, Any] = {
    "data": "blue-marble:whole",
    "model": "eanet_seg_nano",
    "batch-size": 1,
    "augment": "none",
    "lr": 4e-3,
    "threads": 1,
    "device": "cpu",
    "log-every": 1,
    "checkpoint-every": 100_000,
}
# A stem of three narrow convolutions: what is as large as the image decides the memory.
THIN = {"layers": (1, 1, 1, 1), "channels": (16, 24, 32, 64), "stem_type": "deep", "stem_width": 8}
NETWORK: dict[str, Any] = {
    "backbone": "resnet18",
    "backbone_kwargs": THIN,
    "stem": "large",
    "output_stride": 8,
    "drop_rate": 0.0,
}


@dataclass(frozen=True)
class Args:
    """Measure, train and predict what is not there yet, then write the figures."""

    out: Path = Path("runs/whole-map")
    """Folder of the run folders."""
    steps: int = 2
    """Steps of the run whose map is shown."""
    predict: Path | None = None
    """Predict with this run folder; the recipe starts its own processes with it."""


def train(out: Path, shared: int, steps: int, limit: int | None = None) -> dict[str, Any] | None:
    """The result of a run over `shared` processes, each with at most `limit` bytes; None if it failed."""
    if not (out / "result.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        options = {**SETTINGS, "crops": steps, "epochs": 1, "token-parallel": shared, "out": out}
        given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        given += ["--model-kwargs", *(f"{name}={json.dumps(value)}" for name, value in NETWORK.items())]
        done = limited([sys.executable, "-m", "tokenmix", "train", "semantic-segmentation", *given], limit)
        print(f"{out}: exit code {done.returncode} {done.stderr.strip().splitlines()[-1:]}", flush=True)
        if done.returncode:
            return None
    return json.loads((out / "result.json").read_text())


def limited(command: list[str], limit: int | None) -> subprocess.CompletedProcess[str]:
    """Run a command whose processes may each have `limit` bytes of memory of their own (ulimit -d)."""
    shell = f'{"" if limit is None else f"ulimit -d {limit // 1024}; "}exec "$@"'
    return subprocess.run(["bash", "-c", shell, "bash", *command], capture_output=True, text=True, check=False)


def predict(run: Path) -> None:
    """In one of several processes: the classes of the whole map in colours, written by the first."""
    with process_group("cpu"):
        here = distributed_info()
        task = load_task(run)
        task.eval()
        task.split_tokens(init_device_mesh("cpu", (here.world_size,)))
        classes = task.answer(turned(whole_map()).image)  # type: ignore[operator]
        if here.first:
            colours = np.array(PALETTE, dtype=np.uint8)[classes.mT.numpy()]
            Image.fromarray(colours).resize((900, 450), Image.Resampling.NEAREST).save(run / "predicted.png")


def predicted(run: Path, shared: int, limit: int) -> bool:
    """Whether `shared` processes could predict the map under the limit."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(shared)]
    done = limited([*start, "-m", "recipes.segmentation.whole_map", "--predict", str(run)], limit)
    return done.returncode == 0


def program_bytes() -> int:
    """Peak memory of a process that has only imported what a run imports: what no splitting can reduce."""
    modules = "tokenmix.lab.train.run, tokenmix.lab.tasks.segmentation.task, recipes.datasets.images.blue_marble"
    code = f"import resource, {modules}; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main(args: Args) -> None:
    """All of it."""
    if args.predict is not None:
        predict(args.predict)
        return
    results = {shared: train(args.out / f"memory-{shared}", shared, 1) for shared in SHARDS}
    measured = {shared: result for shared, result in sorted(results.items()) if result is not None}
    peaks = {shared: result["peak_memory"]["process"] for shared, result in measured.items()}
    # What does not depend on R, and what is split: least squares of a + b / R.
    columns = torch.tensor([[1.0, 1 / shared] for shared in peaks], dtype=torch.float64)
    fixed, split = torch.linalg.lstsq(
        columns, torch.tensor(list(peaks.values()), dtype=torch.float64)
    ).solution.tolist()
    program, limit = program_bytes(), (peaks[1] + peaks[2]) // 2
    found: dict[str, Any] = {
        "pixels": [5400, 2700],
        "tokens": 675 * 338,
        "settings": {**SETTINGS, **NETWORK},
        "steps": args.steps,
        "peak_bytes": peaks,
        "program_bytes": program,
        "fixed_bytes": round(fixed),
        "split_bytes": round(split),
        "limit_bytes": limit,
        "seconds_of_a_step": {shared: result["seconds"] for shared, result in measured.items()},
    }
    write_json(HERE / "whole_map.json", {**found, "environment": environment()})
    alone = train(args.out / "limited-1", 1, 1, limit)
    run = args.out / "limited-2"
    together = train(run, 2, args.steps, limit)
    if together is None or alone is not None:
        raise SystemExit(
            f"under {limit} bytes one process {'fails' if alone is None else 'trains'}, two "
            f"{'fail' if together is None else 'train'}"
        )
    found |= {
        "one_process_under_the_limit": "failed",
        "two_processes_under_the_limit": {
            "steps": together["steps"],
            "seconds": together["seconds"],
            "metrics": together["metrics"],
            "peak_bytes": together["peak_memory"]["process"],
            "predicted": predicted(run, 2, limit),
        },
    }
    write_json(HERE / "whole_map.json", {**found, "environment": environment()})


if __name__ == "__main__":
    run_program(main, Args)
