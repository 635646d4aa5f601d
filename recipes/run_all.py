"""All evidence: trains what comparisons lack, in order of worth, until the time is over; then rebuilds the ledger.

    python -m recipes.run_all --budget 6 [--jobs 2]

Each job is `tokenmix compare --config NAME`, which goes on where it stopped; the last four are programs. A job
that has ended is not started again unless its name is given to --again. Ctrl-C, and the end of the time, save what is
being trained: the same command goes on.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tyro

from recipes.program import STOPPED
from tokenmix.files import make_folder, read_json, write_json
from tokenmix.lab.train.config import Names

ORDER = (
    "compare_climates",
    "compare_normalizations",
    "compare_pairs",
    "compare_pair_variants",
    "compare_emoji",
    "compare_lavit_pairs",
    "compare_depth",
    "compare_cells",
    "compare_gates",
    "compare_trees",
    "compare_composed",
    "compare_bricks",
    "compare_parts",
    "compare_swap",
)
JOBS = {name: f"-m tokenmix compare --config {name} --out {{out}}/{name} --jobs {{jobs}}" for name in ORDER}
JOBS["probe_seeds"] = "-m recipes.probe_seeds --jobs {jobs} --runs {out}/probe"
JOBS["slots"] = "-m recipes.segmentation.slots --runs {out}/compare_climates"
JOBS["depth"] = "-m recipes.classification.depth --runs {out}/compare_depth"
JOBS["convert_minilm"] = "-m recipes.text.convert_minilm --out {out}/minilm"
LEDGER = "-m recipes.claims"


@dataclass(frozen=True)
class Args:
    """Train what is missing, then rebuild what is made of it."""

    budget: float
    """Hours."""
    jobs: int = 1
    """Runs at a time."""
    out: Path = Path("runs/all")
    """Folder of the comparisons, and of the note of those that have ended."""
    again: Names = ()
    """Comparisons to run although they have ended, separated by commas."""


def run_all(args: Args, jobs: Mapping[str, str] = JOBS, ledger: str = LEDGER) -> int:
    """Run the jobs that have not ended, then the ledger on those that have.

    Returns 0 if all have ended, 1 if one failed, 130 after Ctrl-C, else `STOPPED`.
    """
    # A shell starts what it puts in the background deaf to SIGINT, and the jobs inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    deadline, note = time.monotonic() + args.budget * 3600, args.out / "ended.json"
    ended: dict[str, str] = read_json(note) if note.exists() else {}
    failed = []
    try:
        for name, command in jobs.items():
            left = deadline - time.monotonic()
            if left <= 0 or (name in ended and name not in args.again):
                print(f"{name}: {'ended ' + ended[name] if name in ended else 'no time left'}", flush=True)
                continue
            started = time.monotonic()
            print(f"{name}: {left / 3600:.2f} h left", flush=True)
            code = _run(command.format(jobs=args.jobs, out=args.out), left)
            told = {0: "ended", STOPPED: "stopped; goes on next time"}.get(code, f"failed with exit code {code}")
            print(f"{name}: {told}, after {(time.monotonic() - started) / 60:.1f} min", flush=True)
            if code == 0:
                ended[name] = time.strftime("%Y-%m-%d %H:%M")
                make_folder(args.out)
                write_json(note, ended)
            elif code != STOPPED:
                failed.append(name)
        done = (str(args.out / name) for name in jobs if (args.out / name / "results.md").is_file())
        _run(" ".join([ledger, *done]), float("inf"))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 1 if failed else 0 if ended.keys() >= jobs.keys() else STOPPED


def _run(command: str, seconds: float) -> int:
    """The exit code of `python command`; STOPPED if the time was over first."""
    # In a session of its own: it gets one SIGINT, from here, and so saves.
    process = subprocess.Popen([sys.executable, *command.split()], start_new_session=True)
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
