"""Whole training loops against those of other packages: `python benchmarks/end_to_end.py --help`.

Each loop trains the same model on the same data on disk with the same augmentation, in a process of its own; the loops
of a row take turns. A row gives images, tokens or clouds a second, medians over the turns, and peak memory.
"""

import argparse
import csv
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for recipes

from loops.measure import Loop, Turn, program, turn
from loops.others import Sizes, boxes, clouds, masked_lm
from loops.pictures import (
    Pictures,
    make_folder,
    only_read,
    our_batches,
    ours,
    plain_loader,
    plain_loop,
    timm_loader,
    timm_loop,
)

from suite.command import exit_code, write_rows
from tokenmix.errors import UserError
from tokenmix.files import make_folder as make_parents
from tokenmix.lab.data.lookup import cache_root
from tokenmix.profiling.machine import OtherWork

PEERS = ("timm", "torchvision", "transformers", "accelerate", "datasets", "pillow")
GROUPS = ("read", "images", "text", "points", "boxes", "jobs")


@dataclass(frozen=True)
class Side:
    """One loop of a row: units a second of each turn, and the median of the turns' peaks in bytes."""

    rates: list[float]
    memory: int


@dataclass(frozen=True)
class Row:
    """Loops that were measured by turns, ours first."""

    group: str
    name: str
    unit: str
    sides: dict[str, Side]
    ratios: dict[str, tuple[float, float, float]] = field(init=False)
    """Our rate over each other's: median, lowest and highest of the turns."""

    def __post_init__(self) -> None:
        (_, mine), *others = self.sides.items()
        found = {name: [a / b for a, b in zip(mine.rates, other.rates)] for name, other in others}
        ratios = {name: (statistics.median(each), min(each), max(each)) for name, each in found.items()}
        object.__setattr__(self, "ratios", ratios)


