"""Steps of `tokenmix train` against those of a bare loop: `python benchmarks/training.py --help`.

Both train the same model on the same images with the same loss, optimiser and clipping, in the same processes and by
turns: a few steps of the trainer, as many of the bare loop, and so on within one run, so that a machine that other
programs slow down slows both. The bare loop indexes normalised images in memory, and does nothing else: no
augmentation, no schedule, no log, no checkpoint; of several processes it is DistributedDataParallel. The trainer is
`tokenmix.lab.train.train` as the command calls it, and writes a row of metrics.csv in each of its turns. Wall time is
that of the first process, CPU time the sum of all. Several processes are started by torchrun.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from suite.command import exit_code, write_json
from tokenmix.environment import environment
from tokenmix.errors import UserError
from tokenmix.files import make_folder
from tokenmix.lab.data.images import ImageData, load_images
from tokenmix.lab.data.images.augment import make_augment
from tokenmix.lab.data.images.image_set import normalize
from tokenmix.lab.train import train
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distributed import all_gather, distributed_info, process_group
from tokenmix.lab.train.plan import make_optimizer
from tokenmix.lab.train.record import ProgressBar
from tokenmix.lab.train.sources import make_config
from tokenmix.models import create_model
from tokenmix.profiling.machine import OtherWork

SCHEMA = 3
RESAMPLES = 2000
HELD = 10_000
"""Images that the bare loop draws from."""


@dataclass(frozen=True)
class Comparison:
    """Seconds of each turn of both, and the median ratio of the bare loop's to the trainer's: below 1 it is slower.

    The ratios are those of neighbouring turns, for which the machine was alike. `low` and `high` hold 95 % of the
    medians of bootstrap samples of them.
    """

    bare: list[float]
    trainer: list[float]
    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, bare: Sequence[float], trainer: Sequence[float]) -> "Comparison":
        """These turns."""
        ratios, draw = np.array(bare) / np.array(trainer), np.random.default_rng(0)
        medians = np.median(ratios[draw.integers(len(ratios), size=(RESAMPLES, len(ratios)))], axis=1)
        low, high = np.percentile(medians, (2.5, 97.5)).tolist()
        rounded = ([round(one, 5) for one in part] for part in (bare, trainer))
        return cls(next(rounded), next(rounded), float(np.median(ratios)), low, high)


@dataclass(frozen=True)
class Row:
    """Wall time and CPU time of a model in some processes."""

    model: str
    augment: str
    processes: int
    wall: Comparison
    cpu: Comparison


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write it as JSON if asked for. 2: a mistake on the command line; 130: Ctrl-C."""
    options = _parser().parse_args(arguments)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    _check(options)
    torch.set_num_threads(options.threads)
    if "RANK" in os.environ:
        with process_group("cpu"):
            rows = _rows(options)
        if distributed_info().first:
            _write(options, rows)
        return 0
    rows, others = [], OtherWork()
    for processes in options.processes:
        rows += _rows(options) if processes == 1 else _rows_of_several(options, processes)
        if options.out is not None:
            _write(options, rows)
    if warning := others.warning(options.threads * max(options.processes)):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _rows(options: argparse.Namespace) -> list[Row]:
    rows = []
    for model in options.models:
        for augment in options.augment:
            rows.append(_measure(_config(options, model, augment)))
            if distributed_info().first:
                print(_line(rows[-1]), flush=True)
    return rows


