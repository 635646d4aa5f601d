"""A task, its data and its model, as somebody outside the package writes them: how bright a row of pixels is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tokenmix.lab.registry import TASKS, TaskEntry
from tokenmix.lab.train.metrics import Metric
from tokenmix.lab.train.task import TaskData, TaskModule
from tokenmix.registry import MODELS, ModelEntry

WIDTH = 8


class Rows(TaskData):
    """Random rows; the order is a function of (seed, epoch)."""

    num_train, num_test, unit = 64, 16, "rows"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def describe(self) -> dict[str, Any]:
        return {"width": WIDTH, "source": "random numbers"}

    def train_batches(self, *, batch_size: int, epoch: int, start: int) -> Iterator[Tensor]:
        rows = torch.rand(self.num_train, WIDTH, generator=torch.Generator().manual_seed(100 * self.seed + epoch))
        yield from rows.split(batch_size)[start : self.num_train // batch_size]

    def test_batches(self, *, batch_size: int) -> DataLoader[Any]:
        return DataLoader(torch.rand(self.num_test, WIDTH, generator=torch.Generator().manual_seed(7)), batch_size)  # type: ignore[arg-type]


class Brightness(TaskModule):
    """The mean of a row."""

    monitor = "mse"

    @classmethod
    def load_data(cls, config: Any, like: Any = None) -> Rows:
        return Rows(config.loop.seed)

    @classmethod
    def build_model(cls, config: Any, data: Any) -> nn.Module:
        return make_line(width=data["width"], **config.model.model_kwargs)

    def loss(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return (self.model(batch).squeeze(1) - batch.mean(1)).square().mean(), {}

    def evaluate(self, batch: Tensor) -> dict[str, Tensor]:
        return {"error": (self.model(batch).squeeze(1) - batch.mean(1)).square()}

    @classmethod
    def make_metrics(cls, config: Any, data: Any) -> dict[str, Metric]:
        return {"mse": Metric.mean(lambda rows: rows["error"], higher_is_better=False)}

    @torch.no_grad()
    def predict(self, inputs: Any) -> list[dict[str, Any]]:
        rows = [torch.tensor([float(word) for word in Path(file).read_text().split()]) for file in inputs]
        return [{"file": str(f), "brightness": float(self.model(row))} for f, row in zip(inputs, rows, strict=True)]


def make_line(width: int = WIDTH, bias: bool = True) -> nn.Module:
    return nn.Linear(width, 1, bias=bias)


TASKS.register(TaskEntry(name="brightness", about="how bright a row is; squared error", task=Brightness))
MODELS.register(ModelEntry(name="toy_line", tasks=("brightness",), about="a weighted mean", build=make_line))
