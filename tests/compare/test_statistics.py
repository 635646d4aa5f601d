"""Differences between variants: against formulas written out, and calibrated in simulated experiments."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from tokenmix.lab.compare.statistics import (
    Difference,
    covariance_of_means,
    covariance_of_resamples,
    difference,
    freedom,
    holm,
    resample,
)


def experiment(
    rng: np.random.Generator, seeds: int, samples: int, *, effect: float, seed: float, sample: float, noise: float
) -> np.ndarray:
    """What each run of two mixers contributes on each sample, (2 * seeds, samples).

    difficulty of the sample + deviation of the run + of the mixer on the sample + of the run on the sample.
    """
    difficulty = rng.normal(size=samples)
    both = []
    for mixer in range(2):
        runs = seed * rng.normal(size=(seeds, 1))
        own = sample * rng.normal(size=samples)
        both.append(difficulty + effect * mixer + runs + own + noise * rng.normal(size=(seeds, samples)))
    return np.concatenate(both)


def judged(values: np.ndarray) -> Difference:
    half, scores = len(values) // 2, values.mean(1)
    return difference(scores[half:], scores[:half], covariance_of_means(values), values.shape[1])


SETTINGS = {
    "seeds differ most": {"seed": 0.2, "sample": 0.1, "noise": 0.5},
    "samples differ most": {"seed": 0.02, "sample": 1.0, "noise": 0.5},
    "runs err at random": {"seed": 0.0, "sample": 0.0, "noise": 1.0},
    "all of them": {"seed": 0.05, "sample": 0.5, "noise": 1.0},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seeds", [2, 5])
def test_no_difference_is_found_in_one_of_twenty(name: str, seeds: int) -> None:
    rng = np.random.default_rng(0)
    found = [judged(experiment(rng, seeds, 120, effect=0, **SETTINGS[name])) for _ in range(1500)]
    outside = np.mean([low > 0 or high < 0 for low, high in (one.interval() for one in found)])
    # Two seeds, or seeds without an effect: the floor of the variance makes the interval wider than it need be.
    assert (0.03 if seeds == 5 and SETTINGS[name]["seed"] else 0.01) < outside < 0.07
    assert outside == np.mean([one.real for one in found])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_detectable_effect_is_found_in_four_of_five(name: str) -> None:
    rng, (seeds, samples), setting = np.random.default_rng(1), (5, 120), SETTINGS[name]
    # The true variances, each for two mixers.
    per_seed = setting["seed"] ** 2 + setting["noise"] ** 2 / samples
    true = Difference(0.0, (seeds, seeds), (per_seed, per_seed), 2 * setting["sample"] ** 2 / samples, samples)
    found = [judged(experiment(rng, seeds, samples, effect=true.detectable, **setting)) for _ in range(1200)]
    assert (0.75 if setting["seed"] else 0.7) < np.mean([one.real for one in found]) < 0.85
    told = np.mean([one.detectable for one in found])
    assert told == pytest.approx(true.detectable, rel=0.1)


def test_one_seed_speaks_of_two_networks() -> None:
    """Over draws of the samples, the same two networks; whatever the seeds would do."""
    rng = np.random.default_rng(2)
    found = []
    for _ in range(1500):
        difficulty = rng.normal(size=80)
        values = np.stack([difficulty + 0.7 * rng.normal(size=80) for _ in range(2)])
        found.append(judged(values))
    assert not found[0].between_mixers
    assert 0.03 < np.mean([one.real for one in found]) < 0.07
    # The difference of the means would vary more than this if the samples were not the same.
    assert np.mean([one.error for one in found]) == pytest.approx(math.sqrt(2 * 0.49 / 80), rel=0.05)


def test_two_seeds_that_agree_by_chance_leave_the_draw_of_the_samples() -> None:
    """One image of 113 moves a score by 0.0088; the runs of a mixer err on different images, equally often."""
    values = np.ones((4, 113))
    for run, wrong in enumerate((range(40), range(30, 70), range(41), range(31, 72))):
        values[run, wrong] = 0
    found = judged(values)
    drawn = float(np.var(values[2:].mean(0) - values[:2].mean(0), ddof=1)) / 113
    assert found.error >= math.sqrt(drawn) * (1 - 1e-9)
    assert found.critical > 0.0088
    more = found.parts((4, 4))
    assert sum(variance for variance, _ in more) < found.error**2, "more seeds average the runs' errors"


def test_the_formula_written_out() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(3, 40)), rng.normal(size=(4, 40)) + 0.3
    found = difference(a.mean(1), b.mean(1), covariance_of_means(np.concatenate([a, b])), 40)
    parts = [np.var(a.mean(1), ddof=1) / 3, np.var(b.mean(1), ddof=1) / 4]
    drawn = np.var(a.mean(0) - b.mean(0), ddof=1) / 40
    twice = 0.0
    for values in (a, b):
        residual = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
        twice += (residual**2).sum() / ((len(values) - 1) * 39) / (len(values) * 40)
    twice = min(drawn, twice)
    parts += [drawn - twice, max(0.0, twice - sum(parts))]
    assert found.value == pytest.approx(a.mean() - b.mean())
    assert found.error == pytest.approx(math.sqrt(sum(parts)))
    degrees = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 3 + (parts[2] ** 2 + parts[3] ** 2) / 39)
    assert found.freedom == pytest.approx(degrees)
    low, high = stats.t.interval(0.95, degrees, loc=found.value, scale=found.error)
    assert found.interval() == pytest.approx((low, high))
    assert found.critical == pytest.approx((high - low) / 2)
    assert found.probability == pytest.approx(2 * stats.t.sf(abs(found.value) / found.error, degrees))
    shift = found.detectable / found.error
    assert stats.nct.sf(stats.t.ppf(0.975, degrees), degrees, shift) == pytest.approx(0.8), "four of five are found"


def test_without_predictions_it_is_welchs_test() -> None:
    a, b = [0.81, 0.84, 0.79, 0.83], [0.86, 0.85, 0.88]
    found, wanted = difference(a, b), stats.ttest_ind(a, b, equal_var=False)
    assert found.probability == pytest.approx(wanted.pvalue)
    assert found.freedom == pytest.approx(wanted.df)
    assert found.interval() == pytest.approx(tuple(wanted.confidence_interval()))


def test_a_single_run_varies_as_the_other_variant_does() -> None:
    found = difference([0.80, 0.84, 0.82], [0.90])
    assert found.between_mixers
    assert found.error == pytest.approx(math.sqrt(0.0004 * (1 / 3 + 1)))
    assert found.freedom == pytest.approx(2)


def test_nothing_is_known_of_two_numbers() -> None:
    found = difference([0.8], [0.9])
    assert not found.known
    assert not found.real
    assert math.isnan(found.error)
    assert difference([0.5, 0.5], [0.5, 0.5]).probability == 1.0
    assert difference([0.5, 0.5], [0.6, 0.6]).probability == 0.0


def test_more_seeds_settle_what_samples_allow() -> None:
    found = difference([0.80, 0.84, 0.82], [0.83, 0.86, 0.81])
    more = found.more_seeds()
    assert more is not None
    count = 3 + more
    parts = [(variance / count, count - 1) for variance in found.seed_variances or ()]
    degrees, error = freedom(parts), math.sqrt(sum(v for v, _ in parts))
    assert stats.nct.sf(stats.t.ppf(0.975, degrees), degrees, abs(found.value) / error) >= 0.8 - 1e-9
    assert not found.limited_by_samples
    few = difference([0.80, 0.84, 0.82], [0.83, 0.86, 0.81], np.full((6, 6), 0.0) + np.eye(6) * 0.001, 50)
    assert few.more_seeds() is not None, "what a run errs at random goes with the seeds"
    apart = np.kron(np.eye(2), np.full((3, 3), 0.001))
    fixed = difference([0.80, 0.84, 0.82], [0.83, 0.86, 0.81], apart, 50)
    assert fixed.more_seeds() is None
    assert fixed.limited_by_samples
    close = difference([0.80, 0.84, 0.82], [0.8001, 0.84, 0.82], apart * 1e-9, 10**6)
    assert close.more_seeds() is None
    assert not close.limited_by_samples, "seeds would show it, but far too many"
    assert difference([0.8], [0.9], np.eye(2) * 0.001, 50).more_seeds() is None


def test_holm_is_written_out() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


Metric = Callable[[np.ndarray, np.ndarray], np.ndarray]


def quotient(weights: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """A metric that is no mean over samples: exp of a quotient of sums, as perplexity is."""
    total = weights @ sums
    return np.exp(total[:, 0] / total[:, 1])


def resampled(metric: Metric, runs: list[np.ndarray], resamples: int = 100) -> tuple[np.ndarray, np.ndarray]:
    number = len(runs[0])
    scores = np.array([metric(np.ones((1, number)), run)[0] for run in runs])
    drawn = [np.concatenate([metric(w, run) for w in resample(number, resamples)]) for run in runs]
    return scores, covariance_of_resamples(np.stack(drawn), number)


@pytest.mark.parametrize("samples", [60, 520])
def test_resampled_metrics_are_calibrated(samples: int) -> None:
    """The same resamples for both mixers, whose samples are of unequal size: a jackknife, and a bootstrap."""
    rng, seeds, found = np.random.default_rng(4), 3, []
    for _ in range(600):
        count = rng.integers(5, 30, size=samples)
        difficulty = rng.normal(1.0, 0.3, size=samples)
        runs = []
        for _ in range(2):
            own = 0.1 * rng.normal(size=samples)
            for _ in range(seeds):
                each = difficulty + own + 0.02 * rng.normal() + 0.1 * rng.normal(size=samples)
                runs.append(np.stack([each * count, count], 1))
        scores, covariance = resampled(quotient, runs)
        found.append(difference(scores[:seeds], scores[seeds:], covariance, samples))
    assert 0.025 < np.mean([one.real for one in found]) < 0.08


def mean_iou(weights: np.ndarray, scene: np.ndarray) -> np.ndarray:
    """Mean over the classes of hits over area, from the tables (n, 2, C) of scenes."""
    hits, area = np.einsum("rn,nkc->krc", weights, scene)
    return np.nanmean(np.where(area > 0, hits / np.maximum(area, 1e-12), np.nan), axis=1)


def test_mean_iou_of_few_scenes_is_calibrated() -> None:
    """Few scenes of unlike classes: a bootstrap finds a difference in 10 %, where there is none."""
    rng, seeds, scenes, found = np.random.default_rng(6), 3, 8, []
    common = np.array([0.7, 0.5, 0.3, 0.2, 0.2, 0.1, 0.1])
    for _ in range(600):
        area = rng.dirichlet(common, size=scenes)
        base = rng.normal(0, 0.8, size=area.shape)
        runs = []
        for _ in range(2):
            own = base + 0.3 * rng.normal(size=area.shape)
            for _ in range(seeds):
                share = 1 / (1 + np.exp(-own - 0.1 * rng.normal(size=area.shape)))
                runs.append(np.stack([area * share, area], 1))
        scores, covariance = resampled(mean_iou, runs)
        found.append(difference(scores[:seeds], scores[seeds:], covariance, scenes))
    assert 0.02 < np.mean([one.real for one in found]) < 0.08


def balanced(weights: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Mean over the classes there of the share of right samples, from columns (class, right)."""
    classes = np.unique(right[:, 0])
    count = np.stack([weights @ (right[:, 0] == label) for label in classes])
    hits = np.stack([weights @ ((right[:, 0] == label) * right[:, 1]) for label in classes])
    return np.nanmean(np.where(count > 0, hits / np.maximum(count, 1e-12), np.nan), axis=0)


