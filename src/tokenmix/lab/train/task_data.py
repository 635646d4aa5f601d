"""Indexed samples as the data of a task, and whether other data has the classes that a run was trained on."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tokenmix.errors import UserError
from tokenmix.lab.data.indexed import IndexedDataset, subset
from tokenmix.lab.data.loader import make_loader
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.task import TaskData


class IndexedData(TaskData):
    """Samples for training and testing.

    Args:
        train: samples to learn from.
        test: samples to report metrics on.
        validation: those of the training samples that are held out to choose by, read as `test` is; None for none.
        config: the run's config; its limits are taken here.
        description: what the run folder keeps as well as the numbers of samples.
    """

    # Of image tasks the images themselves, for a report that shows some.
    images: Any = None

    def __init__(
        self,
        train: IndexedDataset,
        test: IndexedDataset,
        validation: IndexedDataset | None,
        *,
        config: TrainConfig,
        description: dict[str, Any],
    ) -> None:
        self.unit = train.unit
        self.train = subset(train, config.data.limit)
        self.test = subset(test, config.data.limit_eval)
        self.validation = validation
        self.num_train, self.num_test = len(self.train), len(self.test)
        self.num_validation = 0 if validation is None else len(validation)
        counts = {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}
        self.description = {**counts, **description}
        self._shared: dict[str, Any] = {
            "seed": config.loop.seed,
            "workers": config.data.workers,
            "pin_memory": torch.cuda.is_available(),
        }

    def describe(self) -> dict[str, Any]:
        """Numbers of samples, and what the task added."""
        return self.description

    def train_batches(self, *, batch_size: int, epoch: int, start: int) -> Iterable[Any]:
        """Full batches of an epoch from batch `start` on."""
        loader = make_loader(
            self.train, batch_size=batch_size, shuffle=True, drop_last=True, start_batch=start, **self._shared
        )
        loader.set_epoch(epoch)
        return loader

    def test_batches(self, *, batch_size: int) -> Iterable[Any]:
        """The test samples in their order."""
        return make_loader(self.test, batch_size=batch_size, shuffle=False, **self._shared)

    def validation_batches(self, *, batch_size: int) -> Iterable[Any]:
        """The validation samples in their order."""
        assert self.validation is not None
        return make_loader(self.validation, batch_size=batch_size, shuffle=False, **self._shared)

    def part(self, rank: int, world_size: int) -> "IndexedData":
        """The same samples, of which this process reads its share."""
        if self.num_test < world_size:
            raise UserError(f"{self.num_test} test {self.unit} are too few for {world_size} processes; give more")
        if 0 < self.num_validation < world_size:
            raise UserError(
                f"{self.num_validation} validation {self.unit} are too few for {world_size} processes; give "
                f"--validation {world_size} or more, or 0 for none"
            )
        other = copy.copy(self)
        other._shared = {**self._shared, "rank": rank, "world_size": world_size}
        return other


def check_names(spec: str, found: Sequence[str], trained: Sequence[str], what: str = "classes") -> None:
    """Raise `UserError` unless both are the same names in one order.

    Args:
        spec: the data, as the user named it.
        found: names that the data has.
        trained: names in the run.
        what: they are names of.
    """
    if list(found) != list(trained):
        raise UserError(f"{spec!r} has the {what} {_first(found)}; the run was trained on {_first(trained)}")


def _first(names: Sequence[str]) -> str:
    return (", ".join(names[:3]) or "none") + (f", ... ({len(names)})" if len(names) > 3 else "")
