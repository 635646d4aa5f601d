"""A task far from classification fits the seam: two networks, two optimisers, steps of its own; it resumes as well."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tokenmix.errors import UserError
from tokenmix.lab.registry import TASKS, TaskEntry, get_task, list_tasks
from tokenmix.lab.train import trainer
from tokenmix.lab.train.checkpoint import read_weights
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.metrics import Metric
from tokenmix.lab.train.run import evaluate, predict, train
from tokenmix.lab.train.sources import make_config
from tokenmix.lab.train.task import TaskData, TaskModule


class Numbers(TaskData):
    """Normal numbers around 3; the order is a function of (seed, epoch)."""

    num_train, num_validation, num_test = 40, 8, 16

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def describe(self) -> dict[str, Any]:
        return {"mean": 3.0}

    def train_batches(self, *, batch_size: int, epoch: int, start: int) -> Iterator[torch.Tensor]:
        values = 3 + torch.randn(self.num_train, 1, generator=torch.Generator().manual_seed(100 * self.seed + epoch))
        yield from values.split(batch_size)[start : self.num_train // batch_size]

    def test_batches(self, *, batch_size: int) -> list[torch.Tensor]:
        return [torch.full((self.num_test, 1), 3.0)]

    def validation_batches(self, *, batch_size: int) -> list[torch.Tensor]:
        return [torch.full((self.num_validation, 1), 3.0)]


class Adversaries(TaskModule):
    """A generator that shifts noise, and a discriminator that tells its numbers from real ones."""

    monitor = "distance"
    automatic_optimization = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    @classmethod
    def load_data(cls, config: Any, like: Any = None) -> Numbers:
        return Numbers(config.loop.seed)

    @classmethod
    def build_model(cls, config: Any, data: Any) -> nn.Module:
        return nn.ModuleDict({"generator": nn.Linear(1, 1), "discriminator": nn.Linear(1, 1)})

    def configure_optimizers(self) -> Any:
        networks = (self.model["generator"], self.model["discriminator"])  # type: ignore[index]
        return [torch.optim.Adam(network.parameters(), lr=self.config.optim.lr) for network in networks]

    def loss(self, batch: torch.Tensor) -> Any:
        raise NotImplementedError("each network has its own")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        fake = self.model["generator"](torch.randn_like(batch))  # type: ignore[index]
        judge = self.model["discriminator"]  # type: ignore[index]
        losses = [
            F.softplus(-judge(fake)).mean(),
            F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(batch)).mean(),
        ]
        for optimizer, loss in zip(self.optimizers, losses):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"logs": {"loss": losses[0].detach(), "judge_loss": losses[1].detach()}}

    def evaluate(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"distance": (self.model["generator"](torch.zeros_like(batch)) - batch).abs()}  # type: ignore[index]

    @classmethod
    def make_metrics(cls, config: Any, data: Any) -> dict[str, Metric]:
        return {"distance": Metric.mean(lambda rows: rows["distance"].mean(1), higher_is_better=False)}

    def predict(self, files: Any) -> list[dict[str, Any]]:
        return [{"file": str(file)} for file in files]


CONFIG = TrainConfig(task="adversaries").replace(
    data="numbers", batch_size=8, epochs=3, lr=0.1, device="cpu", threads=1
)
CONFIG = CONFIG.replace(checkpoint_every=2, log_every=1)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    list_tasks()  # Before the copy: importing what registers must not fall into it.
    monkeypatch.setattr(TASKS, "_entries", dict(TASKS._entries))
    TASKS.register(TaskEntry(name="adversaries", about="two networks", task=Adversaries))


def test_two_networks_train_evaluate_and_resume(tmp_path, monkeypatch):
    whole = train(CONFIG.replace(out=tmp_path / "whole"), quiet=True)
    result = json.loads((whole / "result.json").read_text())
    assert result["steps"] == 15
    header, *rows = [line.split(",") for line in (whole / "metrics.csv").read_text().splitlines()]
    assert header[-3:] == ["train_loss", "train_judge_loss", "val_distance"]
    distances = [float(row[-1]) for row in rows if row[-1]]
    assert len(distances) == 3
    assert result["metrics"]["distance"] == min(distances), "less distance is better"
    assert result["best_epoch"] == 1 + distances.index(min(distances))
    assert evaluate(whole, device="cpu")["distance"] == pytest.approx(result["metrics"]["distance"])
    assert predict(whole, [tmp_path / "a"])[0]["file"].endswith("a")

    step = trainer.TrainingLoop.start_batch

    def killed(self, *args):
        if self.progress.step == 8:
            raise KeyError("killed")
        step(self, *args)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(trainer.TrainingLoop, "start_batch", killed)
        with pytest.raises(KeyError):
            train(CONFIG.replace(out=run), quiet=True)
    train(make_config(resume=run), quiet=True)
    weights, expected = read_weights(run / "checkpoints" / "last"), read_weights(whole / "checkpoints" / "last")
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


def test_the_table_of_tasks():
    assert "image-classification" in list_tasks()
    for entry in TASKS:
        task = get_task(entry.name)
        assert issubclass(task, TaskModule)
        assert task.monitor
        assert entry.about
    with pytest.raises(UserError, match="unknown task 'adversary'; did you mean adversaries"):
        get_task("adversary")
