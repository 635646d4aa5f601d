"""Point classification: one class for each cloud; cross-entropy, and the metrics of classes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.lab.tasks.classes import ClassTask, likeliest, told
from tokenmix.lab.tasks.points.output import cloud_image
from tokenmix.lab.tasks.points.task import PointTask
from tokenmix.lab.train.distillation import DistillingTask
from tokenmix.lab.train.metrics import Rows
from tokenmix.lab.train.programs import PlainSamples, Shown
from tokenmix.lab.train.task import IndexedData, TaskData


class PointClassification(PointTask, ClassTask):
    """One class for each cloud, by cross-entropy with label smoothing; an evaluation may take the mean of votes."""

    want: ClassVar[Literal["class", "parts"]] = "class"
    usual_points: ClassVar[int] = 1024
    baselines: ClassVar[tuple[str, ...]] = ("majority", "nearest mean")

    @classmethod
    def answers(cls, data: Mapping[str, Any]) -> dict[str, int]:
        """One logit for each class."""
        return {"num_classes": len(data["classes"])}

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of the clouds' classes."""
        points, mask = self.inputs(batch)
        logits, smoothing = self.model(points, mask).float(), self.config.options.smoothing
        return self.distilled(lambda: self.class_loss(logits, batch["label"], smoothing), logits, batch)

    def teacher_logits(self, teacher: DistillingTask, batch: Mapping[str, Tensor]) -> Tensor:
        """On the same points."""
        return teacher.model(*self.inputs(batch))

    def check_teacher(self, teacher: DistillingTask, data: TaskData) -> None:
        """Classes and features of the points must be the same."""
        super().check_teacher(teacher, data)
        if teacher.data["features"] != self.data["features"]:
            raise UserError(
                f"the teacher {self.config.options.teacher} was trained on {teacher.data['features']}; give --features "
                f"{teacher.data['features']}"
            )

    def evaluate(self, batch: Mapping[str, Tensor]) -> Rows:
        """The votes on each cloud against its class."""
        points, mask = self.inputs(batch)
        return self.judged(self.vote(lambda cloud: self.model(cloud, mask), points), batch["label"], batch["index"])

    def plain_samples(self, data: IndexedData, part: Literal["train", "test"]) -> Iterator[PlainSamples]:
        """Of each cloud how far its points are from the centre and from the axes: ten quantiles of each."""
        shares = torch.linspace(0.05, 0.95, 10)
        for batch in data.batches_of(part, 64):
            places = batch["points"][..., :3].float().masked_fill(~batch["mask"].bool()[..., None], torch.nan)
            sizes = torch.cat([places.abs(), places.norm(dim=-1, keepdim=True)], -1)
            yield PlainSamples(sizes.nanquantile(shares, dim=1).permute(1, 0, 2).flatten(1), batch["label"])

    @torch.no_grad()
    def show(self, batch: Mapping[str, Tensor]) -> list[Shown]:
        """Each cloud, and the names of its class and of the likeliest one."""
        points, mask = self.inputs(batch)
        probabilities = self.vote(lambda cloud: self.model(cloud, mask), points).exp().cpu()
        classes = self.data["classes"]
        return [
            Shown(
                cloud_image(cloud[there.bool()].cpu(), torch.zeros(int(there.sum()), dtype=torch.long)),
                classes[int(label)],
                told(likeliest(row, classes)),
            )
            for cloud, there, label, row in zip(batch["points"], batch["mask"], batch["label"], probabilities)
        ]

    @torch.no_grad()
    def predict(self, inputs: Sequence[str | Path]) -> list[dict[str, Any]]:
        """Label, its probability and the five most probable classes of each file: PLY, OFF, OBJ, NPZ and others."""
        self.eval()
        classes, answers = self.data["classes"], []
        for file in inputs:
            cloud, points, _ = self.read(file)
            probabilities = self.vote(self.model, points)[0].exp()
            answers.append({"file": cloud.name, **likeliest(probabilities, classes, points=len(cloud.points))})
        return answers
