"""The command line of the benchmarks."""

import importlib.util
import multiprocessing
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
import torch

from suite.groups import GROUPS
from suite.groups import external as external_group
from suite.groups import less as less_group
from suite.harness import Case
from suite.place import Place
from suite.process import measured_apart
from suite.results import read_results

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


@pytest.fixture
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_run", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        name="tiny", group="external", shapes={"N": 24}, build=external_group._both_ways(1, 2, 24, 8), devices=("cpu",)
    )
    monkeypatch.setattr(external_group, "CASES", [case])


SHORT = ["--threads", "1", "--repeats", "2", "--seconds", "0.01"]
ARGUMENTS = ["--only", "external", "--one-process", *SHORT]
ALLOCATOR = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


@pytest.mark.usefixtures("tiny")
def test_a_run_writes_json_and_table(run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([*ARGUMENTS, "--out", str(tmp_path / "results")]) == 0
    results = read_results(tmp_path / "results" / "cpu-float32-external.json")
    assert results.command.endswith(f"--out {tmp_path / 'results'}")
    assert results.environment["cpu"]
    assert [row.status for row in results.rows] == ["measured"]
    assert "tiny" in (tmp_path / "RESULTS-cpu.md").read_text()
    assert "two products" in capsys.readouterr().out


@pytest.mark.usefixtures("tiny")
def test_a_wrong_operation_fails_the_run(run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_group, "external_attention", external_group.products)
    assert run.main([*ARGUMENTS, "--out", str(tmp_path / "results")]) == 1
    row = read_results(tmp_path / "results" / "cpu-float32-external.json").rows[0]
    assert row.status == "failed"
    assert "FAILED" in (tmp_path / "RESULTS-cpu.md").read_text()


@pytest.mark.usefixtures("tiny")
def test_a_part_of_a_group_writes_nothing(run: ModuleType, tmp_path: Path) -> None:
    assert run.main([*ARGUMENTS, "--case", "ti*", "--out", str(tmp_path / "results")]) == 0
    assert not list(tmp_path.iterdir())


LAYER = next(case for case in less_group.CASES if case.name == "layer, N 196")


def test_each_case_has_a_process_of_its_own(
    run: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only this process knows of the broken one: a fresh one measures what the file says.
    monkeypatch.setattr(less_group, "CASES", [replace(LAYER, build=_break)])
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "131072")
    arguments = ["--only", "less", "--case", "layer*", *SHORT]
    assert run.main([*arguments, "--keep-memory"]) == 0
    assert "fresh layer" in capsys.readouterr().out
    assert {os.environ[name] for name in ALLOCATOR} == {"1000000000"}
    assert run.main([*arguments, "--one-process"]) == 1


def _break(place: Place) -> NoReturn:
    raise RuntimeError(f"broken on {place.device}")


def test_a_process_that_is_killed_fails_its_case() -> None:
    killer = threading.Thread(target=_kill_the_next_child, args=(multiprocessing.active_children(),), daemon=True)
    killer.start()
    row = measured_apart(LAYER, Place("cpu", torch.float32, 1), 1, 0.01)
    killer.join()
    assert row.status == "failed"
    assert "killed" in row.correctness.against


def _kill_the_next_child(before: list[multiprocessing.process.BaseProcess]) -> None:
    for _ in range(1000):
        for child in multiprocessing.active_children():
            if child not in before:
                child.kill()
                return
        time.sleep(0.01)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "extrenal"],
        ["--keep-memory", "--one-process"],
        ["--only", "external", "--case", "N 16*"],
        ["--repeats", "0"],
        ["--seconds", "nan"],
        ["--dtype", "int3"],
        ["--out", __file__],
        ["--table", "--out", "/nowhere/results"],
    ],
)
def test_a_mistake_is_one_line(run: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_groups_are_listed(run: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(GROUPS)
