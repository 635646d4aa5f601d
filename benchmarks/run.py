"""Measure tokenmix against floors and peers: `python benchmarks/run.py --help`."""

import argparse
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from suite.groups import GROUPS, cases_of, derived_rows, load
from suite.harness import Case
from suite.place import Place
from suite.process import keep_memory, measured_apart, measured_here
from suite.results import SCHEMA, Results, Row, read_results, write_results
from suite.table import lines_of, page
from tokenmix.environment import environment
from tokenmix.errors import UserError
from tokenmix.files import disk_remedy, make_folder, replace_file
from tokenmix.profiling.machine import OtherWork

PEERS = ("timm", "fightingcv-attention", "g-mlp-pytorch", "vit-pytorch", "x-transformers")
REPEATS = {"cpu": 51, "cuda": 1000}
FOLDER = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the groups asked for. 0: all checks passed; 1: one failed; 2: a mistake, or a full disk; 130: Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        if options.list:
            print("\n".join(f"{name:10} {about}" for name, about in GROUPS.items()))
            return 0
        if not options.table:
            return _run(options, shlex.join(["python", "benchmarks/run.py", *(arguments or sys.argv[1:])]))
        if not any(options.out.glob("*.json")):
            raise UserError(f"--table: no results in {options.out}; measure first, or name their folder with --out")
        for device in ("cpu", "cuda"):
            _write_page(options.out, device, options.kept)
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; only the files of groups that had finished are new", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="groups to run, all if not given; see --list")
    parser.add_argument("--case", metavar="PATTERN", help="cases by name, such as '*N 196*'; prints and writes no file")
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda", help="where")
    parser.add_argument(
        "--dtype", metavar="TYPE", help="float32 (on the CPU if not given), bfloat16 (on cuda), float16"
    )
    parser.add_argument("--threads", type=int, default=cores, help="threads of torch")
    most = f"rounds of a case, at most; {REPEATS['cpu']}, or {REPEATS['cuda']} on cuda, if not given"
    parser.add_argument("--repeats", type=int, help=most)
    parser.add_argument("--seconds", type=float, default=3.0, help="about the time for a case; five rounds at least")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the JSON files; the table goes beside it")
    parser.add_argument(
        "--keep-memory", action="store_true", help="on Linux, let the allocator keep freed memory (docs/guides/cost.md)"
    )
    parser.add_argument(
        "--one-process", action="store_true", help="all cases in this process, as on a GPU; else each has its own"
    )
    parser.add_argument("--list", action="store_true", help="say what the groups are")
    parser.add_argument("--table", action="store_true", help="only make the tables from the JSON files")
    parser.add_argument(
        "--kept", type=Path, help="with --table: results of the same cases by --keep-memory, to show side by side"
    )
    return parser


def _run(options: argparse.Namespace, command: str) -> int:
    groups = list(options.only or GROUPS)
    for group in groups:
        load(group)
    if options.repeats is not None and options.repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {options.repeats}")
    if not 0 < options.seconds < math.inf:
        raise UserError(f"--seconds must be a positive number, got {options.seconds}")
    place = Place.named(options.device, options.dtype, options.threads)
    repeats = REPEATS[place.device] if options.repeats is None else options.repeats
    asked = {group: _asked(group, place.device, options.case) for group in groups}
    if not any(asked.values()):
        here = "; ".join(case.name for group in groups for case in cases_of(group, place.device)) or "none"
        raise UserError(f"no case {options.case or '*'!r} of {', '.join(groups)} on {place.device}; there are: {here}")
    if options.keep_memory:
        if options.one_process or place.device == "cuda":
            raise UserError("--keep-memory is for new processes on a CPU: leave --one-process or --device cuda out")
        keep_memory()
    if options.case is None:
        make_folder(options.out)
    passed, others = True, OtherWork()
    for group, cases in asked.items():
        if not cases:
            print(f"{group}: no such case on {place.device}")
            continue
        rows = _rows(cases, place, options, repeats)
        passed &= all(row.passed for row in rows)
        if options.case is None:
            with _failure_reported(f"results of {group}"):
                write_results(_results(group, place, command, rows), options.out)
    if options.case is None:
        with _failure_reported("the table"):
            _write_page(options.out, place.device)
    if place.device == "cpu" and (warning := others.warning(place.threads)):
        print(f"warning: {warning}", file=sys.stderr)
    return 0 if passed else 1


@contextmanager
def _failure_reported(what: str) -> Iterator[None]:
    """A disk that refuses is a mistake with a remedy."""
    try:
        yield
    except OSError as error:
        why = f"{error.strerror}; the numbers stand above"
        raise UserError(f"{what} not written ({why}): {disk_remedy(error)}") from None


def _asked(group: str, device: str, pattern: str | None) -> list[Case]:
    return [case for case in cases_of(group, device) if fnmatch(case.name, pattern or "*")]


def _rows(cases: list[Case], place: Place, options: argparse.Namespace, repeats: int) -> list[Row]:
    rows = []
    # A GPU's memory is PyTorch's own allocator's, and a process that has seen the GPU takes long to start.
    measured = measured_here if options.one_process or place.device == "cuda" else measured_apart
    for case in cases:
        start = time.perf_counter()
        row = measured(case, place, repeats, options.seconds)
        _tell(row, time.perf_counter() - start)
        rows.append(row)
    for row in derived_rows(cases[0].group, rows, place.device):
        _tell(row, 0.0)
        rows.append(row)
    return rows


def _tell(row: Row, seconds: float) -> None:
    for line in lines_of(row):
        print(f"{row.group:8} " + " | ".join(cell for cell in line if cell), end="")
        print(f"   [{seconds:.0f} s]", flush=True)


def _results(group: str, place: Place, command: str, rows: list[Row]) -> Results:
    where = environment()
    peers = {}
    # The compiler of our kernels is no peer, but on CUDA its version matters as much.
    for name in (*PEERS, "triton") if place.device == "cuda" else PEERS:
        try:
            peers[name] = version(name)
        except PackageNotFoundError:
            continue
    device = "cuda" if place.device == "cuda" else "cpu"
    return Results(SCHEMA, group, device, place.dtype_name, place.threads, command, where, peers, rows)  # pyrefly: ignore[bad-argument-type]


def _write_page(folder: Path, device: str, kept: Path | None = None) -> None:
    results, others = (
        [read_results(file) for file in sorted(place.glob(f"{device}-*.json"))] if place else []
        for place in (folder, kept)
    )
    if not results:
        return
    name = "gpu" if device == "cuda" else "cpu"
    file = folder.parent / f"RESULTS-{name}.md"
    replace_file(file, page(results, f"Benchmarks on a {name.upper()}", others).encode())
    print(f"table: {file}")


if __name__ == "__main__":
    sys.exit(main())
