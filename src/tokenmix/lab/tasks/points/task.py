"""Point classification and segmentation: data, voting, files, images."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import Values, save_figure
from tokenmix.lab.data.indexed import balanced_order, hold_out, spread
from tokenmix.lab.tasks.classes import ClassTask, likeliest, told, train_counts
from tokenmix.lab.tasks.points import CloudClassificationOptions, CloudOptions
from tokenmix.lab.tasks.points.clouds import (
    NO_PART,
    Cloud,
    CloudSamples,
    choose_points,
    load_points,
    point_features,
    scale_axes,
    unit_ball,
)
from tokenmix.lab.tasks.points.files import read_points
from tokenmix.lab.tasks.points.ply import write_ply
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distillation import DistillingTask
from tokenmix.lab.train.metrics import Metric, Rows, accuracy_of, class_counts, iou_of, joined, quotient
from tokenmix.lab.train.programs import Description, PlainSamples, Shown, check_sizes, counted_summary
from tokenmix.lab.train.task import IndexedData, TaskModule, check_names
from tokenmix.models.foreign import create_foreign_points
from tokenmix.models.registry import create_model, create_on_meta
from tokenmix.ops.points import nearest_neighbours
from tokenmix.registry import Arguments, is_foreign


class PointTask(TaskModule):
    """A task on point clouds, with a model of `tokenmix.models.points` or of a user's function."""

    options: CloudOptions
    want: ClassVar[Literal["class", "parts"]]  # level of labels and outputs, clouds or points
    outputs: ClassVar[Mapping[str, str]]  # model arguments that count names in the data's description
    usual_points: ClassVar[int]  # points per cloud in the data set on which such models are compared
    set_elsewhere: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("num_classes", "num_parts", "num_categories"), "--data"),
        "in_chans": "--features xyz",
    }

    @classmethod
    def load_data(cls, config: TrainConfig, like: Description | None = None) -> IndexedData:
        """Clouds of `config.data.data`; with `like`, with that run's features, classes and parts."""
        options: CloudOptions = config.options
        data = load_points(config.data.data, want=cls.want)
        if len(data.classes) < 2 and cls.want == "class":
            raise UserError(
                f"{config.data.data!r} has only the class {data.classes[0]!r}; give data of two classes or more"
            )
        if like is not None:
            check_names(config.data.data, data.classes, like["classes"])
            check_names(config.data.data, data.part_names, like["part_names"], "parts")
        features = options.features if like is None else like["features"]
        if features == "auto":
            features = "xyz+normals" if data.has_normals else "xyz"
        elif features == "xyz+normals" and not data.has_normals:
            told = (
                "give --features xyz"
                if like is None
                else "and the run was trained with them; add them, or give other data"
            )
            raise UserError(f"{config.data.data!r} has clouds without normals; {told}")
        shared: Values = {
            "want": cls.want,
            "features": features,
            "num_points": options.num_points,
            "choice": options.choice,
        }
        light = () if options.augment == "none" else ("scale", "shift", "point_dropout")
        augment = {name: getattr(options, name) for name in light}
        kept, held = hold_out(data.train.labels, config.data.validation, config.data.limit, data.groups)
        used = kept[spread(len(kept), config.data.limit)]
        train = CloudSamples(data.train, seed=config.loop.seed, **shared, **augment).chosen(used)
        return IndexedData(
            balanced_order(train, data.train.labels[used], getattr(options, "sampler", "shuffle")),
            CloudSamples(data.test, **shared),  # The same points for every seed.
            CloudSamples(data.train, **shared).chosen(held) if len(held) else None,
            config=config,
            description={
                "classes": data.classes,
                "counts": train_counts(data.classes, data.train.labels[used]),
                "parts": data.parts,
                "part_names": data.part_names,
                "features": features,
                "num_points": options.num_points,
                "source": data.source,
                "skipped": [asdict(s) for s in data.skipped],
            },
        )

    @classmethod
    def build_model(cls, config: TrainConfig, data: Description) -> nn.Module:
        name, kwargs = config.model.model, config.model.model_kwargs
        width = 3 if data["features"] == "xyz" else 6
        outputs = {argument: len(data[names]) for argument, names in cls.outputs.items()}
        if not is_foreign(name):
            return create_model(name, in_chans=width, **outputs, **kwargs)
        # Most networks call the number of parts num_classes.
        outputs = {"num_classes": outputs.get("num_parts"), **outputs}
        sizes: Values = {"in_chans": width, "num_points": int(data["num_points"]), "outputs": outputs}
        return create_foreign_points(name, **sizes, per_point=cls.want == "parts", **kwargs)

    @classmethod
    def summarize_model(cls, name: str, sizes: Arguments, model_kwargs: Arguments) -> Values:
        check_sizes(sizes, ("num_points",), f"{name} takes point clouds, whose size is --num-points N")
        n = sizes.get("num_points", cls.usual_points)
        if n < 1:
            raise UserError(f"a point cloud needs at least 1 point, got --num-points {n}; give 1 or more")
        model: Any = create_on_meta(name, **model_kwargs)
        return counted_summary(name, model, {"points": n, "tokens": model.trunk.embedding.num_tokens(n)}, n)

    def macs(self) -> int | None:
        if is_foreign(self.config.model.model):
            return None
        return self.model.macs(int(self.data["num_points"]))  # type: ignore[operator]

    def example(self) -> dict[str, Tensor]:
        width = 3 if self.data["features"] == "xyz" else 6
        return {"points": torch.randn(2, int(self.data["num_points"]), width)}

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Points, and the mask, or None if all clouds are full: statistics are faster without a mask."""
        return batch["points"], None if batch["mask"].all() else batch["mask"]

    def vote(self, answer: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
        """Test-time augmentation: log of mean probabilities over copies with scaled axes, by fixed factors."""
        votes, scale = self.options.votes, self.options.vote_scale
        if votes == 1:
            return F.log_softmax(answer(points).float(), -1)
        rng = np.random.default_rng(0)
        factors = [np.ones(3), *rng.uniform(1 / scale, scale, (votes - 1, 3))]
        each = [answer(scale_axes(points, torch.from_numpy(one).to(points))).float().softmax(-1) for one in factors]
        return torch.stack(each).mean(0).clamp_min(torch.finfo(torch.float32).tiny).log()

    def read(self, file: str | Path) -> tuple[Cloud, Tensor, Tensor]:
        """A file's cloud in the unit ball; the model's input (1, n, C), and its indices (n,), as in evaluation."""
        cloud, count = unit_ball(read_points(file, centred=True)), int(self.data["num_points"])
        (chosen,) = choose_points([cloud.points], count, self.options.choice, lambda _: np.random.default_rng(0))
        points = point_features(cloud, self.data["features"])[chosen]
        return replace(cloud, name=str(file)), points[None].to(next(self.model.parameters())), chosen


class PointClassification(PointTask, ClassTask):
    """One class per cloud, by cross-entropy with label smoothing; evaluation may average votes."""

    options: CloudClassificationOptions  # pyrefly: ignore[bad-override-mutable-attribute]
    same_inputs: ClassVar[Mapping[str, str]] = {"features": "--features"}
    want: ClassVar[Literal["class", "parts"]] = "class"
    outputs: ClassVar[Mapping[str, str]] = {"num_classes": "classes"}
    usual_points: ClassVar[int] = 1024
    baselines: ClassVar[tuple[str, ...]] = ("majority", "nearest mean")

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        points, mask = self.inputs(batch)
        logits, smoothing = self.model(points, mask).float(), self.options.smoothing
        return self.distilled(self.class_loss(logits, batch["label"], smoothing), logits, batch)

    def teacher_logits(self, teacher: DistillingTask, batch: Mapping[str, Tensor]) -> Tensor:
        return teacher.model(*self.inputs(batch))

    def logarithms(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Log-probabilities (B, classes), averaged over votes."""
        points, mask = self.inputs(batch)
        return self.vote(lambda cloud: self.model(cloud, mask), points)

    def evaluate(self, batch: Mapping[str, Tensor]) -> Rows:
        return self.judged(self.logarithms(batch), batch["label"], batch["index"])

    def plain_samples(self, data: IndexedData, part: Literal["train", "test"]) -> Iterator[PlainSamples]:
        """Ten quantiles of each cloud's distances from the centre and the axes."""
        shares = torch.linspace(0.05, 0.95, 10)
        if part == "train":
            data = self.load_data(self.config.replace(augment="none"), like=self.data)
        for batch in data.batches_of(part, 64):
            xyz = batch["points"][..., :3].float().masked_fill(~batch["mask"].bool()[..., None], torch.nan)
            sizes = torch.cat([xyz.abs(), xyz.norm(dim=-1, keepdim=True)], -1)
            yield PlainSamples(sizes.nanquantile(shares, dim=1).permute(1, 0, 2).flatten(1), batch["label"])

    def show(self, batch: Mapping[str, Tensor]) -> list[Shown]:
        found = []
        for points, mask, label, logs in zip(batch["points"], batch["mask"], batch["label"], self.logarithms(batch)):
            cloud = points[mask].cpu()
            image = cloud_image(cloud, torch.zeros(len(cloud), dtype=torch.long))
            found.append(Shown(image, self.classes[label], told(likeliest(logs.exp().cpu(), self.classes))))
        return found

    def predict(self, inputs: Sequence[str | Path]) -> list[Values]:
        answers = []
        for file in inputs:
            cloud, points, _ = self.read(file)
            probabilities = self.vote(self.model, points)[0].exp()
            answers.append({"file": cloud.name, **likeliest(probabilities, self.classes, points=len(cloud.points))})
        return answers


