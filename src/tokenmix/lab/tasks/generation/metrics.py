"""Distances between sets of features of generated and real images, and the score of a classifier."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError

THUMBNAIL = 8
ROWS = 1024


def frechet_distance(real: Tensor, fake: Tensor) -> Tensor:
    """The squared Fréchet distance between normal distributions with the mean and covariance of two sets.

        |m - m'|^2 + tr(S + S' - 2 (S S')^(1/2))

    Paper: Heusel et al., arXiv 1706.08500, in which the features are Inception's. In float64; the root's trace is that
    of the symmetric S^(1/2) S' S^(1/2), so that no complex number comes up where a covariance is singular.

    Shapes: real (N, d), fake (M, d); a number.
    """
    if min(len(real), len(fake)) < 2:
        raise UserError(f"a covariance needs two images or more, got {len(real)} real and {len(fake)} generated")
    real, fake = real.double(), fake.double()
    # The covariance of a single feature is a number.
    spread, other_spread = (torch.atleast_2d(torch.cov(x.mT)) for x in (real, fake))
    levels, axes = torch.linalg.eigh(spread)
    root = (axes * levels.clamp_min(0).sqrt()) @ axes.mT
    shared = torch.linalg.eigvalsh(root @ other_spread @ root).clamp_min(0).sqrt().sum()
    return (real.mean(0) - fake.mean(0)).square().sum() + spread.trace() + other_spread.trace() - 2 * shared


def kernel_distance(real: Tensor, fake: Tensor) -> Tensor:
    """The unbiased squared maximum mean discrepancy under the kernel (x y / d + 1)^3; it may come out below 0.

    Paper: Bińkowski et al., arXiv 1801.01401. Over all pairs and in float64, where others take the mean over random
    subsets: the same expectation, and deterministic.

    Shapes: real (N, d), fake (M, d); a number.
    """
    n, m = len(real), len(fake)
    if min(n, m) < 2:
        raise UserError(f"the kernel distance needs two images or more, got {n} real and {m} generated")
    real, fake = real.double(), fake.double()
    own = (_kernel_sum(real, real) - _diagonal(real)) / (n * (n - 1))
    others = (_kernel_sum(fake, fake) - _diagonal(fake)) / (m * (m - 1))
    return own + others - 2 * _kernel_sum(real, fake) / (n * m)


def _kernel_sum(rows: Tensor, columns: Tensor) -> Tensor:
    # A block of rows at a time: 50,000 x 50,000 kernels would be 20 GB.
    sums = [((part @ columns.mT) / rows.shape[1] + 1).pow(3).sum() for part in rows.split(ROWS)]
    return torch.stack(sums).sum()


def _diagonal(features: Tensor) -> Tensor:
    return (features.square().sum(1) / features.shape[1] + 1).pow(3).sum()


def class_score(logits: Tensor, splits: int = 1) -> Tensor:
    """exp of the mean divergence of each image's class probabilities from their mean; the mean over splits in order.

        exp( mean_i sum_k p_ik (log p_ik - log p_k) ),   p_k = mean_i p_ik

    1 if the classifier cannot distinguish the images, the number of classes at most. Paper: Salimans et al.,
    arXiv 1606.03498, where the classifier is Inception.

    Shapes: logits (N, K); a number.
    """
    if len(logits) < splits:
        raise UserError(f"{len(logits)} generated images cannot be cut into {splits} parts; evaluate more images")
    scores = []
    for part in logits.double().log_softmax(1).tensor_split(splits):
        mean = part.exp().mean(0)
        scores.append((part.exp() * (part - mean.log().clamp_min(-1e3))).sum(1).mean().exp())
    return torch.stack(scores).mean()


def thumbnails(images: Tensor) -> Tensor:
    """Images (B, C, H, W) as features: their 8 x 8 pixels, which tell shades and rough shapes without a classifier."""
    return F.adaptive_avg_pool2d(images.float(), THUMBNAIL).flatten(1)
