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
from suite.groups import roofline as roofline_group
from suite.harness import Case, failure
from suite.place import Place
from suite.process import measured_apart
from suite.results import Row, read_results
from suite.table import page
from tokenmix.ops import external_attention
from tokenmix.ops.external import Backend

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


def test_a_backend_that_fails_fails_the_run(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*tensors: torch.Tensor, backend: Backend | None = None) -> torch.Tensor:
        if backend == "sdpa":
            raise RuntimeError("no such kernel")
        return external_attention(*tensors, backend=backend)

    case = Case(name="tiny", group="roofline", shapes={"N": 16}, build=roofline_group._operation(16, "forward"))
    monkeypatch.setattr(roofline_group, "CASES", [case])
    arguments = ["--only", "roofline", "--one-process", *SHORT, "--out", str(tmp_path / "results")]
    assert run.main(arguments) == 0
    monkeypatch.setattr(roofline_group, "external_attention", broken)
    assert run.main(arguments) == 1
    assert "FAILED | tokenmix, sdpa | RuntimeError: no such kernel" in capsys.readouterr().out
    variants = read_results(tmp_path / "results" / "cpu-float32-roofline.json").rows[0].variants
    assert {v.name: v.status for v in variants}["tokenmix, eager"] == "measured"


@pytest.mark.parametrize(("device", "asked", "rounds"), [("cpu", [], 51), ("cuda", [], 1000), ("cuda", [3], 3)])
def test_a_gpu_has_more_rounds(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, device: str, asked: list[int], rounds: int
) -> None:
    given: list[int] = []

    def measured(case: Case, place: Place, repeats: int, seconds: float) -> Row:
        given.append(repeats)
        return failure(case, place, RuntimeError("not measured"))

    monkeypatch.setattr(Place, "named", lambda *_: Place(device, torch.float32, 1))
    monkeypatch.setattr(run, "measured_here", measured)
    options = [word for value in asked for word in ("--repeats", str(value))]
    run.main(["--only", "external", "--case", "single head, forward", "--one-process", *options])
    assert given == [rounds]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_results_of_a_gpu_name_the_compiler_of_the_kernels(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(run, "version", lambda name: f"{name}'s")
    results = run._results("roofline", Place(device, torch.bfloat16, 1), "python benchmarks/run.py", [])
    assert ("triton" in results.peers) == (device == "cuda")
    assert ("triton triton's" in page([results], "Benchmarks")) == (device == "cuda")


@pytest.mark.usefixtures("tiny")
def test_a_part_of_a_group_writes_nothing(run: ModuleType, tmp_path: Path) -> None:
    assert run.main([*ARGUMENTS, "--case", "ti*", "--out", str(tmp_path / "results")]) == 0
    assert not list(tmp_path.iterdir())


LAYER = next(case for case in less_group.CASES if case.name == "layer, N 196")


@pytest.mark.slow
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


def test_a_full_disk_is_one_line(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "cases_of", lambda *_: [])
    monkeypatch.setattr(run, "_asked", lambda *_: [object()])
    monkeypatch.setattr(run, "_rows", lambda *_: [])
    monkeypatch.setattr(run, "write_results", refuse)
    assert run.main(["--only", "less", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "results of less not written (No space left on device; the numbers stand above): free space" in error
    assert error.count("\n") == 1
