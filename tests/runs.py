"""Short runs on the digits: what they leave, and an end in their middle."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from torch import Tensor

from tokenmix.files import Values
from tokenmix.lab.train.trainer import TrainingLoop

DIGITS: Values = {"data": "digits", "model": "vit_nano", "model_kwargs": {"depth": 1}, "threads": 1, "device": "cpu"}


def train_by_transformers(model: Any, samples: list[dict[str, Any]], folder: Path, **given: Any) -> None:
    """Under transformers' Trainer, quietly, on the CPU, without files."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    quiet: Values = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(str(folder), use_cpu=True, learning_rate=0.01, **quiet, **given)
    Trainer(model=model, args=arguments, train_dataset=samples).train()  # type: ignore[arg-type]


def rows(run: Path) -> list[dict[str, str]]:
    """metrics.csv without what depends on the clock."""
    with (run / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if "second" not in k} for row in csv.DictReader(file)]


def numbers(run: Path) -> list[dict[str, float]]:
    return [{k: float(v) for k, v in row.items() if v} for row in rows(run)]


def last_weights(run: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(run / "checkpoints" / "last" / "model.safetensors")


class Killed(BaseException):
    """Stands for the end of the process: no clean-up that the code under test does must be needed."""


@contextmanager
def stopped_at(
    count: int,
    hook: str = "start_batch",
    where: type = TrainingLoop,
    error: type[BaseException] | BaseException = Killed,
) -> Iterator[None]:
    """Let a method raise the `count`-th time it is called in the block, before it does anything."""
    original, calls = getattr(where, hook), [0]

    def raising(self: object, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            raise error
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, hook, raising)
        yield
