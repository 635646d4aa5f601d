"""Point segmentation: the part that each point of a cloud of known category belongs to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError, unknown_name
from tokenmix.lab.tasks.points.data import NO_PART, Cloud, write_ply
from tokenmix.lab.tasks.points.output import cloud_image, colors_of, draw_cloud
from tokenmix.lab.tasks.points.task import PointTask
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.metrics import ClassCounts, CrossEntropy, Metric, Sums, accuracy_of, class_counts, iou_of
from tokenmix.lab.train.predictions import SampledMetric, quotient
from tokenmix.lab.train.programs import Shown
from tokenmix.ops.points import nearest_neighbours


def cloud_iou(answered: Tensor, part: Tensor, label: Tensor, allowed: Tensor) -> Tensor:
    """The intersection over union of each cloud (B,), a mean over the parts of its category.

    As ShapeNet-part defines it, a part of its category that a cloud neither has nor is given counts as 1.

    Args:
        answered: (B, N), predicted parts.
        part: (B, N), true parts, negative where a row is padded.
        label: (B,), categories.
        allowed: (C, P) bool, which parts a category has.
    """
    each = iou_of(class_counts(answered, part, allowed.shape[1], NO_PART)).nan_to_num(1.0)
    return (each * allowed[label]).sum(1) / allowed[label].sum(1)


class CategoryIoU(Sums):
    """The mean IoU over all clouds, over the means of the categories that occur, and that of each category."""

    higher_is_better = True
    names = ("instance_miou", "category_miou", "iou_by_category")

    def __init__(self, num_categories: int) -> None:
        super().__init__(2, num_categories)

    def update(self, iou: Tensor, label: Tensor) -> None:
        """Add clouds: what `cloud_iou` gives, and their categories."""
        empty = iou.new_zeros(self.shape[1])
        self.add(torch.stack([empty.index_add(0, label, values) for values in (iou, torch.ones_like(iou))]))

    def compute(self) -> dict[str, Tensor]:
        """All three; -1 for a category without clouds."""
        total, clouds = self.total()
        means = total / clouds
        values = (total.sum() / clouds.sum(), means.nanmean(), means.nan_to_num(-1.0))
        return dict(zip(self.names, values, strict=True))


class PointSegmentation(PointTask):
    """A part for each point, by cross-entropy over all parts; predictions are among those of the cloud's category.

    In `predict`, a file is named as `CATEGORY=FILE`. Without a category the one is taken whose prediction is the most
    confident, which is a guess, and the prediction says so.
    """

    monitor: str = "instance_miou"
    mode: Literal["max", "min"] = "max"
    tables: ClassVar[frozenset[str]] = frozenset({"iou_by_category", "iou_by_part"})
    want: ClassVar[Literal["class", "parts"]] = "parts"
    usual_points: ClassVar[int] = 2048
    writes: ClassVar[bool] = True

    def __init__(self, model: Any, config: TrainConfig, data: Mapping[str, Any]) -> None:
        super().__init__(model, config, data)
        allowed = torch.zeros(len(data["classes"]), len(data["part_names"]), dtype=torch.bool)
        for row, name in zip(allowed, data["classes"]):
            row[data["parts"][name]] = True
        self.register_buffer("allowed", allowed, persistent=False)

    @classmethod
    def answers(cls, data: Mapping[str, Any]) -> dict[str, int]:
        """One logit for each part, for clouds of these categories."""
        return {"num_parts": len(data["part_names"]), "num_categories": len(data["classes"])}

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy over the points, padding left out."""
        points, mask = self.inputs(batch)
        logits = self.model(points, batch["label"], mask).float()
        self._check_parts(batch)
        entropy = F.cross_entropy(logits.flatten(0, 1), batch["part"].flatten(), ignore_index=NO_PART)
        return self.part_weight * entropy, {}

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Points, padding left out."""
        return int((batch["part"] != NO_PART).sum())

    def evaluate(self, batch: Mapping[str, Tensor]) -> None:
        """The votes on each point, among the parts of its category, against its part."""
        points, mask = self.inputs(batch)
        self._check_parts(batch)
        label, part, real = batch["label"], batch["part"], batch["part"] != NO_PART
        scores = self.vote(lambda cloud: self.model(cloud, label, mask), points)
        among = self._among(scores, label)
        answered = among.argmax(-1)
        allowed: Tensor = self.allowed  # type: ignore[assignment]
        iou = cloud_iou(answered, part, label, allowed)
        self.metrics["clouds"].update(iou, label)
        self.metrics["parts"].update(answered, part)
        self.metrics["loss"].update(scores[real], part[real])
        if self.kept is not None:
            entropy = F.cross_entropy(scores.transpose(1, 2), part, ignore_index=NO_PART, reduction="none").sum(1)
            counts = class_counts(answered, part, allowed.shape[1], NO_PART)
            self.keep(index=batch["index"], label=label.short(), iou=iou, counts=counts.int(), loss=entropy)

    @classmethod
    def sampled_metric(
        cls, predictions: Mapping[str, Tensor], metric: str, data: Mapping[str, Any]
    ) -> SampledMetric | None:
        """Each number of `make_metrics`."""
        index, iou, label = predictions["index"], predictions["iou"].double(), predictions["label"].long()
        counts = predictions["counts"].double()
        if metric == "instance_miou":
            return SampledMetric.mean(index, iou)
        points, kinds = counts[:, 1].sum(1), F.one_hot(label, len(data["classes"])).double()

        def category_miou(sums: Tensor) -> Tensor:
            total, clouds = sums.chunk(2, 1)
            return (total / clouds).nanmean(1)

        functions = {
            "category_miou": (torch.cat([kinds * iou[:, None], kinds], 1), category_miou),
            "part_miou": (counts.flatten(1), lambda sums: iou_of(sums.unflatten(1, (3, -1))).nanmean(1)),
            "accuracy": (torch.stack([counts[:, 0].sum(1), points], 1), quotient),
            "loss": (torch.stack([predictions["loss"].double(), points], 1), quotient),
        }
        return SampledMetric.of_sums(index, *functions[metric]) if metric in functions else None

    def make_metrics(self) -> dict[str, Metric]:
        """Mean IoU over clouds, categories and parts, accuracy of points, loss; IoU of each category and part."""
        measures = {
            "part_miou": lambda counts: iou_of(counts).nanmean(-1),
            "accuracy": accuracy_of,
            # -1 stands for a part that is nowhere.
            "iou_by_part": lambda counts: iou_of(counts).nan_to_num(-1.0),
        }
        return {
            "clouds": CategoryIoU(len(self.data["classes"])),
            "parts": ClassCounts(len(self.data["part_names"]), measures, NO_PART),
            "loss": CrossEntropy(),
        }

    @torch.no_grad()
    def show(self, batch: Mapping[str, Tensor]) -> list[Shown]:
        """Each cloud in the colours of its parts, and of those predicted."""
        points, mask = self.inputs(batch)
        scores = self.vote(lambda cloud: self.model(cloud, batch["label"], mask), points)
        answered = self._among(scores, batch["label"]).argmax(-1)
        found = []
        for cloud, parts, answer in zip(batch["points"].cpu(), batch["part"].cpu(), answered.cpu()):
            real = parts != NO_PART
            truth, prediction = (cloud_image(cloud[real], given[real]) for given in (parts, answer))
            found.append(Shown(None, truth, prediction))
        return found

    def example(self) -> dict[str, Tensor]:
        """Two clouds of noise, of the first category and the last."""
        return {**super().example(), "category": torch.tensor([0, len(self.data["classes"]) - 1])}

    def predict(self, inputs: Sequence[str | Path]) -> list[dict[str, Any]]:
        """The shares of the parts of each file."""
        return [self._told(*self._answer(given)) for given in inputs]

    def predict_into(self, inputs: Sequence[str | Path], out: Path) -> list[dict[str, Any]]:
        """The same, with each cloud as a coloured PLY and an image."""
        answers = []
        for number, given in enumerate(inputs):
            cloud, category, guessed, parts = self._answer(given)
            stem = f"{number:04d}-{Path(cloud.name).stem}" if len(inputs) > 1 else Path(cloud.name).stem
            coloured = write_ply(out / f"{stem}-parts.ply", cloud.points, colors_of(parts))
            names = {self.data["part_names"][i]: i for i in parts.unique().tolist()}
            picture = draw_cloud(out / f"{stem}-parts.png", cloud.points, parts, names)
            told = self._told(cloud, category, guessed, parts)
            answers.append({**told, "cloud": str(coloured), "picture": str(picture)})
        return answers

    @torch.no_grad()
    def _answer(self, given: str | Path) -> tuple[Cloud, str, bool, Tensor]:
        """The cloud, its category, whether that was guessed, and the part of each of its points."""
        self.eval()
        classes: list[str] = self.data["classes"]
        name, told, file = str(given).partition("=")
        if told and name not in classes and not Path(str(given)).exists():
            raise unknown_name("category", name, classes)
        known = told and name in classes
        cloud, given_points, places = self.read(file if known else given)
        tried = [classes.index(name)] if known else range(len(classes))
        best: tuple[float, int, Tensor] | None = None
        for place in tried:
            label = torch.tensor([place], device=given_points.device)
            scores = self.vote(lambda points, label=label: self.model(points, label), given_points)
            scores = self._among(scores, label)
            sure, parts = scores.max(-1)
            if best is None or sure.mean().item() > best[0]:
                best = (sure.mean().item(), place, parts[0])
        assert best is not None
        # A point that the model was not given has the part of the nearest one that it was.
        points = cloud.points[None]
        nearest = nearest_neighbours(points, points[:, places], 1)[0, :, 0]
        return cloud, classes[best[1]], not known and len(classes) > 1, best[2].cpu()[nearest]

    def _told(self, cloud: Cloud, category: str, guessed: bool, parts: Tensor) -> dict[str, Any]:
        names: list[str] = self.data["part_names"]
        shares = torch.bincount(parts, minlength=len(names)) / len(parts)
        there = {name: round(share, 4) for name, share in zip(names, shares.tolist()) if share}
        return {
            "file": cloud.name,
            "category": category,
            "category_from": "guess" if guessed else "given",
            "points": len(parts),
            "parts": there,
        }

    def _among(self, scores: Tensor, label: Tensor) -> Tensor:
        allowed: Tensor = self.allowed  # type: ignore[assignment]
        return scores.masked_fill(~allowed[label].unsqueeze(1), -torch.inf)

    def _check_parts(self, batch: Mapping[str, Tensor]) -> None:
        part, allowed = batch["part"], self.allowed
        assert isinstance(allowed, Tensor)
        inside = (part >= 0) & (part < allowed.shape[1])
        fits = allowed[batch["label"]].gather(1, part.where(inside, 0)) & inside | (part == NO_PART)
        if not fits.all():
            row = int((~fits).any(1).nonzero()[0])
            wrong, category = part[row][~fits[row]][0].item(), self.data["classes"][int(batch["label"][row])]
            raise UserError(
                f"cloud {int(batch['index'][row])} is a {category!r} and has a point of part {wrong}; the category has "
                f"the parts {', '.join(map(str, self.data['parts'][category]))}: correct its labels"
            )
