"""Knowledge distillation from a trained model, by its logits or layer by layer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from tokenmix.distillation.outputs import distillation_loss, layer_loss, watched_layers
from tokenmix.errors import UserError
from tokenmix.files import Values
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.metrics import Metric, Rows, num_rows
from tokenmix.lab.train.programs import Batch, Description
from tokenmix.lab.train.task import TaskData, TaskModule


class DistillingTask(TaskModule, ABC):
    """A task with one logit per class. It can learn from a teacher's logits, with or without labels.

        loss = (1 - w) L(labels) + w T^2 KL(softmax(t / T) || softmax(s / T)),   w = `distill`, T = `temperature`

    With `distill_from="layers"` the loss is `layer_loss` over the swapped layers, without labels. `layer_loss` on the
    validation samples then picks the best checkpoint, unless `--monitor` is given.
    """

    # Entries of a description that a teacher's inputs must match, with the option that sets each.
    same_inputs: ClassVar[Mapping[str, str]] = {}

    def __init__(self, model: nn.Module, config: TrainConfig, data: Description) -> None:
        super().__init__(model, config, data)
        # The frozen trained task with its model; None without a teacher, and when a run is only evaluated.
        self.teacher: DistillingTask | None = None
        self.swapped: Sequence[str] = ()  # names of the swapped layers

    @abstractmethod
    def teacher_logits(self, teacher: "DistillingTask", batch: Batch) -> Tensor:
        """Logits (rows, classes) of a teacher for a training batch of this task, preprocessed for the teacher."""

    @classmethod
    def named_teacher(cls, name: str, config: TrainConfig, data: Description) -> Self:
        """A pretrained model by name, as a task for data of this description."""
        raise UserError(f"no run folder {name}; the teacher of {config.task} is a run of the same task")

    def find_teacher(self) -> "DistillingTask":
        """The model of the option `teacher`: a run folder, or a name for `named_teacher`. Not checked yet."""
        folder = RunFolder.of(self.options.teacher)
        if not folder.path.is_dir():
            return self.named_teacher(self.options.teacher, self.config, self.data)
        teacher = load_task(folder)
        if not isinstance(teacher, type(self)):
            raise UserError(
                f"the teacher {self.options.teacher} is a run of {teacher.config.task}; give one of {self.config.task}"
            )
        return teacher

    def check_teacher(self, teacher: "DistillingTask", data: TaskData) -> None:
        """Raise `UserError` if the teacher has other classes or takes other inputs."""
        ours, theirs = (task.data.get("classes") for task in (self, teacher))
        if ours != theirs:
            raise UserError(
                f"the teacher {self.options.teacher} knows other classes: {theirs}, the data has {ours}; "
                "give one that was trained on this data"
            )
        for name, option in self.same_inputs.items():
            ours, theirs = (task.data[name] for task in (self, teacher))
            if ours != theirs:
                raise UserError(
                    f"the teacher {self.options.teacher} was trained with {name}={theirs} and this run has {ours}; "
                    f"give another {option}, or another teacher"
                )

    def learn_from(self, teacher: "DistillingTask", data: TaskData, swapped: Sequence[str]) -> None:
        """Set the teacher; `UserError` if it does not fit."""
        self.check_teacher(teacher, data)
        if self.options.distill_from == "layers":
            known = dict(teacher.model.named_modules())
            other = next((name for name in swapped if name not in known), None)
            if other is not None:
                raise UserError(
                    f"the teacher {self.options.teacher} has no layer {other!r}; distill_from=layers pairs layers by "
                    "name, so the teacher is the run that --init-from names"
                )
            self.metrics["layer_loss"] = Metric.mean(lambda rows: rows["layer_loss"], higher_is_better=False)
            self.watch(self.config.loop.monitor or "layer_loss")
        self.teacher, self.swapped = teacher.eval().requires_grad_(False), swapped

    def distilled(
        self, loss: Tensor, logits: Tensor, batch: Batch, count: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, with the teacher's term if there is a teacher, and values for the log.

        `loss` is the loss on labels, unused at weight 1. Sums over rows are divided by `count`, or the number of rows.
        """
        if self.teacher is None:
            return loss, {}
        with torch.no_grad():
            wanted = self.teacher_logits(self.teacher, batch)
        divergence = distillation_loss(logits, wanted, self.options.temperature, count)
        share = self.options.distill
        total = divergence if share == 1 else (1 - share) * loss + share * divergence
        return total, {"distillation": divergence.detach()}

    def training_step(self, batch: Batch, batch_idx: int) -> Values:
        if self.teacher is None or self.options.distill_from == "logits":
            return super().training_step(batch, batch_idx)
        loss = self._layer_loss(self.teacher, batch)
        return {"loss": loss, "logs": {"loss": loss.detach()}}

    def rows_of(self, batch: Batch) -> Rows:
        """Rows of every task; distillation by layers adds the batch's layer loss to each sample."""
        rows = super().rows_of(batch)
        if self.teacher is None or self.options.distill_from == "logits":
            return rows
        return {**rows, "layer_loss": self._layer_loss(self.teacher, batch).float().expand(num_rows(rows))}

    def _layer_loss(self, teacher: "DistillingTask", batch: Batch) -> Tensor:
        with watched_layers(teacher.model, self.swapped) as calls:
            self.teacher_logits(teacher, batch)
        return layer_loss(self.model, calls)