def _rows_of_several(options: argparse.Namespace, processes: int) -> list[Row]:
    """The rows that this program measures when torchrun starts it."""
    words = ["--models", *options.models, "--augment", *options.augment, "--data", options.data]
    for name in ("batch_size", "steps", "rounds", "threads"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        if code := subprocess.run([*torchrun, __file__, *words, "--out", str(out)], env=environment).returncode:
            raise UserError(f"{processes} processes ended with code {code}; see what they reported")
        rows = json.loads(out.read_text())["rows"]
        return [Row(**(row | {key: Comparison(**row[key]) for key in ("wall", "cpu")})) for row in rows]


def _write(options: argparse.Namespace, rows: list[Row]) -> None:
    settings = {key: getattr(options, key) for key in ("batch_size", "steps", "rounds", "data")}
    document = {"schema": SCHEMA, **settings, "rows": [asdict(row) for row in rows], "environment": environment()}
    write_json(options.out, document)


def _check(options: argparse.Namespace) -> None:
    """Reported before minutes are spent on measuring."""
    for name in ("batch_size", "steps", "rounds", "threads"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if min(options.processes) < 1:
        raise UserError(f"--processes must be at least 1, got {min(options.processes)}")
    for augment in options.augment:
        make_augment(augment, seed=0, flip=False, fill=None)
    for model in options.models:
        create_model(model)
    load_images(options.data, limit=options.batch_size, limit_eval=options.batch_size, seed=0)
    if options.out is not None:
        make_folder(options.out.parent)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mixer_nano", "gmlp_nano"], help="models to train")
    parser.add_argument("--augment", nargs="+", default=["none", "light"], help="augmentations of the trainer")
    parser.add_argument("--data", default="fashion-mnist", help="data set")
    parser.add_argument("--processes", nargs="+", type=int, default=[1], help="numbers of processes")
    parser.add_argument("--batch-size", type=int, default=64, help="images of a step of one process")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=50, help="turns of each")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, of each process")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser


def _config(options: argparse.Namespace, model: str, augment: str) -> TrainConfig:
    # One turn more, to warm up. Nothing is evaluated within the run.
    return make_config(
        model=model,
        augment=augment,
        data=options.data,
        batch_size=options.batch_size,
        log_every=options.steps,
        max_steps=options.steps * (options.rounds + 1),
        validation=0,
        limit_eval=options.batch_size,
        checkpoint_every=10**9,
        epochs=10**4,
        threads=options.threads,
        device="cpu",
    )


def _measure(config: TrainConfig) -> Row:
    turns = Turns(BareLoop(config), config.loop.log_every)
    with tempfile.TemporaryDirectory() as folder, patch.object(ProgressBar, "advance", lambda _: turns.advance()):
        # All processes train in the first one's folder.
        train(config.replace(out=all_gather(Path(folder))[0] / "run"), quiet=True)
    wall, cpu = torch.tensor(turns.seconds[1:]).unbind(-1)
    if dist.is_initialized():
        cpu = cpu.contiguous()  # gloo would add up what is in between, too
        dist.all_reduce(cpu)
    wall, cpu = (Comparison.of(*part.T.tolist()) for part in (wall, cpu))
    return Row(config.model.model, config.options.augment, distributed_info().world_size, wall, cpu)


class Turns:
    """What the trainer calls after each of its steps: measures its turns, and takes those of the bare loop."""

    def __init__(self, bare: "BareLoop", length: int) -> None:
        self.bare, self.length, self.steps = bare, length, 0
        self.start = _now()
        self.seconds: list[tuple[tuple[float, float], tuple[float, float]]] = []
        """Wall and CPU time of the bare loop and of the trainer, of each pair of turns."""

    def advance(self) -> None:
        """Count a step of the trainer, and let the bare loop take its turn where that of the trainer is over."""
        self.steps += 1
        if self.steps % self.length:
            return
        middle = _now()
        for _ in range(self.length):
            self.bare.step()
        end = _now()
        self.seconds.append((_passed(middle, end), _passed(self.start, middle)))
        self.start = _now()


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _passed(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    return end[0] - start[0], end[1] - start[1]


class BareLoop:
    """A model and an optimiser of its own, and the training images as normalised floats."""

    def __init__(self, config: TrainConfig) -> None:
        data: ImageData = load_images(
            config.data.data, limit=config.data.limit, limit_eval=config.data.limit_eval, seed=config.loop.seed
        )
        pixels, _ = data.train.pixels(torch.arange(min(len(data.train), HELD)))
        self.images, self.labels = normalize(pixels, data.mean, data.std), data.train.labels[: len(pixels)]
        self.config = config
        self.model: nn.Module = create_model(
            config.model.model, num_classes=len(data.classes), in_chans=data.channels, img_size=data.img_size
        )
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.model)
        self.optimizer = make_optimizer(self.model, config.optim)

    def step(self) -> None:
        """A step on images drawn at random."""
        places = torch.randint(len(self.images), (self.config.loop.batch_size,))
        logits = self.model(self.images[places])
        loss = F.cross_entropy(logits, self.labels[places], label_smoothing=self.config.options.smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        if self.config.optim.clip_grad is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_grad)
        self.optimizer.step()


def _line(row: Row) -> str:
    parts = (f"{part.ratio:.3f} ({part.low:.3f} to {part.high:.3f})" for part in (row.wall, row.cpu))
    return " | ".join([f"| {row.model}", row.augment, str(row.processes), *parts, ""]).rstrip()


if __name__ == "__main__":
    sys.exit(main())