@dataclass(frozen=True)
class Case:
    """A row to measure."""

    group: str
    name: str
    unit: str
    make: Callable[[], dict[str, Loop]]
    steps: int
    threads: int = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and write it as JSON. 2: a mistake on the command line; 130: Ctrl-C."""
    options = _parser().parse_args(arguments)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.repeats < 1 or not 0 < options.scale <= 1:
        raise UserError("--repeats must be at least 1, and --scale in (0, 1]")
    if options.out is not None:
        make_parents(options.out.parent)
    groups, start, others = options.only or GROUPS, time.perf_counter(), OtherWork()
    rows: list[Row] = []
    for case in _cases(cache_root() / "end-to-end", options.scale):
        if case.group in groups:
            rows.append(_measured(case, options))
            print("\n".join(lines_of(rows[-1])), flush=True)
    if "jobs" in groups:
        rows.append(_jobs(options))
        print("\n".join(lines_of(rows[-1])), flush=True)
    print(f"{time.perf_counter() - start:.0f} seconds in all")
    write_rows(options.out, rows, PEERS, others.warning(2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="groups of rows; all if not given")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each loop")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps of a turn, to try the program")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser


def _cases(folder: Path, scale: float) -> Iterator[Case]:
    for kind, width, height in (("png", 300, 300), ("jpg", 500, 375)):
        made = make_folder(folder, kind, width, height, 896)
        title = f"{kind.upper()} of {width} x {height}, to 96 px"
        for group in ("read", "images"):
            for workers in (0,) if group == "read" else (0, 1, 2):
                pictures = Pictures("vit_nano", made, 96, 8, 64, workers)
                make = partial(_readers if group == "read" else _trainers, pictures)
                yield Case(group, f"{title}, {workers} workers", "images", make, max(2, round(6 * scale)))
    fashion = Pictures("vit_nano", None, 28, 4, 128, 0)
    yield Case("read", "Fashion-MNIST in memory", "images", partial(_readers, fashion), max(2, round(100 * scale)))
    yield Case("images", "Fashion-MNIST in memory", "images", partial(_trainers, fashion), max(2, round(20 * scale)))
    text = partial(masked_lm, folder, "gmlp_text_nano", Sizes(32, 128))
    yield Case("text", "masked LM, 32 x 128 tokens", "tokens", text, max(2, round(10 * scale)))
    points = partial(clouds, folder, "pct_naive_cls_nano", Sizes(8, 1024))
    yield Case("points", "PCT, 1,024 points", "clouds", points, max(2, round(8 * scale)))
    trees = partial(boxes, folder, "retinanet_nano", Sizes(8, 256))
    yield Case("boxes", "RetinaNet, 256 px JPEG", "images", trees, max(2, round(8 * scale)))


def _trainers(pictures: Pictures) -> dict[str, Loop]:
    return {
        "tokenmix": ours(pictures.config, pictures.batch_size),
        "timm's train.py": timm_loop(pictures),
        "plain loop, torchvision": plain_loop(pictures),
    }


def _readers(pictures: Pictures) -> dict[str, Loop]:
    return {
        "tokenmix": only_read(partial(our_batches, pictures), pictures.batch_size),
        "timm's loader": only_read(lambda: iter(timm_loader(pictures)), pictures.batch_size),
        "plain loader, torchvision": only_read(lambda: iter(plain_loader(pictures)), pictures.batch_size),
    }


def _measured(case: Case, options: argparse.Namespace) -> Row:
    loops = case.make()
    turns: dict[str, list[Turn]] = {name: [] for name in loops}
    for repeat in range(options.repeats):
        # In turn from the first and from the last, so that none always comes after the same other.
        for name in list(loops)[:: -1 if repeat % 2 else 1]:
            turns[name].append(turn(loops[name], warm=1, steps=case.steps, threads=case.threads))
    return Row(case.group, case.name, case.unit, {name: _side(each) for name, each in turns.items()})


def _side(turns: list[Turn]) -> Side:
    # Peaks of one loop differ by 20 MiB from turn to turn.
    return Side([round(one.rate, 2) for one in turns], round(statistics.median(one.memory for one in turns)))


def _jobs(options: argparse.Namespace) -> Row:
    """Two runs of a comparison: both at once, one thread each; and one after the other, with two threads or one."""
    sides: dict[str, list[Turn]] = {"--jobs 2": [], "one process, two threads": [], "one process, one thread": []}
    steps = max(40, round(60 * options.scale))
    words = f"compare --mixers external --seeds 0,1 --model mixer_nano --batch-size 64 --validation 0 --log-every 20 \
        --max-steps {steps} --epochs 1 --limit-eval 64 --device cpu --no-controls"
    for repeat in range(options.repeats):
        for name in list(sides)[:: -1 if repeat % 2 else 1]:
            jobs, threads = 2 if name == "--jobs 2" else 0, 2 if "two" in name else 1
            with tempfile.TemporaryDirectory() as folder:
                more = f"--jobs {jobs} --threads {threads} --out {folder}/out"
                command = [sys.executable, "-m", "tokenmix", *words.split(), *more.split()]
                memory = program(command, {"OMP_NUM_THREADS": str(threads)}).memory
                rates = [_steady_rate(file) for file in Path(folder).rglob("metrics.csv")]
            sides[name].append(Turn(sum(rates) if jobs else statistics.mean(rates), memory))
    return Row("jobs", "two runs of mixer_nano", "images", {name: _side(each) for name, each in sides.items()})


def _steady_rate(file: Path) -> float:
    """Images a second of a run without its first row, in which PyTorch warms up."""
    with open(file) as lines:
        return statistics.mean(float(row["images_per_second"]) for row in list(csv.DictReader(lines))[1:])


def lines_of(row: Row) -> list[str]:
    lines = [f"{row.group}: {row.name}"]
    for name, side in row.sides.items():
        text = f"  {name:28} {statistics.median(side.rates):10,.1f} {row.unit}/s {side.memory / 2**20:8,.0f} MiB"
        if name in row.ratios:
            text += "   ours / this: {:.2f} ({:.2f} to {:.2f})".format(*row.ratios[name])
        lines.append(text)
    return lines


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