def test_a_class_with_one_sample_finds_no_difference_where_there_is_none() -> None:
    """A bootstrap of 121 samples finds one in a fifth of the experiments: the sample is all or nothing."""
    rng, label, found = np.random.default_rng(8), np.repeat([0, 1, 2], [60, 60, 1]), []
    for _ in range(200):
        runs = [np.stack([label, rng.random(121) < 0.8], 1).astype(float) for _ in range(2)]
        scores, covariance = resampled(balanced, runs)
        found.append(difference(scores[:1], scores[1:], covariance, 121))
    assert np.mean([one.real for one in found]) < 0.08


def test_equal_samples_are_no_certainty() -> None:
    """One mixer is right and the other wrong on each of two samples: a third one may tell nothing."""
    found = [judged(np.stack([np.zeros(n), np.ones(n)])) for n in (2, 100)]
    assert found[0].probability > 0.1
    assert found[1].probability < 1e-6
    beside = np.append(np.ones(100), 0.0)
    assert found[1].error == pytest.approx(math.sqrt(np.var(beside, ddof=1) / 101))


@pytest.mark.parametrize(("samples", "rtol"), [(50, 1e-9), (550, 0.15)])
def test_resamples_of_a_mean_have_its_variance(samples: int, rtol: float) -> None:
    rng = np.random.default_rng(5)
    values = rng.normal(size=(3, samples)) + rng.normal(size=samples)
    drawn = np.concatenate([w @ values.T / w.sum(1, keepdims=True) for w in resample(samples, 4000)]).T
    found = covariance_of_resamples(drawn, samples)
    np.testing.assert_allclose(found, covariance_of_means(values), rtol=rtol, atol=2e-3 * (rtol > 0.1))


def test_an_undefined_resample_is_left_out() -> None:
    scores = np.array([[0.1, 0.2, math.nan, 0.4], [0.2, 0.1, 0.3, 0.4]])
    np.testing.assert_allclose(covariance_of_resamples(scores, 550), np.cov(scores[:, [0, 1, 3]]))
