"""The harness on tiny cases: what is wrong is not timed, what is measured can be read again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from suite import harness
from suite.groups import GROUPS, cases_of, growth, roofline
from suite.groups.growth import exponent
from suite.harness import Built, Case, Missing, Target, Variant, agreement, checked, derived, failure, judge, measure
from suite.place import Place
from suite.results import SCHEMA, Measured, Ratio, Results, Row, read_results, write_results
from suite.table import lines_of, page
from tokenmix.environment import environment
from tokenmix.errors import UserError
from tokenmix.ops import external_attention
from tokenmix.ops.external import Backend

COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks").glob("**/results/*.json"))
HERE = Place("cpu", torch.float32, 1)


def _case(offset: float = 0.0, missing: str = "", **kwargs) -> Case:
    """Doubling a matrix in two ways; `offset` makes ours wrong."""

    def build(place: Place) -> Built:
        x = place.randn(32, 32)
        variants = {
            "tokenmix": Variant("ours", lambda: x + x + offset),
            "double": Variant("floor", lambda: x * 2),
            **({"absent": Missing(missing)} if missing else {}),
        }
        return Built(variants, lambda: agreement(x + x + offset, x.double() * 2, place, "float64"))

    settings = {"name": "double", "group": "gmlp", "shapes": {"N": 32}, "build": build}
    return Case(**{**settings, **kwargs})


def _measure(case: Case) -> Row:
    return measure(case, HERE, repeats=3, seconds=0.01)


def _results(*rows: Row) -> Results:
    return Results(SCHEMA, "gmlp", "cpu", "float32", 1, "python benchmarks/run.py", environment(), {}, list(rows))


def test_what_was_measured_is_read_back_equal(tmp_path: Path) -> None:
    row = _measure(_case(targets=(Target("at most", 1e6, other="double"),), missing="left-out is not installed"))
    assert row.status == "measured"
    assert [v.status for v in row.variants] == ["measured", "measured", "missing"]
    assert (row.ratios[0].ours, row.ratios[0].other) == ("tokenmix", "double")
    assert row.verdicts[0].met
    results = _results(row)
    assert read_results(write_results(results, tmp_path)) == results


def test_a_wrong_result_is_not_timed() -> None:
    row = _measure(_case(offset=0.1))
    assert row.status == "failed"
    assert not row.variants
    assert not row.ratios
    assert "FAILED" in lines_of(row)[0]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_fails(wrong: float) -> None:
    assert _measure(_case(offset=wrong)).correctness.error is None


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_a_reference_of_zeros_checks_nothing(found: float) -> None:
    assert not agreement(torch.full((3,), found), torch.zeros(3), HERE, "").passed


def test_another_shape_fails() -> None:
    assert not agreement(torch.ones(3), torch.ones(3, 1), HERE, "").passed


def test_an_exception_is_a_failed_row(tmp_path: Path) -> None:
    row = failure(_case(), HERE, RuntimeError("no such kernel\nand more"))
    assert row.correctness.against == "RuntimeError: no such kernel"
    assert read_results(write_results(_results(row), tmp_path)).rows == [row]


def test_memory_beyond_what_is_returned() -> None:
    size = 4 * 1024 * 1024

    def build(place: Place) -> Built:
        x = torch.ones(1024, 1024)
        return Built({"tokenmix": Variant("ours", lambda: (x + 1) * 2)}, lambda: agreement(x, x, place, ""), size)

    row = _measure(_case(build=build, quantity="bytes", targets=(Target("at most", size / 2),)))
    assert row.variants[0].median == pytest.approx(size, rel=0.01)
    assert [v.met for v in row.verdicts] == [False]


def _variants(**seconds: float) -> list[Measured]:
    return [Measured(name, "ours", "measured", s, s, s, [s], "") for name, s in seconds.items()]


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        (Target("at most", 1.5, "a", "b"), 0.5, True),
        (Target("at most", 1.5, "b", "a"), 2.0, False),
        (Target("at least", 1.5, "a", "b"), 2.0, True),
        (Target("at least", 1.5, "b", "a"), 0.5, False),
        (Target("at most", 1.5, "a"), 1.0, True),
        (Target("at most", 1.5, "b"), 2.0, False),
    ],
)
def test_targets(target: Target, value: float, met: bool) -> None:
    verdict = judge(target, _variants(a=1.0, b=2.0))
    assert verdict is not None
    assert (verdict.value, verdict.met) == (value, met)


def test_a_target_against_a_missing_peer_is_not_judged() -> None:
    assert judge(Target("at most", 1.0, "a", "peer"), _variants(a=1.0)) is None


@pytest.mark.parametrize("direction", ["at most", "at least"])
@pytest.mark.parametrize(("floor", "against"), [(1.0, "products"), (2.0, "bare")])
def test_a_floor_that_misses_the_target_is_the_measure_of_it(direction: str, floor: float, against: str) -> None:
    limit = 1.5 if direction == "at most" else 1 / 1.5
    target = Target(direction, limit, "ours", "products", floor="bare")  # type: ignore[arg-type]
    found = harness._verdicts([target], _variants(ours=2.2, products=1.0, bare=floor), "cpu")
    assert [(v.other, v.met) for v in found] == [(against, floor == 2.0)]


def test_exponent_of_a_power() -> None:
    assert exponent({n: 3.0 * n**1.5 for n in (10, 100, 1000)}) == pytest.approx(1.5)


def test_derived_rows_stand_on_the_check_of_their_source(tmp_path: Path) -> None:
    source = _measure(_case())
    row = derived(source, "slope", "exponent", {"tokenmix": ("ours", 1.23)}, (Target("at most", 1.1),), "", "cpu")
    assert row.correctness == source.correctness
    assert [v.met for v in row.verdicts] == [False]
    assert read_results(write_results(_results(row), tmp_path)).rows == [row]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p["rows"][0].pop("note"), "note"),
        (lambda p: p["rows"][0].update(extra=1), "extra"),
        (lambda p: p["rows"][0].update(quantity="minutes"), "quantity"),
        (lambda p: p.update(threads="2"), "threads"),
        (lambda p: p["rows"][0]["variants"][0].update(median=1e9), "contradicts itself"),
        (lambda p: p["rows"][0]["ratios"][0].update(median=1e-9), "contradicts itself"),
        (lambda p: p["rows"][0]["verdicts"][0].update(met=False), "contradicts itself"),
        (lambda p: p["rows"][0]["correctness"].update(error=1.0), "contradicts itself"),
        (lambda p: p.update(schema=99), "schema 99"),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, change, said: str) -> None:
    file = write_results(_results(_measure(_case(targets=(Target("at most", 1e6, other="double"),)))), tmp_path)
    plain = json.loads(file.read_text())
    change(plain)
    file.write_text(json.dumps(plain))
    with pytest.raises(UserError, match=said):
        read_results(file)


@pytest.mark.parametrize("file", COMMITTED, ids=lambda f: f"{f.parents[1].name}-{f.stem}")
def test_committed_results_fit_and_are_in_their_table(file: Path) -> None:
    results = read_results(file)
    table = (file.parents[1] / f"RESULTS-{'gpu' if results.device == 'cuda' else 'cpu'}.md").read_text()
    assert all("| " + " | ".join(line) + " |" in table for row in results.rows for line in lines_of(row))


def test_the_page_tells_losses_and_failures() -> None:
    lost = _measure(_case(name="lost", targets=(Target("at least", 1e6, other="double"),)))
    won = _measure(_case(name="won", targets=(Target("at most", 1e6, other="double"),)))
    text = page([_results(lost, won, _measure(_case(name="wrong", offset=0.1)))], "Benchmarks")
    assert "1 of 2 targets met" in text
    assert "not met: gmlp, lost" in text
    assert "FAILED, so nothing was timed: gmlp: wrong" in text
    assert "**no**" in text


def test_a_miss_that_the_floor_alone_would_not_reach_is_told() -> None:
    row = _measure(_case(name="lost", targets=(Target("at least", 2.0, other="double"),)))
    ours, floor = row.variants
    ours.runs, ours.median, floor.runs, floor.median = [3.0, 6.0], 4.5, [2.0, 4.0], 3.0
    row.variants.append(replace(ours, name="peer", role="peer"))
    verdict = judge(Target("at least", 2.0, other="peer"), row.variants)
    assert verdict is not None
    row.verdicts = [verdict]
    assert "is 1 ×; the floor alone would be 1.5 ×" in page([_results(row)], "Benchmarks")


def test_both_states_of_the_memory_side_by_side() -> None:
    one, other = _results(_measure(_case())), _results(_measure(_case()))
    text = page([one], "Benchmarks", [other])
    ratios = [f"**{results.rows[0].ratios[0].median:.2f}**" for results in (one, other)]
    line = next(line for line in text.splitlines() if all(ratio in line for ratio in ratios) and "took" not in line)
    assert line.count("|") == 7
    assert "kept by the allocator" not in page([one], "Benchmarks")
    assert "| external, other |" not in page([one], "Benchmarks", [_results(_measure(_case(name="other")))])


@pytest.mark.parametrize(("limit", "told"), [(0.5, False), (0.95, True)])
def test_a_miss_within_the_spread_is_told(limit: float, told: bool) -> None:
    row = _measure(_case())
    ours, other = row.variants
    ours.runs, ours.median, other.runs, other.median = [0.9, 1.0, 1.1], 1.0, [1.0, 1.0, 1.0], 1.0
    row.ratios = [Ratio("tokenmix", "double", 1.0, 0.9, 1.1)]
    verdict = judge(Target("at most", limit, other="double"), row.variants)
    assert verdict is not None
    row.verdicts = [verdict]
    assert lines_of(row)[0][-1].endswith("within the spread") == told


@pytest.mark.parametrize("direction", ["at most", "at least"])
@pytest.mark.parametrize(("limit", "runs", "met"), [(1.0, 0.9, True), (1.0, 1.01, False)])
def test_no_slower_is_met_by_a_tie(direction: str, limit: float, runs: float, met: bool) -> None:
    row = _measure(_case())
    ours, other = row.variants
    ours.runs, ours.median, other.runs, other.median = [runs, 1.05, 1.1], 1.05, [1.0, 1.0, 1.0], 1.0
    target = Target(direction, limit, other="double")  # type: ignore[arg-type]
    row.ratios = [harness.ratio_of(ours, other)]
    row.verdicts = [verdict for verdict in [judge(target, row.variants)] if verdict]
    assert [verdict.met for verdict in row.verdicts] == [met]
    assert lines_of(row)[0][-1].startswith("yes: " if met else "**no**: ")


def test_the_ratio_compares_calls_of_one_round() -> None:
    ours, other = _measure(_case()).variants
    ours.runs, ours.median, other.runs, other.median = [1.0, 2.0, 3.0], 2.0, [3.0, 1.0, 2.0], 2.0
    assert harness.ratio_of(ours, other).median == 1.5


def test_groups_have_cases_with_names_of_their_own() -> None:
    for group in GROUPS:
        cases = list({id(case): case for device in ("cpu", "cuda") for case in cases_of(group, device)}.values())
        assert cases
        assert {case.group for case in cases} == {group}
        assert len({case.name for case in cases}) == len(cases)
    assert not cases_of("roofline", "cpu")


@pytest.mark.parametrize(
    ("place", "said"),
    [(("tpu", None, 1), "tpu"), (("cpu", "int4", 1), "int4"), (("cpu", None, 0), "at least 1")],
)
def test_places_that_are_not_there(place: tuple, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Place.named(*place)


def test_the_same_numbers_for_every_type() -> None:
    exact, half = (Place("cpu", dtype, 1).randn(5) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(exact.bfloat16(), half)


def test_a_backend_that_cannot_run_here_is_left_out_with_its_reason() -> None:
    row = _measure(_case(build=roofline._operation(16, "both ways")))
    told = {v.name: v for v in row.variants}
    assert told["tokenmix, eager"].status == "measured"
    assert (told["tokenmix, triton"].status, told["tokenmix, triton"].role) == ("missing", "ours")
    assert "CUDA" in told["tokenmix, triton"].why


@pytest.mark.parametrize(("devices", "judged"), [((), False), (("cpu",), True), (("cuda",), False)])
def test_targets_of_another_device_are_not_judged(devices: tuple[str, ...], judged: bool) -> None:
    targets = (Target("at most", 1e6, other="double", devices=devices),)
    source = _measure(_case(targets=targets))
    assert bool(source.verdicts) == judged
    slope = (Target("at most", 1.1, devices=devices),)
    row = derived(source, "slope", "exponent", {"tokenmix": ("ours", 1.0)}, slope, "", "cpu")
    assert bool(row.verdicts) == judged


def test_limits_of_the_cpu_are_not_those_of_cuda() -> None:
    for group in set(GROUPS) - {"roofline", "memory"}:
        assert {target.devices for case in cases_of(group, "cpu") for target in case.targets} <= {("cpu",)}
    assert {target.devices for case in cases_of("roofline", "cuda") for target in case.targets} == {("cuda",)}


def test_the_exponent_is_judged_on_the_cpu_alone() -> None:
    times = {f"N {n}": n * 1e-6 for n in growth.LINEAR}
    source = replace(_measure(_case()), name="external alone", variants=_variants(**times))
    assert [len(growth.derive([source], device)[0].verdicts) for device in ("cpu", "cuda")] == [1, 0]


def _ways(**found: Callable[[], torch.Tensor]) -> Case:
    """A matrix of ones by several ways of ours."""

    def build(place: Place) -> Built:
        ours = {name: Variant("ours", run) for name, run in found.items()}
        left, correct = checked(ours, lambda name: agreement(found[name](), torch.ones(4), place, "ones"))
        return Built(left, lambda: correct)

    return _case(build=build)


def _refuse() -> NoReturn:
    raise UserError("needs a CUDA device")


def _crash() -> NoReturn:
    raise RuntimeError("no such kernel\nand more")


def test_a_way_that_fails_costs_the_others_nothing(tmp_path: Path) -> None:
    row = _measure(_ways(right=lambda: torch.ones(4), wrong=lambda: torch.zeros(4), crash=_crash, away=_refuse))
    assert row.status == "measured"
    assert {v.name: v.status for v in row.variants} == {
        "right": "measured",
        "wrong": "failed",
        "crash": "failed",
        "away": "missing",
    }
    why = {v.name: v.why for v in row.variants}
    assert why["wrong"] == "wrong against ones: error 1, bound 0.0001"
    assert (why["crash"], why["away"]) == ("RuntimeError: no such kernel", "needs a CUDA device")
    assert not row.passed
    assert read_results(write_results(_results(row), tmp_path)).rows == [row]
    text = page([_results(row)], "Benchmarks")
    assert "FAILED, so nothing was timed: gmlp: double, crash" in text
    assert text.count("| FAILED |") == 2


def test_a_way_that_cannot_run_here_is_no_failure() -> None:
    assert _measure(_ways(right=lambda: torch.ones(4), away=_refuse)).passed


def test_nothing_right_is_a_failed_row(tmp_path: Path) -> None:
    row = _measure(_ways(crash=_crash, away=_refuse))
    assert row.status == "failed"
    assert row.correctness.against == "crash: RuntimeError: no such kernel; away: needs a CUDA device"
    assert read_results(write_results(_results(row), tmp_path)).rows == [row]


def _broken_triton(query: torch.Tensor, *args, backend: Backend | None = None) -> torch.Tensor:
    if backend == "triton":
        _crash()
    out = external_attention(query, *args, backend=backend)
    return out * 2 if backend == "sdpa" else out


def test_a_kernel_that_raises_leaves_the_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "external_attention", _broken_triton)
    row = _measure(_case(build=roofline._operation(16, "both ways")))
    status = {v.name.removeprefix("tokenmix, "): v.status for v in row.variants}
    assert (status["eager"], status["sdpa"], status["triton"]) == ("measured", "failed", "failed")


def test_the_target_of_bandwidth_is_of_the_fused_kernel_against_two_readings() -> None:
    judged = [case for case in cases_of("roofline", "cuda") if case.name.endswith("forward")]
    assert judged
    for case in judged:
        assert [(t.ours, t.other) for t in case.targets] == [("tokenmix, triton", roofline.TWICE)]
    built = roofline._operation(16, "forward")(HERE)
    assert roofline.TWICE in built.variants


def _read_bytes(run: Callable[[], object]) -> int:
    """Bytes of all the tensors that operators of a call are given to read."""

    class Reader(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            read = args[1:] if func is torch.ops.aten.copy_.default else args
            self.total += sum(a.numel() * a.element_size() for a in read if isinstance(a, torch.Tensor))
            return func(*args, **(kwargs or {}))

    with Reader() as reader:
        run()
    return reader.total


def test_the_floor_reads_the_queries_as_often_as_the_normalisation_must() -> None:
    floors = roofline._operation(16, "forward")(HERE).variants
    query = roofline.HEADS * 16 * roofline.WIDTH * 4
    read = {name: _read_bytes(v.run) for name, v in floors.items() if isinstance(v, Variant) and v.role == "floor"}
    assert read == {"copy": query, roofline.TWICE: 2 * query}
