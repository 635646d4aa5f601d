"""Images per second of `tokenmix train` against a bare loop: `python benchmarks/training.py --help`.

Both train the same model on the same images with the same loss, optimiser and clipping, in turns and in the same
processes. The bare loop indexes normalised images in memory, and does nothing else: no augmentation, no schedule, no
log, no checkpoint; of several processes it is DistributedDataParallel. The trainer is `tokenmix.train.train` as the
command calls it; its rate is read from its own metrics.csv, from the first row on, so that neither its start nor its
evaluation counts. Several processes are started by torchrun.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tokenmix.cost.other_work import OtherWork
from tokenmix.data.images import ImageData, load_images
from tokenmix.data.images.augment import make_augment
from tokenmix.data.images.samples import normalize
from tokenmix.environment import environment
from tokenmix.errors import UserError
from tokenmix.models import create_model
from tokenmix.train import train
from tokenmix.train.config import TrainConfig
from tokenmix.train.distributed import broadcast_object, distributed_info, process_group
from tokenmix.train.files import disk_remedy, make_folder, replace_file
from tokenmix.train.optimizer import make_optimizer
from tokenmix.train.sources import make_config

SCHEMA = 2
LOG_EVERY = 20


@dataclass(frozen=True)
class Row:
    """Images per second of both, over all processes, one value a round; `ratio` is the median of the rounds' own."""

    model: str
    augment: str
    processes: int
    bare: list[float]
    trainer: list[float]
    ratio: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write it as JSON if asked for. 2: a mistake on the command line; 130: Ctrl-C."""
    try:
        return _run(_parser().parse_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; no file is written", file=sys.stderr)
        return 130


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
            rows.append(_measure(_config(options, model, augment), options.rounds))
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
        return [Row(**row) for row in json.loads(out.read_text())["rows"]]


def _write(options: argparse.Namespace, rows: list[Row]) -> None:
    settings = {"batch_size": options.batch_size, "steps": options.steps, "data": options.data}
    document = {"schema": SCHEMA, **settings, "rows": [asdict(row) for row in rows], "environment": environment()}
    try:
        replace_file(options.out, (json.dumps(document, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"{options.out} could not be written ({error.strerror}): {disk_remedy(error)}") from None


def _check(options: argparse.Namespace) -> None:
    """Reported before minutes are spent on measuring."""
    for name in ("batch_size", "rounds", "threads"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if min(options.processes) < 1:
        raise UserError(f"--processes must be at least 1, got {min(options.processes)}")
    if options.steps < 2 * LOG_EVERY:
        raise UserError(
            f"--steps must be at least {2 * LOG_EVERY}, got {options.steps}: rates are taken between two logs"
        )
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
    parser.add_argument("--steps", type=int, default=5 * LOG_EVERY, help=f"steps of a round, {2 * LOG_EVERY} at least")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; in each, both run once")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, of each process")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser


def _config(options: argparse.Namespace, model: str, augment: str) -> TrainConfig:
    return make_config(
        model=model, augment=augment, data=options.data, batch_size=options.batch_size, max_steps=options.steps,
        log_every=LOG_EVERY, limit_eval=options.batch_size, threads=options.threads, device="cpu",
    )  # fmt: skip


def _measure(config: TrainConfig, rounds: int) -> Row:
    loop = BareLoop(config)
    bare, trainer = [], []
    for round_ in range(rounds):
        # Who begins changes, so that a machine that warms up or slows down favours nobody.
        for side in ("bare", "trainer") if round_ % 2 else ("trainer", "bare"):
            if side == "bare":
                bare.append(loop.rate())
            else:
                trainer.append(trainer_rate(config))
    ratio = statistics.median(ours / floor for ours, floor in zip(trainer, bare))
    return Row(config.model.model, config.options.augment, distributed_info().world_size, bare, trainer, ratio)


class BareLoop:
    """A model and an optimiser of its own, and the training images as normalised floats."""

    def __init__(self, config: TrainConfig) -> None:
        data: ImageData = load_images(
            config.data.data, limit=config.data.limit, limit_eval=config.data.limit_eval, seed=config.loop.seed
        )
        pixels, _ = data.train.pixels(
            torch.arange(min(len(data.train), (config.loop.max_steps or 1) * config.loop.batch_size))
        )
        self.images, self.labels = normalize(pixels, data.mean, data.std), data.train.labels[: len(pixels)]
        self.config = config
        self.model: nn.Module = create_model(
            config.model.model, num_classes=len(data.classes), in_chans=data.channels, img_size=data.img_size
        )
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.model)
        self.optimizer = make_optimizer(self.model, config.optim)

    def rate(self) -> float:
        """Images per second of the steps after the first `LOG_EVERY`, which are the trainer's share too."""
        self.model.train()
        size, steps = self.config.loop.batch_size, self.config.loop.max_steps or 1
        order = torch.randperm(len(self.images))
        start = 0.0
        for step in range(steps - 1):
            if step == LOG_EVERY:
                start = time.perf_counter()
            self._step(order[step * size : (step + 1) * size])
        return (steps - 1 - LOG_EVERY) * size * distributed_info().world_size / (time.perf_counter() - start)

    def _step(self, places: Tensor) -> None:
        logits = self.model(self.images[places])
        loss = F.cross_entropy(logits, self.labels[places], label_smoothing=self.config.options.smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        if self.config.optim.clip_grad is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_grad)
        self.optimizer.step()


def trainer_rate(config: TrainConfig) -> float:
    """Images per second between the first row of metrics.csv and the last one of training."""
    with tempfile.TemporaryDirectory() as folder:
        # All processes train in the first one's folder, and read it before it goes.
        run = train(config.replace(out=broadcast_object(Path(folder)) / "run"), quiet=True)
        with (run / "metrics.csv").open(newline="") as lines:
            rows = [row for row in csv.DictReader(lines) if row["train_loss"]]
        if dist.is_initialized():
            dist.barrier()
    first, last = rows[0], rows[-1]
    return (int(last["images"]) - int(first["images"])) / (float(last["seconds"]) - float(first["seconds"]))


def _line(row: Row) -> str:
    bare, ours = statistics.median(row.bare), statistics.median(row.trainer)
    return f"| {row.model} | {row.augment} | {row.processes} | {bare:,.0f} | {ours:,.0f} | {row.ratio:.3f} |"


if __name__ == "__main__":
    sys.exit(main())
