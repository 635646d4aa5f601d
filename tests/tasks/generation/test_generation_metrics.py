"""Distances of sets of features against torchmetrics' and torch-fidelity's, and against the formulas written out."""

import hashlib

import pytest
import scipy.linalg
import torch
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.inception import InceptionScore
from torchmetrics.image.kid import KernelInceptionDistance

from tokenmix.errors import UserError
from tokenmix.lab.tasks.generation.features import (
    WEIGHTS,
    InceptionFeatures,
    RunFeatures,
    class_score,
    frechet_distance,
    inception_score,
    kernel_distance,
    thumbnails,
)


class Pixels(nn.Module):
    """Stands instead of Inception: the image's own values."""

    num_features = 12

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).float() / 64


@pytest.fixture(params=[0, 1])
def images(request) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(request.param)
    real = torch.randint(0, 256, (60, 3, 2, 2), generator=generator, dtype=torch.uint8)
    return real, torch.randint(0, 180, (50, 3, 2, 2), generator=generator, dtype=torch.uint8)


def test_frechet_distance_is_torchmetrics(images):
    theirs = FrechetInceptionDistance(feature=Pixels())
    theirs.set_dtype(torch.float64)
    for part, real in zip(images, (True, False)):
        theirs.update(part, real=real)
    ours = frechet_distance(*(Pixels()(part) for part in images))
    assert ours.item() == pytest.approx(theirs.compute().item(), rel=1e-6)


def test_frechet_distance_by_the_root_of_the_product(images):
    real, fake = (Pixels()(part).double() for part in images)
    root = scipy.linalg.sqrtm((real.T.cov() @ fake.T.cov()).numpy()).real
    expected = (real.mean(0) - fake.mean(0)).square().sum() + (real.T.cov() + fake.T.cov()).trace() - 2 * root.trace()
    assert frechet_distance(real, fake).item() == pytest.approx(expected.item(), rel=1e-9)


def test_distances_and_score_are_torch_fidelitys(images):
    """In float64, and not rounded to float32 as torchmetrics' are."""
    fid, kid, isc = (pytest.importorskip(f"torch_fidelity.metric_{name}") for name in ("fid", "kid", "isc"))
    real, fake = (Pixels()(part[:50]).double() for part in images)
    statistics = [fid.fid_features_to_statistics(part) for part in (real, fake)]
    theirs = fid.fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert frechet_distance(real, fake).item() == pytest.approx(theirs, rel=1e-10)
    theirs = kid.kid_features_to_metric(real, fake, kid_subsets=1, kid_subset_size=50, verbose=False)
    assert kernel_distance(real, fake).item() == pytest.approx(theirs["kernel_inception_distance_mean"], rel=1e-10)
    theirs = isc.isc_features_to_metric(real, splits=5, shuffle=False)["inception_score_mean"]
    assert class_score(real, splits=5).item() == pytest.approx(theirs, rel=1e-10)


@pytest.mark.slow
def test_inception_is_torch_fidelitys(tmp_path, monkeypatch):
    """With drawn weights, since the published ones cannot be had without a network."""
    fidelity = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    with monkeypatch.context() as patch:
        patch.setattr(fidelity, "load_state_dict_from_url", lambda *args, **kwargs: {})
        patch.setattr(nn.Module, "load_state_dict", lambda *args, **kwargs: None)
        theirs = fidelity.FeatureExtractorInceptionV3("drawn", ["2048", "logits_unbiased"])
    (tmp_path / "checkpoints").mkdir()
    torch.save(theirs.state_dict(), tmp_path / "checkpoints" / WEIGHTS)
    content = hashlib.sha256((tmp_path / "checkpoints" / WEIGHTS).read_bytes()).hexdigest()
    monkeypatch.setattr("tokenmix.lab.tasks.generation.features.CONTENT", content)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    ours = InceptionFeatures()
    levels = torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8)
    for found, expected in zip(ours(levels / 127.5 - 1), theirs(levels.expand(-1, 3, -1, -1)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert set(ours.metrics) == {"fid", "kid", "inception_score"}


def test_frechet_distance_of_a_single_feature():
    real, fake = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [9.0]])
    # Means 1 and 5, deviations sqrt(2) and sqrt(32): 16 + (4 - 1)^2 * 2.
    assert frechet_distance(real, fake).item() == pytest.approx(34)


