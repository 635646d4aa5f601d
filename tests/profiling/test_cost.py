import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tokenmix
from tokenmix.errors import UserError
from tokenmix.lab.cli import main
from tokenmix.layers.base import near_square
from tokenmix.layers.table import list_mixers
from tokenmix.profiling import cost, machine
from tokenmix.profiling.cost import (
    CostRow,
    CostTable,
    Crossover,
    Ends,
    cost_table,
    exponent,
    faster_ranges,
    find_crossover,
    measured_crossover,
)
from tokenmix.profiling.cost_report import print_costs
from tokenmix.profiling.machine import Ceilings, Timing, measure_ceilings
from tokenmix.profiling.table import _rates, footnotes, markdown, sentences
from tokenmix.profiling.target import layer_for, mixer_with_input

TOP = Ceilings(1e10, 1e11, 1, "float32", 1 << 20, 64)


@pytest.fixture(autouse=True)
def _known_ceilings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "SPREAD", math.inf)
    if "ceilings" not in request.node.name:
        monkeypatch.setattr(cost, "measure_ceilings", lambda device, dtype: TOP)


@pytest.mark.parametrize("name", list_mixers())
def test_every_mixer_can_be_measured(name: str):
    built = mixer_with_input(name, 16, 64, num_heads=2)
    assert built.forward().shape == built.x.shape
    built.step()
    assert all(p.grad is None for p in built.module.parameters())
    weights = sum(p.nbytes for p in built.module.parameters())
    carried = 2 * 4 * 64 * 16 * (name == "less")
    assert built.counts()["traffic"] == 2 * built.x.nbytes + weights + carried
    assert built.counts()["macs"] == built.module.macs(64)


def test_less_attention_is_taken_as_it_stands_in_a_stack():
    assert mixer_with_input("less", 16, 9).carry is not None
    assert mixer_with_input("self", 16, 9).carry is None


def test_specimen_is_of_the_type_asked_for():
    built = mixer_with_input("less", 16, 9, dtype=torch.bfloat16)
    assert built.forward().dtype == torch.bfloat16
    assert {p.dtype for p in built.module.parameters()} == {torch.bfloat16}


def test_grid_is_the_squarest():
    assert [near_square(n) for n in (196, 12, 7, 1)] == [(14, 14), (3, 4), (1, 7), (1, 1)]


@pytest.mark.parametrize("dim", [64, 192])
def test_multihead_external_crosses_at_two_widths_and_256(dim: int):
    crossover = find_crossover("multihead-external", dim)
    assert crossover == Crossover(((2 * dim + 257, None),))
    n = 2 * dim + 256
    assert layer_for("multihead-external", dim, n).macs(n) == layer_for("self", dim, n).macs(n)


def test_less_attention_is_cheaper_up_to_about_its_width():
    ((first, last),) = find_crossover("less", 64, num_heads=4).ranges

    def macs(name: str, n: int) -> int:
        return layer_for(name, 64, n, num_heads=4).macs(n)

    cheaper = [n for n in range(1, 100) if macs("less", n) < macs("self", n)]
    assert cheaper == list(range(first, (last or 0) + 1))
    assert 50 < cheaper[-1] < 64


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        ((), "never"),
        (((1, None),), "always"),
        (((1, 63),), "up to N = 63"),
        (((768, None),), "from N = 768"),
        (((5, 9), (1000, None)), "N = 5 to 9, from N = 1,000"),
    ],
)
def test_crossover_reads_well(ranges: tuple[tuple[int, int | None], ...], text: str):
    assert str(Crossover(ranges)) == text


def test_exponent_and_measured_crossover_of_known_curves():
    linear, square = ({n: factor * n**power for n in (64, 256, 1024)} for factor, power in ((100.0, 1), (1.0, 2)))
    assert exponent(square) == pytest.approx(2)
    assert exponent({64: 1.0}) is None
    assert measured_crossover(linear, square) == 100
    assert faster_ranges(linear, square) == ((100, None),)
    assert faster_ranges(square, linear) == ((None, 100),)
    assert measured_crossover(linear, linear | {64: 1.0, 256: 1.0, 1024: 1.0}) is None


