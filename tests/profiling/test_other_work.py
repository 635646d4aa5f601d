import os
from pathlib import Path

import pytest

from tokenmix.profiling import cost
from tokenmix.profiling.cost import cost_table
from tokenmix.profiling.cost_report import print_costs
from tokenmix.profiling.machine import Ceilings, OtherWork
from tokenmix.profiling.table import markdown

ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

pytestmark = pytest.mark.skipif(not ALLOWED, reason="the system does not say which CPUs a process may run on")


def _write(stat: Path, busy: float) -> None:
    """As /proc/stat after `busy` seconds of work on the first CPU of this process, and much on one that is not its."""
    ticks = int(busy * os.sysconf("SC_CLK_TCK"))
    lines = [f"cpu{n} {ticks if n == ALLOWED[0] else 0} 0 0 7 7 0 0 0 0 0" for n in ALLOWED]
    foreign = f"cpu{max(ALLOWED) + 1} {ticks * 99} 0 0 7 7 0 0 0"
    stat.write_text("\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *lines, foreign, ""]))


def test_what_others_took_is_the_busy_time_that_is_not_ours(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    _write(stat, 0.0)
    watch = OtherWork(stat)
    assert watch.cpus() == 0.0
    assert watch.warning(threads=len(ALLOWED)) == ""
    _write(stat, 1000.0)
    cpus = watch.cpus()
    assert cpus is not None
    assert cpus > 1.0
    assert "close them" in watch.warning(threads=len(ALLOWED))


def test_cpus_that_are_left_over_may_be_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "stat", 0.0)
    watch = OtherWork(tmp_path / "stat")
    monkeypatch.setattr(watch, "cpus", lambda: 1.0)
    assert watch.warning(threads=len(ALLOWED))
    assert watch.warning(threads=len(ALLOWED) - 1) == ""


@pytest.mark.parametrize("text", [None, "", "cpu 1 2 3 4 5 6 7 8\n"])
def test_where_the_system_does_not_tell_nothing_is_said(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    watch = OtherWork(tmp_path / "stat")
    assert watch.cpus() is None
    assert watch.warning(threads=10**6) == ""


def test_cost_warns_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cost, "measure_ceilings", lambda *_: Ceilings(1e10, 1e11, 1, "float32", 1 << 20, 64))
    monkeypatch.setattr(cost.OtherWork, "cpus", lambda _: 1e6)
    table = cost_table(["external"], [16, 32], 16, repeats=1)
    assert "other programs took 1000000.0 of" in table.warning
    assert f"Warning: {table.warning}." in markdown(table)
    print_costs({"external": "external"}, tokens=(16,), dim=16)
    assert f"warning: {table.warning}" in capsys.readouterr().err
    monkeypatch.setattr(cost.OtherWork, "cpus", lambda _: 0.0)
    assert cost_table(["external"], [16], 16, repeats=1).warning == ""
