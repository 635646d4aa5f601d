"""One harness for every benchmark: a case is checked first, and its speed is taken only if the check passes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from suite.place import Place
from suite.results import Correctness, Direction, Measured, Quantity, Ratio, Role, Row, Verdict, of_rounds, within
from tokenmix.errors import UserError
from tokenmix.profiling import Timing

__all__ = [
    "Built",
    "Case",
    "Missing",
    "Target",
    "Variant",
    "agreement",
    "checked",
    "derived",
    "failure",
    "judge",
    "measure",
]


@dataclass(frozen=True)
class Variant:
    """One way to do a case's work: `ours`, the `floor` of what must be done, a `peer`, a `baseline` of ours."""

    role: Role
    run: Callable[[], object]


@dataclass(frozen=True)
class Missing:
    """A variant that cannot run here, such as a peer that is not installed: it is left out, and the table says why."""

    why: str
    role: Role = "peer"
    failed: bool = False
    """It should run, but raised or is wrong: the others are timed, and the command exits with 1."""


@dataclass(frozen=True)
class Target:
    """What a case has to reach.

    With `other`: "at most", ours takes at most `limit` times as much as the other; "at least", ours is at least `limit`
    times as fast; with a limit of 1, no slower, a tie meets it: quartiles of the rounds' ratios on both sides of 1.
    Without: the quantity itself against the limit. On other devices than its own it is not judged.
    """

    direction: Direction
    limit: float
    ours: str = "tokenmix"
    other: str | None = None
    devices: tuple[str, ...] = ("cpu",)
    floor: str | None = None
    """A floor that may miss the target on this machine: then the target is ABOVE_FLOOR times the floor."""


ABOVE_FLOOR = 1.15


@dataclass(frozen=True)
class Built:
    """Variants on the same numbers, and the comparison that has to pass before they are timed."""

    variants: Mapping[str, Variant | Missing]
    check: Callable[[], Correctness]
    deducted: int = 0
    """Bytes that do not count as working memory: outputs and gradients that the caller asked for."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A benchmark. `build` allocates, so that a case which is not asked for costs nothing."""

    name: str
    group: str
    shapes: Mapping[str, int]
    build: Callable[[Place], Built]
    targets: tuple[Target, ...] = ()
    quantity: Quantity = "seconds"
    devices: tuple[str, ...] = ("cpu", "cuda")
    note: str = ""
    seconds: float | None = None
    """Time to spend on it instead of the run's own."""


def agreement(
    found: object, expected: object, place: Place, against: str, *, bound: float | None = None
) -> Correctness:
    """Largest error of tensors against a reference, each relative to the reference's largest entry.

    A reference of zeros fails: whatever does nothing would agree with it. `bound` is what the error may be where that
    is not the rounding of the place's type.
    """
    pairs = list(zip(_tensors(found), _tensors(expected), strict=True))
    assert pairs, "a check without tensors would always pass"
    errors = [_relative_error(a.detach(), b.detach()) for a, b in pairs]
    finite = [error for error in errors if error is not None]
    error = max(finite) if len(finite) == len(errors) else None
    bound = place.tolerance if bound is None else bound
    return Correctness(against, error, bound, within(error, bound))


def _tensors(value: object) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)  # pyrefly: ignore[bad-argument-type]


def _relative_error(found: Tensor, expected: Tensor) -> float | None:
    if found.shape != expected.shape:
        return None
    expected = expected.double()
    # 0 / 0 and 1 / 0 are not finite.
    error = (found.to(expected.device).double() - expected).abs().max() / expected.abs().max()
    return error.item() if torch.isfinite(error) else None


def measure(case: Case, place: Place, *, repeats: int, seconds: float) -> Row:
    """Check, then measure. A check that fails leaves a row without any number in it.

    Args:
        case: what to measure.
        place: where.
        repeats: at most so many rounds, fewer if they would take longer than `seconds`.
        seconds: about the time to spend on a case.
    """
    torch.manual_seed(0)
    built = case.build(place)
    correct = built.check()
    row = Row(case.group, case.name, case.quantity, dict(case.shapes), "failed", correct, [], [], [], case.note)
    if not correct.passed:
        return row
    present = {name: v for name, v in built.variants.items() if isinstance(v, Variant)}
    if case.quantity == "seconds":
        found = place.time({name: v.run for name, v in present.items()}, repeats, case.seconds or seconds)
    else:
        found = {name: Timing.of([float(place.peak(v.run) - built.deducted)]) for name, v in present.items()}
    row.status = "measured"
    row.variants = [_measured(name, v, found.get(name)) for name, v in built.variants.items()]
    row.ratios = _ratios(row.variants)
    row.verdicts = _verdicts(case.targets, row.variants, place.device)
    return row