def test_table_has_self_attention_beside_what_was_asked():
    table = cost_table(["external"], [32, 16, 32], dim=16, repeats=1, num_heads=2)
    assert [(r.name, r.size) for r in table.rows] == [
        ("self", 16),
        ("self", 32),
        ("external", 16),
        ("external", 32),
    ]
    layer = layer_for("external", 16, 32)
    row = table.row("external", 32)
    with pytest.raises(UserError, match="external was not measured at 33; measured: "):
        table.row("external", 33)
    assert (row.macs, row.parameters) == (layer.macs(32), sum(p.numel() for p in layer.parameters()))
    assert row.forward_memory is not None
    assert row.step_memory is not None
    assert row.forward is not None
    assert row.step_memory > row.forward_memory >= 32 * 16 * 4
    assert row.macs_per_second == pytest.approx(layer.macs(32) / row.forward.median)


CELL = {
    "name": str,
    "size": int,
    "parameters": int,
    "macs": int,
    "traffic": int,
    "forward": dict,
    "step": dict,
    "forward_memory": int,
    "step_memory": int,
    "skipped": str,
    "step_skipped": str,
    "macs_per_second": float,
    "bytes_per_second": float,
    "unsteady": list,
}
HEAD = {
    "schema": int,
    "axis": str,
    "dim": int,
    "device": str,
    "precision": str,
    "ceilings": dict,
    "rows": list,
    "exponents": dict,
    "reference": str,
    "crossovers": dict,
    "measured": dict,
    "faster": dict,
    "warning": str,
    "environment": dict,
}


def _check_document(document: dict[str, Any]) -> None:
    assert {key: type(value) for key, value in document.items()} == HEAD
    assert document["schema"] == 3
    for cell in document["rows"]:
        assert {key: type(value) for key, value in cell.items()} == CELL
        assert set(cell["forward"]) == {"median", "q1", "q3", "runs"}
    assert {"bytes_per_second", "macs_per_second", "threads", "dtype"} <= set(document["ceilings"])


def test_sizes_pass_a_progress_bar_as_they_are_measured():
    seen: list[int] = []

    def track(sizes: Sequence[int]) -> Iterator[int]:
        assert list(sizes) == [16, 32]
        for size in sizes:
            yield size
            seen.append(size)

    assert {row.size for row in cost_table(["external"], [32, 16], 16, repeats=1, track=track).rows} == {16, 32}
    assert seen == [16, 32]


