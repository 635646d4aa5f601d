"""Differences between variants that were trained with some seeds and tested on the same samples.

A score varies with the seed, and with the draw of the test samples. With scores a_s and b_s of k_A and k_B seeds,

    d = mean_s a_s - mean_s b_s,   Var d = s_A^2 / k_A + s_B^2 / k_B + V - V_twice,

where V is the variance of d under the draw of the samples. For a metric that is a mean over samples, V = Var_i(d_i) /
n, with d_i the mean over seeds of each sample's contribution. For any other metric, V is the variance over resamples,
the same for all runs: a jackknife for few samples, whose variance a bootstrap underestimates, else a bootstrap. The
random error of a single run on a single sample is part of both s^2 / k and V. V_twice is the part that would be counted
twice. It is estimated from how runs of one variant differ from sample to sample (the residual of a two-way layout of
seeds and samples).

This random error alone gives the runs' scores a variance whose mean is V_twice. With two or three seeds the observed
variance s_A^2 / k_A + s_B^2 / k_B can be far smaller by chance. V_twice takes its place then, so that Var d >= V.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import nctdtrinc, stdtr, stdtrit

CONFIDENCE, POWER = 0.95, 0.8
RESAMPLES, AT_ONCE = 500, 50
FEW = RESAMPLES
"""Most samples of a jackknife, which costs no more there. In simulations without a difference, bootstrap intervals
exclude 0 in 10 to 12 % for mean IoU on 16 scenes, in 15 to 22 % for balanced accuracy with a class of one sample."""
MOST_SEEDS = 1000
Matrix = np.ndarray


@dataclass(frozen=True)
class Difference:
    """Difference between two variants, with the variance of its parts."""

    value: float  # difference of the means over seeds
    seeds: tuple[int, int]  # number of runs of each
    # s^2 of the runs of each; None with one seed each, when only these two networks are compared.
    seed_variances: tuple[float, float] | None
    sample_variance: float | None  # V - V_twice; None without predictions, when only these test samples are meant
    samples: int = 0  # number of test samples
    pooled: bool = False  # whether one variant has a single run, with the other's variance assumed
    noise: float = 0.0  # the part of V_twice that the runs' scores do not show, because the seeds are few

    @property
    def between_mixers(self) -> bool:
        """Whether this compares mixers, trained with any seed, rather than these two networks."""
        return self.seed_variances is not None

    @property
    def known(self) -> bool:
        """Whether the share of chance in the difference is known."""
        return self.seed_variances is not None or self.sample_variance is not None

    def parts(self, seeds: tuple[int, int] | None = None) -> list[tuple[float, float]]:
        """Parts of the variance of `value` with their degrees of freedom, for this many seeds."""
        counts, found = seeds or self.seeds, list[tuple[float, float]]()
        if self.seed_variances is not None:
            shares = [variance / count for variance, count in zip(self.seed_variances, counts)]
            if self.pooled:
                found.append((sum(shares), max(counts) - 1))
            else:
                found += [(share, count - 1) for share, count in zip(shares, counts)]
        if self.sample_variance is not None:
            found.append((self.sample_variance, self.samples - 1))
            found.append((self.noise * sum(self.seeds) / sum(counts), self.samples - 1))
        return found

    @property
    def error(self) -> float:
        """Standard error of `value`; nan if unknown."""
        return math.sqrt(sum(variance for variance, _ in self.parts())) if self.known else math.nan

    @property
    def freedom(self) -> float:
        """Degrees of freedom by Welch and Satterthwaite."""
        return freedom(self.parts())

    def interval(self) -> tuple[float, float]:
        """Confidence interval of the difference, at 95 %."""
        return self.value - self.critical, self.value + self.critical

    @property
    def critical(self) -> float:
        """Critical difference at 95 %: a smaller one can be chance."""
        return _quantile(self.freedom, (1 + CONFIDENCE) / 2) * self.error

    @property
    def detectable(self) -> float:
        """Minimum detectable effect at 80 % power: four of five experiments find a true difference of this size."""
        return _reach(self.parts())

    @property
    def probability(self) -> float:
        """p-value: probability of a difference of at least this size by chance; nan if unknown."""
        if not self.known:
            return math.nan
        if self.error == 0:
            return 1.0 if self.value == 0 else 0.0
        return 2 * float(stdtr(self.freedom, -abs(self.value) / self.error))

    @property
    def same(self) -> bool:
        """Whether the two are indistinguishable: each test sample counts alike for both, with every seed."""
        return self.known and abs(self.value) < 1e-9 and self.error < 1e-9

    @property
    def real(self) -> bool:
        """Whether the interval excludes 0."""
        return self.known and self.probability < 1 - CONFIDENCE

    def more_seeds(self) -> int | None:
        """Further seeds of each that give a true difference of this size 80 % power.

        None if it is more than `MOST_SEEDS`, `limited_by_samples`, or if the seed variance is unknown.
        """
        if self.seed_variances is None or self.value == 0:
            return None
        for count in range(max(self.seeds) + 1, MOST_SEEDS):
            if _reach(self.parts((count, count))) <= abs(self.value):
                return count - max(self.seeds)
        return None

    @property
    def limited_by_samples(self) -> bool:
        """Whether no number of seeds gives a true difference of this size 80 % power."""
        return _reach(self.parts((10**9, 10**9))) > abs(self.value)


def difference(
    a: Sequence[float], b: Sequence[float], covariance: Matrix | None = None, samples: int = 0
) -> Difference:
    """The difference between the scores of two variants, those of k_A and k_B runs.

    `covariance` (k_A + k_B, k_A + k_B) is that of these scores under the draw of the test samples, see
    `covariance_of_means` and `covariance_of_resamples`; None if unknown.
    """
    counts, value = (len(a), len(b)), float(np.mean(a) - np.mean(b))
    several = [len(scores) > 1 for scores in (a, b)]
    seeds: tuple[float, float] | None = None
    if any(several):
        variances = [float(np.var(scores, ddof=1)) if len(scores) > 1 else math.nan for scores in (a, b)]
        first, second = (other if math.isnan(own) else own for own, other in (variances, variances[::-1]))
        seeds = first, second
    drawn, noise = None, 0.0
    if covariance is not None:
        whole = np.asarray(covariance, dtype=np.float64)
        weights = np.array([1 / counts[0]] * counts[0] + [-1 / counts[1]] * counts[1])
        drawn = float(weights @ whole @ weights)
        if drawn <= 1e-9 * value**2:
            # All samples tell the same; the next one may tell nothing. 0 beside n equal numbers has this variance.
            drawn = max(drawn, (value / (samples + 1)) ** 2)
        if seeds is not None:
            # Variance of one run's score around the mean of its variant's runs, under the draw of the samples.
            residuals = [
                float(np.trace(block) - block.mean() * len(block)) / (len(block) - 1) if len(block) > 1 else math.nan
                for block in (whole[: counts[0], : counts[0]], whole[counts[0] :, counts[0] :])
            ]
            first, second = (other if math.isnan(own) else own for own, other in (residuals, residuals[::-1]))
            twice = min(drawn, first / counts[0] + second / counts[1])
            drawn -= twice
            noise = max(0.0, twice - seeds[0] / counts[0] - seeds[1] / counts[1])
    return Difference(
        value=value,
        seeds=counts,
        seed_variances=seeds,
        sample_variance=drawn,
        samples=samples,
        pooled=any(several) and not all(several),
        noise=noise,
    )


def covariance_of_means(values: Matrix) -> Matrix:
    """Covariance of scores that are means over the samples: (runs, n) to (runs, runs)."""
    return np.atleast_2d(np.cov(values)) / values.shape[1]


def covariance_of_resamples(scores: Matrix, number: int) -> Matrix:
    """Covariance of any scores from their values on `resample(number)`: (runs, R) to (runs, runs).

    Resamples on which a score is undefined are left out; nan if fewer than two remain.
    """
    defined = scores[:, np.isfinite(scores).all(0)]
    if defined.shape[1] < 2:
        return np.full((len(scores), len(scores)), math.nan)
    covariance = np.atleast_2d(np.cov(defined))
    return covariance * (number - 1) ** 2 / number if number <= FEW else covariance


def resample(number: int, resamples: int = RESAMPLES) -> Iterator[Matrix]:
    """Counts of `number` samples in blocks float64 (B, number) of resamples.

    Each of up to `FEW` samples is left out in turn. More samples are drawn with replacement.
    """
    if number <= FEW:
        for start in range(0, number, AT_ONCE):
            yield 1 - np.eye(number)[start : start + AT_ONCE]
        return
    rng = np.random.default_rng(0)
    for start in range(0, resamples, AT_ONCE):
        drawn = rng.integers(number, size=(min(AT_ONCE, resamples - start), number))
        yield np.stack([np.bincount(row, minlength=number) for row in drawn]).astype(np.float64)


def freedom(parts: Sequence[tuple[float, float]]) -> float:
    """Welch and Satterthwaite's degrees of freedom of a sum of variances, given those of each."""
    total, weighted = (sum(variance for variance, _ in parts), sum(v * v / f for v, f in parts if f > 0))
    return total * total / weighted if weighted else math.inf


def holm(probabilities: Sequence[float]) -> list[float]:
    """p-values of several comparisons, adjusted by Holm to keep the family-wise error rate."""
    order, adjusted, largest = np.argsort(probabilities), [0.0] * len(probabilities), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, (len(order) - rank) * probabilities[place])
        adjusted[place] = min(1.0, largest)
    return adjusted


def _quantile(degrees: float, share: float) -> float:
    """Quantile of Student's t."""
    return float(stdtrit(min(degrees, 1e9), share))


def _reach(parts: Sequence[tuple[float, float]]) -> float:
    degrees = min(freedom(parts), 1e9)
    error = math.sqrt(sum(variance for variance, _ in parts)) if parts else math.nan
    return float(nctdtrinc(degrees, 1 - POWER, _quantile(degrees, (1 + CONFIDENCE) / 2))) * error
