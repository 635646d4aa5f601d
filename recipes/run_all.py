"""All evidence: trains what is missing, in order of worth, until the time is over; then rebuilds tables and the ledger.

    python -m recipes.run_all --budget 6 [--jobs 2]

Each job is a recipe, a program of its own that goes on where it stopped; it prints a line for each run, and writes its
JSON, tables and pictures when all of its runs are there. A job that has ended is not started again unless its name is
given to --again. Ctrl-C, and the end of the time, save what is being trained: the same command goes on.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from recipes.program import STOPPED
from tokenmix.files import read_json, write_json
from tokenmix.lab.train.config import Names

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Job:
    """A program: its command behind `python -m`, {jobs} and {hours} filled in."""

    name: str
    command: str


# docs/guides/swap.md waits for "swap"; the last five have results, from before validation data was apart.
JOBS = (
    Job("families", "recipes.classification.plateau --part families --jobs {jobs} --hours {hours}"),
    Job("ablations", "recipes.classification.plateau --part ablations --jobs {jobs} --hours {hours}"),
    Job("emoji", "recipes.classification.plateau --part emoji --jobs {jobs} --hours {hours}"),
    Job("swap", "recipes.classification.swap_nano --jobs {jobs} --hours {hours}"),
    Job("text", "recipes.text.text_nano"),
    Job("convert", "recipes.text.convert_minilm --costs"),
    Job("ranking", "recipes.text.rank_layers"),
    Job("segmentation", "recipes.segmentation.segmentation_nano"),
    Job("detection", "recipes.detection.detection_nano"),
    Job("points", "recipes.points.points_nano"),
    Job("generation", "recipes.generation.generation_nano"),
)
LEDGER = "recipes.claims"


@dataclass(frozen=True)
class Args:
    """Train what is missing, then rebuild what is made of it."""

    budget: float
    """Hours."""
    jobs: int = 1
    """Runs at a time, where a recipe can."""
    out: Path = Path("runs/all")
    """Folder of the note of what has ended; recipes have folders of their own under runs/."""
    again: Names = ()
    """Jobs to run although they have ended, separated by commas."""


def run_all(args: Args, jobs: Sequence[Job] = JOBS, ledger: str = LEDGER) -> int:
    """Run the jobs that have not ended, then the ledger.

    Returns 0 if all have ended, 1 if one failed, 130 after Ctrl-C, else `STOPPED`.
    """
    # A shell starts what it puts in the background deaf to SIGINT, and the jobs inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    deadline, note = time.monotonic() + args.budget * 3600, args.out / "ended.json"
    ended: dict[str, str] = read_json(note) if note.exists() else {}
    ended = {name: when for name, when in ended.items() if name not in args.again}
    failed = []
    try:
        for job in jobs:
            left = deadline - time.monotonic()
            if job.name in ended or left <= 0:
                print(f"{job.name}: {'ended ' + ended[job.name] if job.name in ended else 'no time left'}", flush=True)
                continue
            started = time.monotonic()
            print(f"{job.name}: {left / 3600:.2f} h left", flush=True)
            code = _run(job.command.format(jobs=args.jobs, hours=left / 3600), left)
            told = {0: "ended", STOPPED: "stopped; goes on next time"}.get(code, f"failed with exit code {code}")
            print(f"{job.name}: {told}, after {(time.monotonic() - started) / 60:.1f} min", flush=True)
            if code == 0:
                ended[job.name] = time.strftime("%Y-%m-%d %H:%M")
                args.out.mkdir(parents=True, exist_ok=True)
                write_json(note, ended)
            elif code != STOPPED:
                failed.append(job.name)
        _run(ledger, float("inf"))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 1 if failed else 0 if all(job.name in ended for job in jobs) else STOPPED


def _run(command: str, seconds: float) -> int:
    """The exit code of `python -m command`; STOPPED if the time was over first, or if it says so itself."""
    # In a session of its own: it gets one SIGINT, from here, and so saves.
    process = subprocess.Popen([sys.executable, "-m", *command.split()], start_new_session=True)
    try:
        return process.wait(None if seconds == float("inf") else seconds)
    except subprocess.TimeoutExpired:
        return STOPPED
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
            process.wait()


if __name__ == "__main__":
    sys.exit(run_all(tyro.cli(Args)))