def test_folder_has_a_document_of_the_schema_a_page_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    print_costs({"external": "external"}, tokens=(16, 64), dim=16, out=out)
    assert sorted(file.name for file in out.iterdir()) == ["cost.json", "cost.md", "cost.png", "cost.svg"]
    _check_document(json.loads((tmp_path / "out" / "cost.json").read_text()))
    page = (tmp_path / "out" / "cost.md").read_text()
    assert page.count("| external | 64 |") == 2
    assert "100 GMAC/s, 10.0 GB/s (1 thread)" in page
    assert (tmp_path / "out" / "cost.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "cost.json" in said
    assert max(map(len, said.splitlines())) <= 80 + len(str(tmp_path))


def _row(name: str, size: int, milliseconds: float | None, skipped: str = "") -> CostRow:
    if milliseconds is None:
        return CostRow(name, size, 1000, 10**8, 10**6, None, None, None, None, skipped, skipped)
    timing = Timing.of([milliseconds / 1e3])
    return CostRow(name, size, 1000, 10**8, 10**6, timing, timing, 1 << 20, 1 << 21)


def _table(rows: tuple[CostRow, ...], crossing: int | None, faster: tuple[Ends, ...] = ()) -> CostTable:
    growth = {"self": 2.0, "external": 1.0}
    crossovers = {"external": Crossover(((1, None),))}
    measured = {"external": crossing}
    return CostTable("tokens", 8, "cpu", "fp32", TOP, rows, growth, "self", crossovers, measured, {"external": faster})


def test_rates_are_shares_of_the_ceilings_and_name_the_nearer_one():
    table = _table((_row("self", 64, 2.0),), None)
    assert _rates(table, table.rows[0]) == ["50", "50%", "0.5", "5%", "arithmetic"]
    far = _table((_row("self", 64, 20.0),), None)
    assert _rates(far, far.rows[0])[-1] == "neither"


def test_sentences_say_where_times_cross_and_what_was_not_run(tmp_path: Path):
    rows = (_row("self", 64, 1), _row("self", 256, 16), _row("external", 64, 4), _row("external", 256, None, "needs"))
    crossed = _table((*rows[:3], _row("external", 256, 8)), 128, ((128, None),))
    apart = _table(rows, None)
    assert [(size, row.name) for size, row in crossed.best.items()] == [(64, "self"), (256, "external")]
    assert sentences(crossed)[0] == "self: time grows as N^2.00 between N = 64 and 256"
    assert sentences(crossed)[1].endswith("; faster than self from about N = 128 on")
    assert sentences(apart)[1].endswith("; slower than self at N = 64")
    assert footnotes(apart) == ["* external at 256 tokens was not run: it needs"]
    page = markdown(apart)
    assert "| external | 256 | 1 k | 100 M | -* | -* | -* | -* |" in page
    for i, table in enumerate((crossed, apart)):
        table.write(tmp_path / str(i))
        assert (tmp_path / str(i) / "cost.svg").stat().st_size > 5000


@pytest.mark.slow
def test_ceilings_are_those_of_the_type_asked_for():
    found = measure_ceilings(torch.device("cpu"), torch.bfloat16)
    assert found.dtype == "bfloat16"
    assert found.threads == torch.get_num_threads()
    assert 0 < found.bytes_per_second < math.inf
    assert 0 < found.macs_per_second < math.inf


@pytest.mark.parametrize(("names", "tokens", "message"), [(["externl"], [16], "external"), (["self"], [0], "got 0")])
def test_mistakes_are_told_at_once(names: list[str], tokens: list[int], message: str):
    with pytest.raises(UserError, match=message):
        cost_table(names, tokens)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "--table eanet"),
        ("external --img-size 32", "give --tokens"),
        ("gmlp_nano --tokens 32", "give --img-size"),
        ("external gmlp_nano", "measure them in separate commands"),
        ("gmpl_nano", "gmlp_nano"),
        ("qqqqq", "tokenmix list models"),
        ("gmlp_nano --dim 3", "dim=3"),
        ("gmlp_small --img-size 225", "not a multiple of the patch size"),
        ("vit_tiny_patch16_224 --img-size 8", "does not take images of 8 x 8 px"),
        ("external --threads 0", "at least 1"),
        ("external --threads 1000000", "CPUs here, got 1000000"),
        (
            "external --tokens 99999999999999999999",
            "at most 268,435,456, got 99999999999999999999",
        ),
        ("gating --tokens 10000000000", "at most 268,435,456, got 10000000000"),
        ("external --tokens 4 --dim 10000000000000", "at most 1,048,576, got 10000000000000"),
        ("external --tokens 4 --dim 99999999999999999999", "at most 1,048,576"),
        ("vit_tiny_patch16_224 --img-size 1000000", "at most 65,536, got 1000000"),
        ("gmlp_nano --img-size 32,33", "not a multiple of the patch size"),
        ("external --dim 0", "whole, at least 1 and at most 1,048,576, got 0"),
        ("external --dim -8", "at least 1 and at most 1,048,576, got -8"),
        ("external --dim x", "--dim cannot be 'x'; give none or a whole number"),
        ("external --tokens 64,abc", "--tokens: 'abc' is not a whole number; separate values by commas"),
        ("residaul --tokens 64", "unknown mixer or model 'residaul'"),
        ("external --table eanet", "leave out all but --json"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(
    line: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    # Nothing is measured before.
    monkeypatch.setattr(cost, "measure_ceilings", lambda *_: pytest.fail("measured"))
    assert main(["cost", *line.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert expected in said


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ([16], {"precision": "fp8"}, "unknown precision 'fp8'"),
        ([16], {"repeats": 0}, "repeats must be at least 1"),
        ("64", {}, "must be whole"),
        ([1.5], {}, "must be whole"),
    ],
)
def test_mistakes_in_python_are_told_before_measuring(
    sizes: Any, options: Any, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cost, "measure_ceilings", lambda *_: pytest.fail("measured"))
    with pytest.raises(UserError, match=message):
        tokenmix.cost("external", sizes, dim=32, **options)


def test_a_file_in_the_place_of_the_folder_is_told_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(cost, "measure_ceilings", lambda *args: pytest.fail("measured"))
    with pytest.raises(UserError, match=r"cannot make the folder .*file"):
        print_costs({"external": "external"}, tokens=(16,), out=tmp_path / "file")


def test_device_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device"):
        cost_table(["external"], [16], device="cuda")
    with pytest.raises(UserError, match="mps"):
        cost_table(["external"], [16], device="mps")


def test_command_prints_table_and_sentences(capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    assert main(["cost", "multihead-external", "--tokens", "16", "--dim", "16"]) == 0
    out = capsys.readouterr().out
    assert "from N = 289" in out
    assert "bound by" in out
    print_costs({"external": "external"}, tokens=(16,), dim=16, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in document["rows"]] == ["self", "external"]


def test_timing_takes_fewer_rounds_where_they_are_long(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def slow(functions: Any, *, repeats: int, **_: Any) -> dict[str, Timing]:
        asked.append(repeats)
        return {"self": Timing.of([4.0])}

    monkeypatch.setattr(cost, "time_interleaved", slow)
    cost._time({"self": lambda: None}, 7, torch.device("cpu"))
    assert asked == [1, 2]


def test_running_out_of_a_gpus_memory_costs_one_cell(monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def target(step: Callable[[], None], build: Callable[..., None] | None = None) -> Any:
        return build or (lambda *_, **__: SimpleNamespace(forward=lambda: None, step=step))

    monkeypatch.setattr(cost, "_reasons", lambda *_: {"forward": "", "step": ""})
    monkeypatch.setattr(cost, "_time", lambda functions, *_: {name: Timing.of([1.0]) for name in functions})
    monkeypatch.setattr(cost, "peak_memory", lambda *_: 1)
    targets = {"small": target(lambda: None), "wide": target(full), "vast": target(full, full)}
    counts = {name: {"parameters": 1, "macs": 1, "traffic": 1} for name in targets}
    outlines: Any = dict.fromkeys(targets)
    rows = cost._measure(targets, 8, outlines, counts, TOP, torch.device("cuda"), 1)
    assert [(row.skipped, row.step_skipped) for row in rows.values()] == [
        ("", ""),
        ("", cost.FULL),
        (cost.FULL, cost.FULL),
    ]
    assert [row.forward is None for row in rows.values()] == [False, False, True]


def test_python_gets_a_table_sentences_and_a_figure():
    report = tokenmix.cost("external", 16, 16, repeats=1)
    assert isinstance(report, CostTable)
    assert report.path is None
    assert report.row("external", 16).macs == 16 * (2 * 16 * 64 + 2 * 16 * 16)
    first, *rows = str(report).splitlines()
    assert first.split()[:3] == ["name", "N", "params"]
    assert [row.split()[0] for row in rows[:2]] == ["self", "external"]
    assert "<td>external</td>" in report._repr_html_()
    assert len(report.plot().axes) == 2
    pytest.importorskip("pandas")
    assert report.to_pandas()["tokens"].tolist() == [16, 16]


class Square(nn.Module):
    """A model of the user's, with the argument names of a mixer among its own."""

    def __init__(self, img_size: int = 16, dim: int = 8, num_classes: int = 10) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, dim, 4, 4), nn.Linear(dim, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x).flatten(2).mean(-1))


def test_a_class_of_the_users_is_a_model_by_name_and_must_be_built_else():
    report = tokenmix.cost(f"{__name__}:Square", [16, 32], repeats=1)
    assert report.axis == "pixels"
    assert report.row(f"{__name__}:Square", 32).macs == 4 * report.row(f"{__name__}:Square", 16).macs - 3 * 8 * 1000
    with pytest.raises(UserError, match="'Square' is the class Square; give a model that is built"):
        tokenmix.cost(Square, 16)


def test_modules_in_a_list_are_named_by_their_classes():
    models = [tokenmix.create_model("vit_nano"), tokenmix.create_model("mixer_nano")]
    assert tokenmix.cost(models, [32], repeats=1).names == ["MixerNet", "MixerNet 2"]


@pytest.mark.parametrize("wrong", [{"sizes": 0}, {"sizes": 1 << 40}, {"dim": 1 << 40}, {"out": __file__}])
def test_errors_name_no_option_of_the_command(wrong: dict[str, Any]):
    with pytest.raises(UserError) as caught:
        cost_table("external", **wrong)
    assert "--" not in str(caught.value)