def checked(
    variants: Mapping[str, Variant], check: Callable[[str], Correctness]
) -> tuple[dict[str, Variant | Missing], Correctness]:
    """Variants that are checked one by one: which are right, with the reasons of the others, and the largest error.

    A UserError says that a variant cannot run here; any other exception and a wrong result are failures. If nothing is
    right, neither is the check.
    """
    left: dict[str, Variant | Missing] = {}
    right: list[Correctness] = []
    for name, variant in variants.items():
        try:
            found = check(name)
        except UserError as error:
            left[name] = Missing(str(error), variant.role)
        except Exception as error:
            left[name] = Missing(_said(error), variant.role, failed=True)
        else:
            left[name] = variant if found.passed else Missing(_wrong(found), variant.role, failed=True)
            right += [found] if found.passed else []
    if right:
        return left, max(right, key=lambda c: c.error or 0.0)
    why = "; ".join(f"{name}: {v.why}" for name, v in left.items() if isinstance(v, Missing))
    return left, Correctness(why, None, 0.0, False)


def _wrong(c: Correctness) -> str:
    error = "not finite, of another shape, or against zeros" if c.error is None else f"{c.error:.2g}"
    return f"wrong against {c.against}: error {error}, bound {c.bound:.2g}"


def failure(case: Case, place: Place, error: BaseException) -> Row:
    """The row of a case that raised: failed, with what it said."""
    correct = Correctness(_said(error), None, place.tolerance, False)
    return Row(case.group, case.name, case.quantity, dict(case.shapes), "failed", correct, [], [], [], case.note)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _measured(name: str, variant: Variant | Missing, timing: Timing | None) -> Measured:
    if isinstance(variant, Missing):
        status = "failed" if variant.failed else "missing"
        return Measured(name, variant.role, status, None, None, None, [], variant.why)
    assert timing is not None
    runs = [_rounded(run) for run in timing.runs]
    timing = Timing.of(runs)
    return Measured(name, variant.role, "measured", timing.median, timing.q1, timing.q3, runs, "")


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _ratios(variants: list[Measured]) -> list[Ratio]:
    """Each of ours against each that is not ours: median and quartiles of the ratios in each round."""
    there = [v for v in variants if v.status == "measured"]
    pairs = [(a, b) for a in there if a.role == "ours" for b in there if b.role != "ours"]
    return [ratio_of(a, b) for a, b in pairs]


def ratio_of(ours: Measured, other: Measured) -> Ratio:
    """Ours over the other."""
    spread = Timing.of(of_rounds(ours, other))
    return Ratio(ours.name, other.name, *(_rounded(v) for v in (spread.median, spread.q1, spread.q3)))


def judge(target: Target, variants: list[Measured]) -> Verdict | None:
    """Whether a target is met; None if what it compares with is not there."""
    there = {v.name: v for v in variants if v.median is not None}
    if target.ours not in there or (target.other is not None and target.other not in there):
        return None
    value, tie = there[target.ours].median, False
    assert value is not None
    if target.other is not None:
        ratio = ratio_of(there[target.ours], there[target.other])
        value = ratio.median if target.direction == "at most" else 1 / ratio.median
        tie = target.limit == 1 and ratio.q1 <= 1 <= ratio.q3
    met = value <= target.limit if target.direction == "at most" else value >= target.limit
    return Verdict(target.ours, target.other, target.direction, target.limit, _rounded(value), met or tie)


def _verdicts(targets: Iterable[Target], variants: list[Measured], device: str) -> list[Verdict]:
    here = [_attainable(target, variants) for target in targets if device in target.devices]
    return [verdict for target in here if (verdict := judge(target, variants))]


def _attainable(target: Target, variants: list[Measured]) -> Target:
    """The target, or the floor times ABOVE_FLOOR where the floor itself misses it."""
    if target.floor is None:
        return target
    floor = judge(replace(target, ours=target.floor), variants)
    if floor is None or floor.met:
        return target
    return Target("at most", ABOVE_FLOOR, target.ours, target.floor, target.devices)


def derived(
    source: Row,
    name: str,
    quantity: Quantity,
    values: Mapping[str, tuple[Role, float]],
    targets: tuple[Target, ...],
    note: str,
    device: str,
) -> Row:
    """A row of numbers that were worked out of a measured one, whose check stands for it."""
    variants = [_worked_out(label, role, _rounded(value)) for label, (role, value) in values.items()]
    shapes = {key: value for key, value in source.shapes.items() if key != "N"}
    return Row(
        source.group,
        name,
        quantity,
        shapes,
        "measured",
        source.correctness,
        variants,
        _ratios(variants),
        _verdicts(targets, variants, device),
        note,
    )


def _worked_out(name: str, role: Role, value: float) -> Measured:
    return Measured(name, role, "measured", value, value, value, [value], "")
