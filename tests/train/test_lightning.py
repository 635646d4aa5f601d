"""A task trains under Lightning's own Trainer, in a script without tokenmix's loop."""

import csv
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenmix.errors import UserError
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.plan import seed_everything
from tokenmix.lab.train.sources import make_config

L = pytest.importorskip("lightning")

CONFIG = make_config(data="digits", model="vit_nano", model_kwargs={"depth": 1}, limit=64, limit_eval=32, threads=1)


def under_lightning(config: TrainConfig, folder: Path) -> tuple[Any, list[dict[str, str]]]:
    """The task after two epochs of four batches, and the rows of Lightning's metrics.csv."""
    from lightning.pytorch.loggers import CSVLogger

    from tokenmix.lab.train.lightning import LightningTask

    kind = get_task(config.task)
    data = kind.load_data(config)
    description = data.describe()
    seed_everything(0, 0, 0)
    task = LightningTask(kind(kind.build_model(config, description), config, description))
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, data.train_batches(batch_size=16, epoch=0, start=0), data.test_batches(batch_size=16))
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open(newline="") as file:
        return task, list(csv.DictReader(file))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_image_classification_under_lightnings_trainer(tmp_path: Path):
    quick = CONFIG.replace(lr=1e-2, warmup_steps=1, augment="none", smoothing=0.0)
    task, rows = under_lightning(quick, tmp_path)
    assert task.trainer.global_step == 8
    losses = [float(row["train_loss"]) for row in rows if row["train_loss"]]
    assert len(losses) == 8
    # The same samples in both epochs.
    assert sum(losses[4:]) < sum(losses[:4])
    evaluated = [row for row in rows if row["val_accuracy"]]
    assert len(evaluated) == 2
    assert float(evaluated[-1]["val_accuracy"]) == pytest.approx(task.task.results["accuracy"])
    assert "confusion" in task.task.results, "a table stays with the task"
    # The schedule covers the eight steps that the Trainer estimates.
    schedule = task.lr_schedulers()
    assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    assert schedule.get_last_lr()[0] == pytest.approx(CONFIG.optim.min_lr)


def test_lightnings_sampler_for_several_devices_is_refused():
    """It makes the parts even by repeating batches, whose rows would be added."""
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    from tokenmix.lab.train.lightning import LightningTask

    kind = get_task(CONFIG.task)
    data = kind.load_data(CONFIG)
    task = LightningTask(kind(kind.build_model(CONFIG, data.describe()), CONFIG, data.describe()))
    loader = data.test_batches(batch_size=16)
    wrapped = [DistributedSamplerWrapper(loader.sampler, count, 0) for count in (1, 2)]
    for sampler, refused in [(loader.sampler, False), (wrapped[0], False), (wrapped[1], True)]:
        given = torch.utils.data.DataLoader(loader.dataset, batch_size=None, sampler=sampler)
        task.trainer = SimpleNamespace(val_dataloaders=given)  # type: ignore[assignment]
        with pytest.raises(UserError, match="use_distributed_sampler=False") if refused else nullcontext():
            task.on_validation_epoch_start()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_optimisers_under_lightnings_trainer(tmp_path: Path):
    config = make_config(
        "image-generation",
        data="digits",
        model="eagan_nano",
        model_kwargs={"width": 8, "latent_dim": 8},
        img_size=32,
        limit=64,
        limit_eval=32,
        threads=1,
    )
    task, rows = under_lightning(config, tmp_path)
    assert task.trainer.global_step == 16, "each batch steps the discriminator and the generator"
    assert len([row for row in rows if row["train_d_loss"]]) == 8
    assert all(parameter.requires_grad for parameter in task.task.model.parameters())
