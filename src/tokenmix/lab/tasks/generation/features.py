"""Metrics of generated images, and their feature networks: Inception, or a classifier trained by tokenmix."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError, needs, unknown_name
from tokenmix.files import replacing
from tokenmix.lab.data.fetch import FetchError, check_digest, download, log
from tokenmix.lab.train.load import load_run
from tokenmix.lab.train.metrics import Metric

FEATURES = ("real_features", "fake_features")
INCEPTION = "inception"
WEIGHTS = "weights-inception-2015-12-05-6726825d.pth"
HOME = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{WEIGHTS}"
CONTENT = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
"""SHA-256 of the weight file, which torch-fidelity unpickles."""
# Usual number for the Inception Score.
SPLITS = 10
THUMBNAIL = 8
# Rows of features at a time: kernels of 50,000 x 50,000 would need 20 GB.
ROWS = 1024


def frechet_distance(real: Tensor, fake: Tensor) -> Tensor:
    """Squared Fréchet distance between normal distributions with the mean and covariance of two sets, in float64.

        |m - m'|^2 + tr(S + S' - 2 (S S')^(1/2))

    Paper: Heusel et al., arXiv 1706.08500, with features of Inception. The trace of the root is computed from the
    symmetric S^(1/2) S' S^(1/2), which avoids complex numbers for singular covariances.

    Shape: real (N, d), fake (M, d) to ().
    """
    if min(len(real), len(fake)) < 2:
        raise UserError(
            f"a covariance needs two images or more, got {len(real)} real and {len(fake)} generated; evaluate more"
        )
    real, fake = real.double(), fake.double()
    if not (real.isfinite().all() and fake.isfinite().all()):
        raise UserError("features of the images are NaN or infinite, so training has diverged; lower --lr-g and --lr-d")
    # The covariance of a single feature is a scalar.
    spread, other_spread = (torch.atleast_2d(torch.cov(x.mT)) for x in (real, fake))
    levels, axes = torch.linalg.eigh(spread)
    root = (axes * levels.clamp_min(0).sqrt()) @ axes.mT
    shared = torch.linalg.eigvalsh(root @ other_spread @ root).clamp_min(0).sqrt().sum()
    return (real.mean(0) - fake.mean(0)).square().sum() + spread.trace() + other_spread.trace() - 2 * shared


def kernel_distance(real: Tensor, fake: Tensor) -> Tensor:
    """Unbiased squared maximum mean discrepancy with the kernel (x y / d + 1)^3; may be negative.

    Paper: Bińkowski et al., arXiv 1801.01401. Computed over all pairs in float64: deterministic, with the same
    expectation as the usual mean over random subsets.

    Shape: real (N, d), fake (M, d) to ().
    """
    n, m = len(real), len(fake)
    if min(n, m) < 2:
        raise UserError(f"the kernel distance needs two images or more, got {n} real and {m} generated; evaluate more")
    real, fake = real.double(), fake.double()
    own = (_kernel_sum(real, real) - _diagonal(real)) / (n * (n - 1))
    others = (_kernel_sum(fake, fake) - _diagonal(fake)) / (m * (m - 1))
    return own + others - 2 * _kernel_sum(real, fake) / (n * m)


def _kernel_sum(rows: Tensor, columns: Tensor) -> Tensor:
    sums = [((part @ columns.mT) / rows.shape[1] + 1).pow(3).sum() for part in rows.split(ROWS)]
    return torch.stack(sums).sum()


def _diagonal(features: Tensor) -> Tensor:
    return (features.square().sum(1) / features.shape[1] + 1).pow(3).sum()


def class_score(logits: Tensor, splits: int = 1) -> Tensor:
    """exp of the mean KL divergence of images' class probabilities from their mean; averaged over splits in order.

        exp( mean_i sum_k p_ik (log p_ik - log p_k) ),   p_k = mean_i p_ik

    1 if the classifier cannot distinguish the images, at most the number of classes. Paper: Salimans et al.,
    arXiv 1606.03498, with Inception as classifier.

    Shape: logits (N, K) to ().
    """
    if len(logits) < splits:
        raise UserError(f"{len(logits)} generated images cannot be cut into {splits} parts; evaluate more images")
    scores = []
    for part in logits.double().log_softmax(1).tensor_split(splits):
        mean = part.exp().mean(0)
        scores.append((part.exp() * (part - mean.log().clamp_min(-1e3))).sum(1).mean().exp())
    return torch.stack(scores).mean()


def inception_score(logits: Tensor) -> Tensor:
    """`class_score` over ten parts in a fixed random order: a part of one class, as folders have them, would have 1."""
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(0))
    return class_score(logits[order], SPLITS)


def thumbnails(images: Tensor) -> Tensor:
    """8 x 8 thumbnails of images (B, C, H, W) as features: shades and rough shapes, without a classifier."""
    return F.adaptive_avg_pool2d(images.float(), THUMBNAIL).flatten(1)


class RunFeatures:
    """A run's classifier: images (B, C, S, S) in -1 .. 1 to features (B, d) and logits (B, K).

    The metrics use the formulas of FID, KID and Inception Score, and need `least` images. `monitor` picks the best
    epoch.
    """

    monitor: ClassVar[str] = "feature_fd"
    least: ClassVar[int] = 2
    metrics: ClassVar[dict[str, Metric]] = {
        "feature_fd": Metric.of_columns(frechet_distance, *FEATURES, higher_is_better=False),
        "feature_kd": Metric.of_columns(kernel_distance, *FEATURES, higher_is_better=False),
        "class_score": Metric.of_columns(class_score, "logits"),
        "class_match": Metric.mean(lambda rows: rows["logits"].argmax(-1) == rows["wanted"]),
    }

    def __init__(self, source: str | Path) -> None:
        self.run = run = Path(source)
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

    def check(self, classes: Sequence[str], channels: int) -> None:
        """Raise `UserError` unless images of these classes and channels can be evaluated."""
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
        """The classifier's class numbers, for the classes of the last `check`."""
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


class InceptionFeatures:
    """torch-fidelity's Inception network of FID, KID and Inception Score; resizes 8-bit images like TensorFlow 1."""

    monitor: ClassVar[str] = "fid"
    least: ClassVar[int] = SPLITS
    metrics: ClassVar[dict[str, Metric]] = {
        "fid": Metric.of_columns(frechet_distance, *FEATURES, higher_is_better=False),
        "kid": Metric.of_columns(kernel_distance, *FEATURES, higher_is_better=False),
        "inception_score": Metric.of_columns(inception_score, "logits"),
    }

    def __init__(self, source: str = INCEPTION) -> None:
        with needs("features=inception (unlike features=RUN, a run folder of image-classification)"):
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        # In torch's cache, which torch-fidelity also uses.
        path = Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS
        try:
            if path.is_file():
                check_digest([path], CONTENT)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                log(f"fetching {WEIGHTS} (95 MB)")
                with replacing(path) as fetched:
                    check_digest([download(HOME, fetched)], CONTENT)
        except FetchError as reason:
            raise UserError(
                f"features=inception: no {path} ({reason}); put the file of {HOME} there, or give features=RUN, a run "
                "folder of image-classification on the same data"
            ) from None
        self.model = FeatureExtractorInceptionV3("inception", ["2048", "logits_unbiased"], str(path))

    def check(self, classes: Sequence[str], channels: int) -> None:
        """Nothing: all images can be evaluated."""

    def wanted(self, labels: Tensor) -> Tensor:
        return labels

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        levels = images.float().add(1).mul(127.5).round().clamp(0, 255).byte()
        levels = levels.expand(-1, 3, -1, -1) if levels.shape[1] == 1 else levels
        features, logits = self.model.to(images.device)(levels)
        return features.float(), logits.float()


Features = RunFeatures | InceptionFeatures


def features_kind(source: str) -> type[Features]:
    """Class of the feature network: Inception by name, else a run folder."""
    return InceptionFeatures if source == INCEPTION else RunFeatures
