"""Feature networks of the metrics: a classifier trained by tokenmix, or Inception if its weights can be fetched."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError, needs, unknown_name
from tokenmix.files import replacing
from tokenmix.lab.data.fetch import FetchError, check_digest, download, log
from tokenmix.lab.tasks.generation.metrics import class_score, frechet_distance, kernel_distance
from tokenmix.lab.train.load import load_run
from tokenmix.lab.train.metrics import Metric

FEATURES = ("real_features", "fake_features")
INCEPTION = "inception"
WEIGHTS = "weights-inception-2015-12-05-6726825d.pth"
HOME = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{WEIGHTS}"
CONTENT = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
"""SHA-256 of that file, which torch-fidelity unpickles."""
# Usual for the Inception Score.
SPLITS = 10


class Features(ABC):
    """A classifier in two parts, and the metrics that rest on it.

    Attributes:
        monitor: the metric that picks the best epoch.
        least: the fewest images that the metrics can be had of.
    """

    monitor: ClassVar[str]
    least: ClassVar[int]

    @staticmethod
    @abstractmethod
    def make_metrics() -> dict[str, Metric]:
        """New metrics by their names."""

    def check(self, classes: Sequence[str], channels: int) -> None:
        """Raise `UserError` unless images of these classes and channels can be evaluated."""
        return

    def wanted(self, labels: Tensor) -> Tensor:
        """The classifier's numbers of the classes that `check` was given last."""
        return labels

    @abstractmethod
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, d) and logits (B, K) of images (B, C, S, S) in -1 .. 1."""


def features_kind(source: str) -> type[Features]:
    """The feature network: Inception if that is the source's name, else the classifier of a run folder."""
    return InceptionFeatures if source == INCEPTION else RunFeatures


def make_features(source: str) -> Features:
    """The judge itself, with its weights."""
    return InceptionFeatures() if source == INCEPTION else RunFeatures(Path(source))


class RunFeatures(Features):
    """What the classifier of a run folder says, and the features before its last layer."""

    monitor: ClassVar[str] = "feature_fd"
    least: ClassVar[int] = 2

    def __init__(self, run: Path) -> None:
        self.run = run
        try:
            model, config, self.data = load_run(run)
        except UserError as error:
            raise UserError(f"features={error}; give a run folder of image-classification") from None
        if config.task != "image-classification":
            raise UserError(f"features={run} is a run of {config.task}; give a run folder of image-classification")
        if not hasattr(model, "forward_head"):
            raise UserError(
                f"features={run}: {config.model.model} has no feature extraction; give a run of a tokenmix model"
            )
        self.model = model.requires_grad_(False)
        self.numbers = torch.arange(len(self.data["classes"]))

    @staticmethod
    def make_metrics() -> dict[str, Metric]:
        """Named apart from FID, KID and the Inception Score, with which they share the formulas and nothing else."""
        return {
            "feature_fd": Metric.of_columns(frechet_distance, *FEATURES, higher_is_better=False),
            "feature_kd": Metric.of_columns(kernel_distance, *FEATURES, higher_is_better=False),
            "class_score": Metric.of_columns(class_score, "logits"),
            "class_match": Metric.mean(lambda rows: rows["logits"].argmax(-1) == rows["wanted"]),
        }

    def check(self, classes: Sequence[str], channels: int) -> None:
        known = list(self.data["classes"])
        for name in classes:
            if name not in known:
                raise unknown_name(f"class for the classifier features={self.run}:", name, known)
        if self.data["channels"] != channels:
            raise UserError(
                f"features={self.run} was trained on images of {self.data['channels']} channel(s), these have "
                f"{channels}; give a run on the same data"
            )
        self.numbers = torch.tensor([known.index(name) for name in classes])

    def wanted(self, labels: Tensor) -> Tensor:
        return self.numbers.to(labels.device)[labels]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        model: Any = self.model.to(images.device)
        mean, std = (torch.tensor(self.data[key], device=images.device).view(-1, 1, 1) for key in ("mean", "std"))
        images = images.float().add(1).div(2)
        size = tuple(self.data["img_size"])
        if tuple(images.shape[-2:]) != size:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        features = model.forward_features((images - mean) / std)
        return model.forward_head(features, pre_logits=True).float(), model.forward_head(features).float()


class InceptionFeatures(Features):
    """torch-fidelity's Inception network, by which FID, KID and the Inception Score are published.

    It resizes as TensorFlow 1 did, and takes images of eight bits.
    """

    monitor: ClassVar[str] = "fid"
    least: ClassVar[int] = SPLITS

    def __init__(self) -> None:
        with needs("features=inception (unlike features=RUN, a run folder of image-classification)"):
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        self.model = FeatureExtractorInceptionV3("inception", ["2048", "logits_unbiased"], str(_inception_weights()))

    @staticmethod
    def make_metrics() -> dict[str, Metric]:
        """Under their own names."""
        return {
            "fid": Metric.of_columns(frechet_distance, *FEATURES, higher_is_better=False),
            "kid": Metric.of_columns(kernel_distance, *FEATURES, higher_is_better=False),
            "inception_score": Metric.of_columns(partial(class_score, splits=SPLITS), "logits"),
        }

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        levels = images.float().add(1).mul(127.5).round().clamp(0, 255).byte()
        levels = levels.expand(-1, 3, -1, -1) if levels.shape[1] == 1 else levels
        features, logits = self.model.to(images.device)(levels)
        return features.float(), logits.float()


def _inception_weights() -> Path:
    """The weights in torch's cache, where torch-fidelity keeps them too, fetched if need be."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS
    try:
        if path.is_file():
            check_digest([path], CONTENT)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        log(f"fetching {WEIGHTS} (95 MB)")
        with replacing(path) as partial:
            check_digest([download(HOME, partial)], CONTENT)
        return path
    except FetchError as reason:
        raise UserError(
            f"features=inception: no {path} ({reason}); put the file of {HOME} there, or give features=RUN, a run "
            "folder of image-classification on the same data"
        ) from None
