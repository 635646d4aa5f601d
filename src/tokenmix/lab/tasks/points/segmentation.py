"""Point segmentation: the part of each point of a cloud of known category."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import Values
from tokenmix.lab.tasks.points.data import NO_PART, Cloud, write_ply
from tokenmix.lab.tasks.points.task import PointTask, cloud_image, colors_of, draw_cloud
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.metrics import Metric, Rows, accuracy_of, class_counts, iou_of, joined, quotient
from tokenmix.lab.train.programs import Description, Shown
from tokenmix.lab.train.task import IndexedData
from tokenmix.ops.points import nearest_neighbours


def cloud_iou(answered: Tensor, part: Tensor, label: Tensor, allowed: Tensor) -> Tensor:
    """Intersection over union of each cloud (B,), averaged over the parts of its category.

    As in ShapeNet-part, a part of its category that neither occurs nor is predicted counts as 1.

    Args:
        answered: (B, N), predicted parts.
        part: (B, N), true parts, negative at padding.
        label: (B,), categories.
        allowed: (C, P) bool, the parts of each category.
    """
    each = iou_of(class_counts(answered, part, allowed.shape[1], NO_PART)).nan_to_num(1.0)
    return (each * allowed[label]).sum(1) / allowed[label].sum(1)


class PointSegmentation(PointTask):
    """A part per point, by cross-entropy over all parts; predictions are limited to the parts of the cloud's category.

    `predict` takes files as `CATEGORY=FILE`. Without a category, the category with the most confident prediction is
    guessed, and the prediction says so.
    """

    monitor: str = "instance_miou"
    want: ClassVar[Literal["class", "parts"]] = "parts"
    outputs: ClassVar[Mapping[str, str]] = {"num_parts": "part_names", "num_categories": "classes"}
    usual_points: ClassVar[int] = 2048
    allowed: Tensor

    def __init__(self, model: nn.Module, config: TrainConfig, data: Description) -> None:
        super().__init__(model, config, data)
        allowed = torch.zeros(len(data["classes"]), len(data["part_names"]), dtype=torch.bool)
        for row, name in zip(allowed, data["classes"]):
            row[data["parts"][name]] = True
        self.register_buffer("allowed", allowed, persistent=False)

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        points, mask = self.inputs(batch)
        logits = self.model(points, batch["label"], mask).float()
        self._check_parts(batch)
        entropy = F.cross_entropy(logits.flatten(0, 1), batch["part"].flatten(), ignore_index=NO_PART)
        return self.part_weight * entropy, {}

    def count(self, batch: Mapping[str, Tensor]) -> int:
        return int((batch["part"] != NO_PART).sum())

    def evaluate(self, batch: Mapping[str, Tensor]) -> Rows:
        points, mask = self.inputs(batch)
        self._check_parts(batch)
        return self._judged_parts(self.parts_of(points, batch["label"], mask)[0], batch)

    def plain_answers(self, data: IndexedData) -> dict[str, Rows]:
        """For each point the most frequent part of its category."""
        counts = torch.zeros(self.allowed.shape[1], dtype=torch.float64)
        for batch in data.batches_of("train", 64):
            counts += batch["part"][batch["part"] != NO_PART].bincount(minlength=len(counts))
        logs = (counts.clamp_min(1) / counts.sum()).log().float()
        tests = data.test_batches(batch_size=64)
        rows = [self._judged_parts(logs.expand(*batch["part"].shape, -1), batch) for batch in tests]
        return {"majority": joined(rows)}

    def _judged_parts(self, scores: Tensor, batch: Mapping[str, Tensor]) -> Rows:
        """Evaluation rows of log-probabilities (B, N, P) of the points of a batch."""
        label, part, allowed = batch["label"], batch["part"], self.allowed.to(scores.device)
        answered = scores.masked_fill(~allowed[label].unsqueeze(1), -torch.inf).argmax(-1)
        return {
            "index": batch["index"],
            "label": label.short(),
            "iou": cloud_iou(answered, part, label, allowed),
            "counts": class_counts(answered, part, allowed.shape[1], NO_PART).int(),
            "loss": F.cross_entropy(scores.transpose(1, 2), part, ignore_index=NO_PART, reduction="none").sum(1),
        }

    @classmethod
    def make_metrics(cls, config: TrainConfig, data: Description) -> dict[str, Metric]:
        """Mean IoU over clouds, categories and parts, accuracy, loss; IoU of each, nan (null in JSON) if absent."""

        def by_category(rows: Rows) -> Tensor:
            kinds = F.one_hot(rows["label"].long(), len(data["classes"])).double()
            return torch.stack([kinds * rows["iou"].double()[:, None], kinds], 1)

        def losses(rows: Rows) -> Tensor:
            return torch.stack([rows["loss"].double(), rows["counts"][:, 1].sum(1).double()], 1)

        counts = itemgetter("counts")
        return {
            "instance_miou": Metric.mean(itemgetter("iou")),
            "category_miou": Metric.of_sums(lambda sums: quotient(sums).nanmean(-1), by_category),
            "iou_by_category": Metric.of_sums(quotient, by_category, names=()),
            "part_miou": Metric.of_sums(lambda sums: iou_of(sums).nanmean(-1), counts),
            "accuracy": Metric.of_sums(accuracy_of, counts),
            "iou_by_part": Metric.of_sums(iou_of, counts, names=()),
            "loss": Metric.of_sums(quotient, losses, higher_is_better=False),
        }

    def show(self, batch: Mapping[str, Tensor]) -> list[Shown]:
        points, mask = self.inputs(batch)
        answered, found = self.parts_of(points, batch["label"], mask)[1].argmax(-1), []
        for cloud, parts, answer in zip(batch["points"].cpu(), batch["part"].cpu(), answered.cpu()):
            real = parts != NO_PART
            truth, prediction = (cloud_image(cloud[real], given[real]) for given in (parts, answer))
            there = torch.cat([parts[real], answer[real]]).unique()
            names = [self.data["part_names"][i] for i in there.tolist()]
            colors = ["#{:02x}{:02x}{:02x}".format(*color) for color in colors_of(there).tolist()]
            found.append(Shown(None, truth, prediction, dict(zip(names, colors))))
        return found

    def example(self) -> dict[str, Tensor]:
        return {**super().example(), "category": torch.tensor([0, len(self.data["classes"]) - 1])}

    def parts_of(self, points: Tensor, label: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, N, P) of all parts, and of the parts of the cloud's category only."""
        scores = self.vote(lambda cloud: self.model(cloud, label, mask), points)
        return scores, scores.masked_fill(~self.allowed[label].unsqueeze(1), -torch.inf)

    def predict(self, inputs: Sequence[str | Path]) -> list[Values]:
        return [self._answer(given)[2] for given in inputs]

    def predict_into(self, inputs: Sequence[str | Path], out: Path) -> list[Values]:
        """The same; also writes each cloud as a coloured PLY and an image."""
        answers = []
        for number, given in enumerate(inputs):
            cloud, parts, told = self._answer(given)
            stem = f"{number:04d}-{Path(cloud.name).stem}" if len(inputs) > 1 else Path(cloud.name).stem
            coloured = write_ply(out / f"{stem}-parts.ply", cloud.points, colors_of(parts))
            names = {self.data["part_names"][i]: i for i in parts.unique().tolist()}
            picture = draw_cloud(out / f"{stem}-parts.png", cloud.points, parts, names)
            answers.append({**told, "cloud": str(coloured), "picture": str(picture)})
        return answers

    def _answer(self, given: str | Path) -> tuple[Cloud, Tensor, Values]:
        """The cloud, the part of each point, and the printed values."""
        classes, names = self.data["classes"], self.data["part_names"]
        name, told, file = str(given).partition("=")
        if told and name not in classes and not Path(str(given)).exists():
            raise unknown_name("category", name, classes)
        known = told and name in classes
        cloud, points, places = self.read(file if known else given)
        best: tuple[float, str, Tensor] | None = None
        for category in [name] if known else classes:
            label = torch.tensor([classes.index(category)], device=points.device)
            sure, parts = self.parts_of(points, label)[1].max(-1)
            if best is None or sure.mean().item() > best[0]:
                best = (sure.mean().item(), category, parts[0].cpu())
        assert best is not None
        # A point outside the model's input has the part of the nearest point in the input.
        nearest = nearest_neighbours(cloud.points[None], cloud.points[None, places], 1)[0, :, 0]
        parts = best[2][nearest]
        shares = torch.bincount(parts, minlength=len(names)) / len(parts)
        return (
            cloud,
            parts,
            {
                "file": cloud.name,
                "category": best[1],
                "category_from": "given" if known or len(classes) == 1 else "guess",
                "points": len(parts),
                "parts": {name: round(share, 4) for name, share in zip(names, shares.tolist()) if share},
            },
        )

    def _check_parts(self, batch: Mapping[str, Tensor]) -> None:
        part, allowed = batch["part"], self.allowed
        inside = (part >= 0) & (part < allowed.shape[1])
        fits = allowed[batch["label"]].gather(1, part.where(inside, 0)) & inside | (part == NO_PART)
        if not fits.all():
            row = int((~fits).any(1).nonzero()[0])
            wrong, category = part[row][~fits[row]][0].item(), self.data["classes"][int(batch["label"][row])]
            raise UserError(
                f"cloud {int(batch['index'][row])} is a {category!r} and has a point of part {wrong}; the category has "
                f"the parts {', '.join(map(str, self.data['parts'][category]))}: correct its labels"
            )