def test_frechet_distance_where_a_covariance_is_singular():
    real = torch.randn(5, 30, dtype=torch.float64)
    assert frechet_distance(real, real).item() == pytest.approx(0, abs=1e-5)
    assert frechet_distance(real, real + 2).item() == pytest.approx(30 * 4, rel=1e-6)


def test_kernel_distance_is_torchmetrics(images):
    real, fake = images[0][:50], images[1]
    theirs = KernelInceptionDistance(feature=Pixels(), subsets=1, subset_size=50)
    theirs.update(real, real=True)
    theirs.update(fake, real=False)
    expected = theirs.compute()[0].item()
    assert kernel_distance(Pixels()(real), Pixels()(fake)).item() == pytest.approx(expected, rel=1e-4)


def test_kernel_distance_by_pairs(monkeypatch):
    monkeypatch.setattr("tokenmix.lab.tasks.generation.features.ROWS", 2)
    real, fake = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64) + 1

    def mean(one, other, skip):
        values = [(x @ y / 4 + 1) ** 3 for i, x in enumerate(one) for j, y in enumerate(other) if not (skip and i == j)]
        return torch.stack(values).mean()

    expected = mean(real, real, True) + mean(fake, fake, True) - 2 * mean(real, fake, False)
    torch.testing.assert_close(kernel_distance(real, fake), expected)


def test_class_score_is_torchmetrics(images):
    theirs = InceptionScore(feature=Pixels(), splits=1)
    theirs.update(images[0])
    assert class_score(Pixels()(images[0])).item() == pytest.approx(theirs.compute()[0].item(), rel=1e-5)


def test_class_score_between_one_and_the_number_of_classes():
    assert class_score(torch.zeros(6, 4)).item() == pytest.approx(1)
    assert class_score(1e4 * torch.eye(4).repeat(3, 1)).item() == pytest.approx(4)
    logits = torch.randn(10, 3)
    halves = [class_score(part) for part in logits.split(5)]
    torch.testing.assert_close(class_score(logits, splits=2), torch.stack(halves).mean())
    with pytest.raises(UserError, match="10 generated images cannot be cut into 11 parts"):
        class_score(logits, splits=11)


def test_inception_score_of_images_that_come_class_by_class():
    """As files of folders do: each of the ten parts has all classes."""
    logits = 20 * torch.eye(10).repeat_interleave(40, 0)
    assert class_score(logits, splits=10).item() == pytest.approx(1.0)
    assert inception_score(logits).item() > 7
    assert inception_score(logits) == inception_score(logits)


def test_features_of_a_run_that_diverged(images):
    real, fake = (Pixels()(part)[:50] for part in images)
    fake[3, 2] = torch.inf
    with pytest.raises(UserError, match="training has diverged; lower --lr-g and --lr-d"):
        frechet_distance(real, fake)


def test_metrics_of_rows(images):
    """A row of weight 2 stands twice."""
    real, fake = (Pixels()(part)[:50] for part in images)
    wanted = fake.argmax(1) * (fake[:, 0] > 1)
    rows = {"real_features": real, "fake_features": fake, "logits": fake, "wanted": wanted}
    metrics = RunFeatures.metrics
    times = torch.randint(0, 3, (50,))
    for name, expected in {"feature_fd": frechet_distance, "feature_kd": kernel_distance}.items():
        assert metrics[name](rows) == expected(real, fake).item()
        twice = metrics[name].measure(rows, torch.stack([times, torch.ones(50)]).double())
        assert twice.tolist() == [expected(real[places], fake[places]).item() for places in drawn(times)]
    assert metrics["class_score"](rows) == class_score(fake).item()
    assert metrics["class_match"](rows) == pytest.approx((fake.argmax(1) == wanted).double().mean().item())


def drawn(times: torch.Tensor) -> list[list[int]]:
    return [[place for place, count in enumerate(times.tolist()) for _ in range(count)], list(range(len(times)))]


def test_thumbnails_see_shades_and_shapes():
    real = torch.rand(20, 1, 32, 32) * 2 - 1
    assert frechet_distance(thumbnails(real), thumbnails(real)).item() == pytest.approx(0, abs=1e-5)
    assert frechet_distance(thumbnails(real), thumbnails(real * 0.5 - 0.5)).item() > 10
    with pytest.raises(UserError, match="two images or more, got 1 real"):
        frechet_distance(torch.zeros(1, 3), torch.zeros(4, 3))
