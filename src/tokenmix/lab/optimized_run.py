"""`tokenmix eval RUN --optimize`."""

from pathlib import Path
from typing import Any

from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.inference.operators import Dtype
from tokenmix.inference.optimizing import optimize
from tokenmix.lab.train.run import evaluate
from tokenmix.lab.train.task import TaskData, TaskModule

CALIBRATION = 128
"""Training images that fix the ranges; with 16 the accuracy was the same to 0.001 (dev/LOG.md, 2026-11-21)."""


def evaluate_optimized(run: Path, data: str | None = None, *, dtype: Dtype, limit: int | None = None) -> dict[str, Any]:
    """Metrics of `tokenmix.optimize`'s copy of a run's model; other arguments as in `tokenmix.lab.train.run.evaluate`.

    Raises:
        UserError: a task whose model does not take a batch of images.
    """

    def change(task: TaskModule, data: TaskData) -> None:
        task.model = optimize(task.model, _examples(task, data), dtype, measure=False)

    return {"optimize": dtype, **evaluate(run, data, device="cpu", limit=limit, change=change)}


def _examples(task: TaskModule, data: TaskData) -> Tensor:
    count = min(CALIBRATION, data.num_train)
    batch = next(iter(data.train_batches(batch_size=count, epoch=0, start=0)))
    images = batch.get("image") if isinstance(batch, dict) else None
    if not isinstance(images, Tensor):
        raise UserError(f"{type(task).__name__} is not trained on batches of images; leave --optimize out")
    return images
