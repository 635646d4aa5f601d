"""Images per second of `tokenmix train` against a bare loop: `python benchmarks/training.py --help`.

Both train the same model on the same images with the same loss, optimiser and clipping, in turns and in one process.
The bare loop indexes normalised images that lie in memory, and does nothing else: no augmentation, no schedule, no log,
no checkpoint. The trainer is `tokenmix.train.train` as the command calls it; its rate is read from its own metrics.csv,
from the first row on, so that neither its start nor its evaluation counts.
"""

import argparse
import csv
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.cost.other_work import OtherWork
from tokenmix.data.images import ImageData, load_images
from tokenmix.data.images.augment import make_augment
from tokenmix.data.images.samples import normalize
from tokenmix.environment import environment
from tokenmix.errors import UserError
from tokenmix.models import create_model
from tokenmix.train import train
from tokenmix.train.config import TrainConfig
from tokenmix.train.files import disk_remedy, make_folder, replace_file
from tokenmix.train.optimizer import make_optimizer
from tokenmix.train.sources import make_config

SCHEMA = 1
LOG_EVERY = 20


@dataclass(frozen=True)
class Row:
    """Images per second of both, a value for each round; `ratio` is the median of the rounds' own ratios."""

    model: str
    augment: str
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
    rows, others = [], OtherWork()
    for model in options.models:
        for augment in options.augment:
            rows.append(_measure(_config(options, model, augment), options.rounds))
            print(_line(rows[-1]), flush=True)
    if options.out is not None:
        settings = {"batch_size": options.batch_size, "steps": options.steps, "data": options.data}
        document = {"schema": SCHEMA, **settings, "rows": [asdict(row) for row in rows], "environment": environment()}
        try:
            replace_file(options.out, (json.dumps(document, indent=1) + "\n").encode())
        except OSError as error:
            raise UserError(f"{options.out} could not be written ({error.strerror}): {disk_remedy(error)}") from None
    if warning := others.warning(options.threads):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Reported before minutes are spent on measuring."""
    for name in ("batch_size", "rounds", "threads"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
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
    parser.add_argument("--batch-size", type=int, default=64, help="images of a step")
    parser.add_argument("--steps", type=int, default=5 * LOG_EVERY, help=f"steps of a round, {2 * LOG_EVERY} at least")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; in each, both run once")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
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
    ratios = [ours / floor for ours, floor in zip(trainer, bare)]
    return Row(config.model.model, config.options.augment, bare, trainer, statistics.median(ratios))


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
        self.model = create_model(
            config.model.model, num_classes=len(data.classes), in_chans=data.channels, img_size=data.img_size
        )
        self.optimizer = make_optimizer(self.model, config.optim)

    def rate(self) -> float:
        """Images per second of the steps behind the first `LOG_EVERY`, the trainer's share as well."""
        self.model.train()
        size, steps = self.config.loop.batch_size, self.config.loop.max_steps or 1
        order = torch.randperm(len(self.images))
        start = 0.0
        for step in range(steps - 1):
            if step == LOG_EVERY:
                start = time.perf_counter()
            self._step(order[step * size : (step + 1) * size])
        return (steps - 1 - LOG_EVERY) * size / (time.perf_counter() - start)

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
        run = train(config.replace(out=Path(folder) / "run"), quiet=True)
        with (run / "metrics.csv").open(newline="") as lines:
            rows = [row for row in csv.DictReader(lines) if row["train_loss"]]
    first, last = rows[0], rows[-1]
    return (int(last["images"]) - int(first["images"])) / (float(last["seconds"]) - float(first["seconds"]))


def _line(row: Row) -> str:
    bare, ours = statistics.median(row.bare), statistics.median(row.trainer)
    return f"| {row.model} | {row.augment} | {bare:,.0f} | {ours:,.0f} | {row.ratio:.3f} |"


if __name__ == "__main__":
    sys.exit(main())