def cloud_iou(answered: Tensor, part: Tensor, label: Tensor, allowed: Tensor) -> Tensor:
    """Intersection over union of each cloud (B,), averaged over the parts of its category.

    As in ShapeNet-part, a part of its category that neither occurs nor is predicted counts as 1.

    Shape: answered and true parts (B, N), negative at padding, label (B,), allowed (C, P) bool, the categories' parts.
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
            own = data["parts"].get(name)
            if own is None or any(index >= len(row) for index in own):
                raise UserError(f"data.json is damaged: {name!r} does not have its parts in it; put a whole one back")
            row[own] = True
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
        return self._judged_parts(self._scores(points, batch["label"], mask), batch)

    def plain_answers(self, data: IndexedData) -> dict[str, Rows]:
        """For each point the most frequent part of its category."""
        counts = torch.zeros(self.allowed.shape, dtype=torch.float64)
        for batch in data.batches_of("train", 64):
            known = batch["part"] != NO_PART
            places = batch["label"][:, None].expand_as(known)[known], batch["part"][known].long()
            counts.index_put_(places, counts.new_ones(()), accumulate=True)
        logs = (counts.clamp_min(1) / counts.sum(1, keepdim=True).clamp_min(1)).log().float()[:, None]
        tests = data.test_batches(batch_size=64)
        rows = [self._judged_parts(logs[some["label"]].expand(*some["part"].shape, -1), some) for some in tests]
        return {"majority": joined(rows)}

    def _judged_parts(self, scores: Tensor, batch: Mapping[str, Tensor]) -> Rows:
        """Evaluation rows of log-probabilities (B, N, P) of the points of a batch."""
        label, part, allowed = batch["label"], batch["part"], self.allowed.to(scores.device)
        answered = self._of_category(scores, label).argmax(-1)
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
        scores, found = self._scores(points, batch["label"], mask), []
        answered = self._of_category(scores, batch["label"]).argmax(-1)
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

    def _scores(self, points: Tensor, label: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-probabilities (B, N, P) of all parts, averaged over votes."""
        return self.vote(lambda cloud: self.model(cloud, label, mask), points)

    def _of_category(self, scores: Tensor, label: Tensor) -> Tensor:
        """The scores, -inf for parts that the category of a cloud lacks."""
        return scores.masked_fill(~self.allowed.to(scores.device)[label].unsqueeze(1), -torch.inf)

    def predict(self, inputs: Sequence[str | Path]) -> list[Values]:
        return [self._answer(given)[2] for given in inputs]

    def predict_into(self, inputs: Sequence[str | Path], out: Path) -> list[Values]:
        """The same; also writes each cloud as a coloured PLY, in the file's units about its centre, and an image."""
        answers = []
        for number, given in enumerate(inputs):
            cloud, parts, told = self._answer(given)
            stem = f"{number:04d}-{Path(cloud.name).stem}" if len(inputs) > 1 else Path(cloud.name).stem
            placed = read_points(cloud.name, centred=True).points
            coloured = write_ply(out / f"{stem}-parts.ply", placed, colors_of(parts))
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
        cloud, points, chosen = self.read(file if known else given)
        candidates: list[tuple[float, str, Tensor]] = []
        for category in [name] if known else classes:
            label = torch.tensor([classes.index(category)], device=points.device)
            sure, parts = self._of_category(self._scores(points, label), label).max(-1)
            candidates.append((sure.mean().item(), category, parts[0].cpu()))
        _, category, parts = max(candidates, key=itemgetter(0))
        # A point outside the model's input has the part of the nearest point in the input.
        parts = parts[nearest_neighbours(cloud.points[None], cloud.points[None, chosen], 1)[0, :, 0]]
        shares = torch.bincount(parts, minlength=len(names)) / len(parts)
        answer = {
            "file": cloud.name,
            "category": category,
            "category_from": "given" if known or len(classes) == 1 else "guess",
            "points": len(parts),
            "parts": {name: round(share, 4) for name, share in zip(names, shares.tolist()) if share},
        }
        return cloud, parts, answer

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


