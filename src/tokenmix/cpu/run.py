"""`tokenmix eval RUN --weights int8`."""

from pathlib import Path
from typing import Any

from torch import Tensor

from tokenmix.cpu.quantizing import quantize
from tokenmix.errors import UserError
from tokenmix.train.run import evaluate as evaluate_run
from tokenmix.train.task import TaskData, TaskModule

__all__ = ["CALIBRATION", "evaluate"]

CALIBRATION = 128
"""Training images that fix the ranges; with 16 the accuracy was the same to 0.001 (LOG.md, 2026-11-21)."""


def evaluate(run: Path, data: str | None = None, *, limit: int | None = None) -> dict[str, Any]:
    """Metrics of the int8 copy of a run's model, on the CPU; arguments as in `tokenmix.train.run.evaluate`.

    Raises:
        UserError: a task whose model does not take a batch of images.
    """
    return {"weights": "int8", **evaluate_run(run, data, device="cpu", limit=limit, change=_to_int8)}


def _to_int8(task: TaskModule, data: TaskData) -> None:
    count = min(CALIBRATION, data.num_train)
    batch = next(iter(data.train_batches(batch_size=count, epoch=0, start=0)))
    images = batch.get("image") if isinstance(batch, dict) else None
    if not isinstance(images, Tensor):
        raise UserError(f"{type(task).__name__} does not learn from batches of images; leave --weights float32")
    task.model = quantize(task.model, images)
