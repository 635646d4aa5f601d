"""What `tokenmix cost` leaves out since it takes too long or too much, and what it does not trust."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmix.errors import UserError
from tokenmix.lab.cli import main
from tokenmix.profiling import cost, machine
from tokenmix.profiling.cost import CostRow, CostTable, Crossover, cost_table, faster_ranges
from tokenmix.profiling.cost_figure import draw_cost
from tokenmix.profiling.machine import Ceilings, Timing, expected_peak, time_interleaved, too_slow
from tokenmix.profiling.table import _costs, _rates, footnotes, markdown, sentences
from tokenmix.profiling.target import mixer_with_input, model_with_image

CPU = torch.device("cpu")


def _ceilings(macs_per_second: float) -> Callable[..., Ceilings]:
    return lambda *_: Ceilings(1e10, macs_per_second, 1, "float32", 1 << 20, 64)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "SPREAD", math.inf)
    monkeypatch.setattr(cost, "measure_ceilings", _ceilings(1e11))


@pytest.mark.parametrize(
    ("seconds", "which", "expected"),
    [
        (60, "forward", ""),
        (61, "forward", "would take at least about 61 seconds a pass"),
        (4800, "forward", "would take at least about 80 minutes a pass"),
        (20, "step", ""),
        (4800, "step", "would take at least about 4 hours a step"),
        (10**6, "forward", "would take at least about 12 days a pass"),
    ],
)
def test_time_is_estimated_from_multiply_adds(seconds: int, which: Any, expected: str):
    assert too_slow(seconds * 1000, 1000.0, which) == expected


def test_a_million_tokens_of_self_attention_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # External attention fits into a minute at this speed, self-attention does not.
    macs = {name: mixer_with_input(name, 16, 4096, device="meta").counts()["macs"] for name in ("self", "external")}
    assert macs["external"] * 4 < macs["self"]
    monkeypatch.setattr(cost, "measure_ceilings", _ceilings(macs["self"] / 4800))
    monkeypatch.setattr("tokenmix.profiling.machine.LONGEST", 4000.0)
    assert main(["cost", "external", "--tokens", "4096", "--dim", "16"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "* self at 4,096 tokens was not run: it would take at least about 80 minutes a pass" in out
    assert "external at 4,096 tokens was not run" not in out


def test_counts_need_no_run():
    table = cost_table(["self-double", "gating"], [1_000_000], 16)
    assert all(row.forward is None and row.skipped for row in table.rows)
    for row in table.rows:
        counts = mixer_with_input(row.name, 16, 1_000_000, device="meta").counts()
        assert {"parameters": row.parameters, "macs": row.macs, "traffic": row.traffic} == counts
    assert table.row("gating", 1_000_000).parameters > 10**12
    document = json.loads(json.dumps(table.to_json()))
    assert all(cell["macs"] > 10**12 and cell["step_skipped"] for cell in document["rows"])


@pytest.mark.parametrize("name", ["resnet18", "gmlp_nano", "vit_tiny_patch16_224"])
def test_a_model_is_counted_by_its_shapes_alone(name: str):
    outline, built = (model_with_image(name, 64, device=device, dtype=torch.bfloat16) for device in ("meta", "cpu"))
    assert outline.x.device.type == "meta"
    assert outline.counts() == built.counts()


def test_forward_pass_is_run_where_only_the_step_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    outline = mixer_with_input("self", 16, 512, device="meta")
    forward, step = (expected_peak(outline.dry_run(which, CPU)) for which in ("forward", "step"))
    assert forward < step
    monkeypatch.setattr(cost, "free_memory", lambda: round((forward + step) / 2 / 0.8))
    table = cost_table(["self"], [512], 16, repeats=1)
    (row,) = table.rows
    assert row.forward is not None
    assert (row.step, row.step_memory, row.skipped) == (None, None, "")
    (note,) = footnotes(table)
    assert note.startswith("* a step of self at 512 tokens was not run: it needs about")
    assert "-*" in markdown(table)


def test_picture_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cost, "measure_ceilings", _ceilings(1e-3))
    cost_table(["external"], [16, 32], 16).write(tmp_path / "out")
    assert (tmp_path / "out" / "cost.svg").is_file()


def test_a_tensor_that_cannot_be_counted_fits_nowhere():
    def build() -> Callable[[], object]:
        return lambda: torch.empty(1 << 31, 1 << 31)

    assert expected_peak(build) > 1 << 60


def test_short_calls_are_sampled_for_long_enough(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cost, "SAMPLE", 0.2)
    seconds, asked = {"short": 1e-4, "middle": 0.01, "long": 0.3}, []

    def known(functions: Any, *, repeats: int, warmup: int, turns: Any = None, calls: Any = None, **_: Any) -> Any:
        asked.append((list(functions), repeats, turns, calls))
        # The first call of each is held up.
        return {name: Timing.of([seconds[name] + 0.1 * (len(asked) == 1)]) for name in functions}

    monkeypatch.setattr(cost, "time_interleaved", known)
    cost._time({name: lambda: None for name in seconds}, 7, CPU)
    assert asked[1][0] == ["short", "middle"]
    _, rounds, turns, calls = asked[-1]
    assert rounds == 7
    assert (turns["long"], calls["long"], calls["middle"], calls["short"]) == (1, 1, 1, 20)
    for name, each in seconds.items():
        assert 0.2 <= rounds * turns[name] * calls[name] * each < max(0.25, rounds * each + 0.01)


def test_turns_and_calls_are_those_asked_for():
    called = {"a": 0, "b": 0}

    def call(name: str) -> Callable[[], None]:
        def count() -> None:
            called[name] += 1

        return count

    found = time_interleaved({n: call(n) for n in called}, repeats=3, warmup=1, turns={"a": 2}, calls={"a": 5, "b": 1})
    assert called == {"a": 4 * 2 * 5, "b": 4}
    assert {name: len(timing.runs) for name, timing in found.items()} == {"a": 6, "b": 3}


STEADY, UNSTEADY = Timing.of([1.0, 1.0, 1.1]), Timing.of([1.0, 1.0, 3.0, 3.0])


def _timed(monkeypatch: pytest.MonkeyPatch, unsteady: str) -> CostTable:
    monkeypatch.setattr(machine, "SPREAD", 0.5)

    def timed(functions: Any, repeats: int, device: Any) -> dict[str, Timing]:
        return {name: UNSTEADY if name == unsteady else STEADY for name in functions}

    monkeypatch.setattr(cost, "_time", timed)
    return cost_table(["external", "simplified"], [16, 32], 16)


def test_unsteady_times_are_marked_and_nothing_is_read_from_them(monkeypatch: pytest.MonkeyPatch):
    table = _timed(monkeypatch, "external")
    assert (table.exponents["external"], table.faster["external"], table.measured["external"]) == (None, None, None)
    assert table.exponents["simplified"] is not None
    assert table.faster["simplified"] is not None
    assert _costs(table.row("external", 16))[2].startswith("~")
    assert not _costs(table.row("self", 16))[2].startswith("~")
    assert all(number.startswith("~") for number in _rates(table, table.row("external", 16))[:4])
    assert footnotes(table)[-1].startswith("~ says little: the quartiles of these times are more than 50%")
    expected = next(line for line in sentences(table) if line.startswith("external"))
    assert "no growth exponent: its forward times are noisy (~)" in expected
    assert expected.endswith("not compared with self: forward times of external are noisy (~)")
    cells = json.loads(json.dumps(table.to_json()))["rows"]
    assert {cell["name"] for cell in cells if cell["unsteady"] == ["forward", "step"]} == {"external"}
    assert b"hollow: noisy" in _figure(table)


def test_nothing_is_compared_with_an_unsteady_reference(monkeypatch: pytest.MonkeyPatch):
    table = _timed(monkeypatch, "self")
    assert set(table.faster.values()) == {None}
    assert table.exponents["external"] is not None
    assert all("forward times of self are noisy (~)" in line for line in sentences(table)[1:])


def test_steady_times_have_no_mark(monkeypatch: pytest.MonkeyPatch):
    table = _timed(monkeypatch, "")
    assert "~" not in markdown(table)
    assert table.unsteady == set()
    assert b"hollow" not in _figure(table)


def _figure(table: CostTable) -> bytes:
    """As SVG, in which matplotlib keeps every text as a comment."""
    file = io.BytesIO()
    draw_cost(table).savefig(file, format="svg")
    return file.getvalue()


def _curves(**times: list[float]) -> CostTable:
    sizes = (64, 128, 256, 512, 1024)
    rows = tuple(
        CostRow(name, n, 1, 1, 1, Timing.of([t]), None, 1, None, "", "needs")
        for name, values in times.items()
        for n, t in zip(sizes, values)
    )
    seconds = {name: dict(zip(sizes, values)) for name, values in times.items()}
    faster = {name: faster_ranges(seconds[name], seconds["self"]) for name in times if name != "self"}
    crossovers = {name: Crossover(()) for name in faster}
    return CostTable(
        "tokens",
        8,
        "cpu",
        "fp32",
        _ceilings(1.0)(),
        rows,
        dict.fromkeys(times, 1.0),
        "self",
        crossovers,
        dict.fromkeys(faster),
        faster,
    )


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        ([2, 2, 2, 2, 2], "slower than self at all of these sizes"),
        ([0.5, 0.5, 0.5, 0.5, 0.5], "faster than self at all of these sizes"),
        ([0.5, 2, 2, 2, 2], "faster than self up to about N = 91"),
        ([2, 2, 2, 2, 0.5], "faster than self from about N = 724 on"),
        ([2, 0.5, 0.5, 2, 2], "faster than self from about N = 91 to N = 362"),
        ([0.5, 2, 2, 2, 0.5], "faster than self up to about N = 91 and from about N = 724 on"),
    ],
)
def test_every_crossing_is_reported_with_the_faster_side(mine: list[float], expected: str):
    table = _curves(self=[1.0] * 5, external=mine)
    assert sentences(table)[1].endswith(f"; {expected}")
    assert "over the 3 sizes from N = 256 to N = 1,024" in sentences(table)[0]


def test_curves_that_cross_are_drawn(tmp_path: Path):
    _curves(self=[1.0] * 5, external=[0.5, 2, 2, 2, 0.5]).write(tmp_path)
    assert {"cost.json", "cost.md", "cost.png", "cost.svg"} == {file.name for file in tmp_path.iterdir()}


def test_help_tells_one_default_of_each_option(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["cost", "--help"])
    expected = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for default in ("196,1024,4096", "the model's own", "256"):
        assert f"(default: {default})" in expected
    assert "(default: None)" not in expected
    assert "if not given" not in expected


def test_one_name_is_a_name_and_unknown_arguments_are_told():
    rows = cost_table("identity", [4], 8, repeats=1).rows
    assert [row.name for row in rows] == ["self", "identity"]
    with pytest.raises(
        UserError, match=r"none of self, identity has an argument 'tokens'; they take .*num_heads.* are given as sizes"
    ):
        cost_table(["identity"], tokens=[4])
    assert cost_table(["identity"], [4], 8, repeats=1, num_heads=2).rows