def colors_of(parts: Tensor) -> Tensor:
    """Colours uint8 (N, 3) of parts (N,); a part has the same colour everywhere."""
    import matplotlib as mpl

    table = torch.tensor(mpl.colormaps["tab20"].colors).mul(255).round().byte()  # type: ignore[attr-defined]
    # Strong colours first; matplotlib alternates strong and pale ones.
    order = torch.cat([torch.arange(0, 20, 2), torch.arange(1, 20, 2)])
    return table[order[parts % 20]]


def _scatter(axis: Any, points: Tensor, parts: Tensor, turn: float) -> None:
    """Draw at most 4,000 points on a three-dimensional axis."""
    step = -(-len(points) // 4000)
    x, y, z = points[::step, :3].unbind(1)
    axis.scatter(x, z, -y, c=colors_of(parts[::step]).float().div(255).numpy(), s=4, linewidths=0, depthshade=False)
    axis.set_box_aspect([max(float(side.max() - side.min()), 1e-3) for side in (x, z, y)])
    axis.set_axis_off()
    axis.view_init(elev=25, azim=turn)


def cloud_image(points: Tensor, parts: Tensor) -> Image.Image:
    """A small image of the cloud, with parts in colours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6, 1.6))
    buffer = io.BytesIO()
    _scatter(figure.add_axes((0, 0, 1, 1), projection="3d"), points, parts, -60)
    figure.savefig(buffer, dpi=100, format="png")
    return Image.open(buffer).convert("RGB")


def draw_cloud(path: Path, points: Tensor, parts: Tensor, names: Mapping[str, int]) -> Path:
    """An image of the cloud from two sides, with the names of its parts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    for place, turn in enumerate((-60, 120)):
        _scatter(figure.add_subplot(1, 2, place + 1, projection="3d"), points, parts, turn)
    for name, number in names.items():
        figure.axes[0].plot([], [], "o", color=colors_of(torch.tensor([number]))[0].div(255).tolist(), label=name)
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False)
    save_figure(figure, path, dpi=110)
    return path
