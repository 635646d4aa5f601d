"""A task under Lightning's own Trainer, with its callbacks and loggers and without a run folder."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DistributedSampler

from tokenmix.errors import UserError
from tokenmix.lab.train.plan import Configured
from tokenmix.lab.train.programs import Batch
from tokenmix.lab.train.task import TaskModule


class LightningTask(L.LightningModule):
    """A task as a LightningModule.

    Logs have the names of metrics.csv: train_* for each batch, val_* for each evaluation. The learning-rate schedule
    covers the Trainer's estimated number of steps.
    """

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task
        self.automatic_optimization = task.automatic_optimization

    def configure_optimizers(self) -> Configured:  # type: ignore[override]
        self.task.total_steps = int(self.trainer.estimated_stepping_batches)
        if (epochs := self.trainer.max_epochs or 0) > 0:
            self.task.total_epochs = float(epochs)
        return self.task.configure_optimizers()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """The task's step; the loss is weighted by the batch's share of the samples on all ranks."""
        optimizers: Any = self.optimizers()
        self.task.optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        own = self.task.count(batch)
        if own is not None:
            counts = self.all_gather(torch.tensor(float(own), device=self.device))
            assert isinstance(counts, Tensor)
            self.task.part_weight = own / (float(counts.mean()) or 1.0)
        outputs = self.task.training_step(batch, batch_idx)
        self.log_dict({f"train_{name}": value for name, value in outputs["logs"].items()})
        return outputs.get("loss")

    def on_validation_epoch_start(self) -> None:
        """`UserError` for Lightning's own sampler on several devices, which repeats batches to make them even."""
        samplers = [getattr(loader, "sampler", None) for loader in tree_leaves(self.trainer.val_dataloaders)]
        if any(isinstance(one, DistributedSampler) and one.num_replicas > 1 for one in samplers):
            raise UserError(
                "Lightning's sampler gives several devices the same samples; evaluate with "
                "Trainer(use_distributed_sampler=False) and loaders of data.part(rank, devices)"
            )
        self.task.on_validation_epoch_start()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.task.validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        """Log the numbers; tables stay in `task.results`."""
        self.task.on_validation_epoch_end()
        self.log_dict({f"val_{name}": self.task.results[name] for name in self.task.numbers()})
