"""Shared by the two tasks on point clouds: data, options, voting, clouds from files."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.lab.data.indexed import balanced_order, hold_out, spread
from tokenmix.lab.tasks.classes import class_counts
from tokenmix.lab.tasks.points.data import Cloud, CloudSamples, load_points, read_points
from tokenmix.lab.tasks.points.data.clouds import point_features, scale_axes, unit_ball
from tokenmix.lab.tasks.points.options import CloudOptions
from tokenmix.lab.tasks.summary import published_beside
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.task import IndexedData, TaskModule, check_names
from tokenmix.layers.base import count_parameters
from tokenmix.models.registry import create_model, create_on_meta
from tokenmix.registry import MODELS


class PointTask(TaskModule):
    """A task on point clouds, with a model of `tokenmix.models.points`.

    Attributes:
        want: the labels of the data and the output of the model, of clouds or of points.
        usual_points: of a cloud, in the data set on which such models are compared.
    """

    options: CloudOptions
    want: ClassVar[Literal["class", "parts"]]
    usual_points: ClassVar[int]
    set_elsewhere: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("num_classes", "num_parts", "num_categories"), "--data"),
        "in_chans": "--features xyz",
    }

    @classmethod
    def load_data(cls, config: TrainConfig, like: Mapping[str, Any] | None = None) -> IndexedData:
        """The clouds of `config.data.data`; with `like` as wide as that run's, and of the same classes and parts."""
        options: CloudOptions = config.options
        data = load_points(config.data.data, want=cls.want)
        if len(data.classes) < 2 and cls.want == "class":
            raise UserError(
                f"{config.data.data!r} has only the class {data.classes[0]!r}; there is nothing to classify"
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
        shared: dict[str, Any] = {
            "want": cls.want,
            "features": features,
            "num_points": options.num_points,
            "seed": config.loop.seed,
        }
        augment = {} if options.augment == "none" else {k: getattr(options, k) for k in AUGMENTATION}
        still = "farthest" if options.choice == "farthest" else "first"
        kept, held = hold_out(data.train.labels, config.data.validation, config.data.limit)
        used = kept[spread(len(kept), config.data.limit)]
        train = CloudSamples(data.train, choice=options.choice, **shared, **augment).chosen(used)
        return IndexedData(
            balanced_order(train, data.train.labels[used], getattr(options, "sampler", "shuffle")),
            CloudSamples(data.test, choice=still, **shared),
            CloudSamples(data.train, choice=still, **shared).chosen(held) if len(held) else None,
            config=config,
            description={
                "classes": data.classes,
                "counts": class_counts(data.classes, data.train.labels[used]),
                "parts": data.parts,
                "part_names": data.part_names,
                "features": features,
                "num_points": options.num_points,
                "source": data.source,
                "skipped": [asdict(s) for s in data.skipped],
            },
        )

    @classmethod
    def build_model(cls, config: TrainConfig, data: Mapping[str, Any]) -> nn.Module:
        """The model of that name for points as wide as the data's."""
        width = 3 if data["features"] == "xyz" else 6
        settings: dict[str, Any] = {**cls.answers(data), **config.model.model_kwargs}
        return create_model(config.model.model, in_chans=width, **settings)

    @classmethod
    def answers(cls, data: Mapping[str, Any]) -> dict[str, int]:
        """The number of the model's outputs, by the names of its arguments."""
        raise NotImplementedError

    @classmethod
    def check(cls, config: TrainConfig, batch_size: int) -> None:
        """Also the batch size."""
        super().check(config, batch_size)
        if batch_size < 2:
            raise UserError("BatchNorm needs at least two clouds in training; give --batch-size 2 or more")

    @classmethod
    def summarize_model(cls, name: str, sizes: Mapping[str, Any], model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Its parts for a cloud of `num_points`, and the published figures."""
        other = next((size for size in sizes if size != "num_points"), None)
        if other is not None:
            flag = f"--{other.replace('_', '-')} {sizes[other]}"
            raise UserError(f"{name} takes point clouds; give --num-points N instead of {flag}")
        n = sizes.get("num_points", cls.usual_points)
        if n < 1:
            raise UserError(f"a point cloud needs at least 1 point, got --num-points {n}")
        model: Any = create_on_meta(name, **model_kwargs)
        return {
            "model": name,
            "task": ", ".join(MODELS[name].tasks),
            "mixer": model.mixer_name,
            "points": n,
            "tokens": model.trunk.embedding.num_tokens(n),
            "parameters": count_parameters(model),
            "macs": model.macs(n),
            "blocks": [row._asdict() for row in model.cost_table(n)],
            "warnings": [],
            **published_beside(name),
        }

    def macs(self) -> int:
        """Multiply-adds of one cloud."""
        return self.model.macs(int(self.data["num_points"]))  # type: ignore[operator]

    def example(self) -> dict[str, Tensor]:
        """Two clouds of noise."""
        width = 3 if self.data["features"] == "xyz" else 6
        return {"points": torch.randn(2, int(self.data["num_points"]), width)}

    def swap_example(self) -> tuple[Tensor, ...]:
        """One cloud of noise, and the category where the model takes one."""
        return tuple(given[:1] for given in self.example().values())

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Points and mask, None if all clouds are full: statistics without a mask take less time."""
        return batch["points"], None if batch["mask"].all() else batch["mask"]

    def vote(self, answer: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
        """Logarithms of the mean probabilities of the options' votes."""
        return predict_with_tta(answer, points, self.options.votes, self.options.vote_scale)

    def read(self, file: str | Path) -> tuple[Cloud, Tensor, Tensor]:
        """The cloud of a file, in the unit ball; the points (1, n, C) that the model is given, and their indices (n,).

        Of a large cloud those are some of the points, by a fixed draw.
        """
        cloud, count = unit_ball(read_points(file, centred=True)), int(self.data["num_points"])
        drawn = torch.from_numpy(np.random.default_rng(0).permutation(len(cloud.points))[:count])
        points = point_features(cloud, self.data["features"])[drawn]
        return replace(cloud, name=str(file)), points[None].to(next(self.model.parameters())), drawn


AUGMENTATION = ("scale", "shift", "point_dropout")


def predict_with_tta(answer: Callable[[Tensor], Tensor], points: Tensor, votes: int, scale: float) -> Tensor:
    """Test-time augmentation: mean probabilities over the cloud and copies with scaled axes, as logarithms.

    The factors are the same for every cloud and in every call, so a prediction does not depend on the batch.
    """
    if votes == 1:
        return F.log_softmax(answer(points).float(), -1)
    rng = np.random.default_rng(0)
    factors = [np.ones(3), *rng.uniform(1 / scale, scale, (votes - 1, 3))]
    each = [answer(scale_axes(points, torch.from_numpy(one).to(points))).float().softmax(-1) for one in factors]
    return torch.stack(each).mean(0).clamp_min(torch.finfo(torch.float32).tiny).log()
