"""Loops, start-up and large inputs: what is counted, and mistakes that are reported before measuring."""

import json
import re
import sys
import time
from pathlib import Path

import end_to_end
import large_inputs
import pytest
import startup
import torch
from loops.measure import Clock, Enough, Program, program, turn

from tokenmix.errors import UserError


def test_steps_before_the_clock_starts_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, found = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock(warm=1, steps=2, done=found.append)
    for seconds in (100.0, 100.0, 1.0):
        now[0] += seconds
        clock.tick(30)
    now[0] += 3.0
    with pytest.raises(Enough):
        clock.tick(30)
    assert found == [60 / 4]


def test_a_turn_runs_in_a_process_of_its_own_and_counts_its_memory() -> None:
    kept = []

    def loop(clock: Clock) -> None:
        kept.append(torch.ones(25_000_000))
        while True:
            clock.tick(1)

    found = turn(loop, warm=1, steps=3, threads=1)
    assert found.rate > 0
    assert found.memory > 100_000_000
    assert not kept


def test_memory_of_a_program_is_its_own() -> None:
    held = torch.ones(100_000_000)
    found = program([sys.executable, "-c", "import time; x = b'1' * 60_000_000; time.sleep(0.5)"], {})
    assert 60_000_000 < found.memory < 4 * len(held)
    assert found.seconds > 0.5
    with pytest.raises(UserError, match="ended with code 3"):
        program([sys.executable, "-c", "raise SystemExit(3)"], {})


@pytest.mark.parametrize(
    ("loop", "said"),
    [(lambda clock: None, "ended after 0 of 4 steps"), (lambda clock: 1 // 0, "ZeroDivisionError")],
)
def test_a_loop_that_fails_is_reported(loop: end_to_end.Loop, said: str) -> None:
    with pytest.raises(UserError, match=said):
        turn(loop, warm=0, steps=3, threads=1)


def test_a_row_that_loses_is_shown() -> None:
    sides = {"tokenmix": end_to_end.Side([1.0, 2.0, 3.0], 2**20), "timm": end_to_end.Side([2.0, 2.0, 2.0], 2**21)}
    row = end_to_end.Row("images", "PNG", "images", sides)
    assert row.ratios == {"timm": (1.0, 0.5, 1.5)}
    assert "ours / this: 1.00 (0.50 to 1.50)" in end_to_end.lines_of(row)[-1]


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    inside = str(tmp_path / "file" / "out.json")
    for benchmark, arguments, said in (
        (end_to_end, ["--repeats", "0"], "--repeats must be at least 1"),
        (end_to_end, ["--scale", "2"], "--scale in (0, 1]"),
        (end_to_end, ["--out", inside], "cannot make the folder"),
        (large_inputs, ["--share", "0"], "--share must be in (0, 1]"),
        (startup, ["--repeats", "0"], "--repeats must be at least 1"),
        (large_inputs, ["--out", inside], "cannot make the folder"),
    ):
        assert benchmark.main(arguments) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_a_command_and_its_bare_program_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[list[str]] = []

    def program(command: list[str], _: dict[str, str]) -> Program:
        ran.append(command)
        return Program(9.0, 3.0 if "tokenmix" in command else 1.0, 7)

    monkeypatch.setattr(startup, "program", program)
    monkeypatch.setattr(startup, "make_folder", lambda *_: tmp_path)
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "1.png").touch()
    out = tmp_path / "startup.json"
    assert startup.main(["--only", "predict", "--repeats", "2", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row == {"name": "predict", "ours": [3.0, 3.0], "bare": [1.0, 1.0], "added": [2.0, 2.0, 2.0]}
    # The first pair trains the run; then the first of a pair changes from turn to turn.
    assert ["tokenmix" in command for command in ran] == [True, False, False, True, True, False]
    assert startup.main(["--repeats", "1"]) == 0
    assert len(ran) == 6 + 2 + 2 * len(startup.COMMANDS)
    for command in ran:
        assert all(not re.search(r"\{(data|image|run|folder)\}", word) for word in command)
        if "-c" in command:
            compile(command[2], "bare", "exec")


def test_growth_is_that_of_what_an_input_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"1": 5.0, "10": 6.0, "40": 9.0}
    programs = {size: Program(99.0, cpu, 7) for size, cpu in seconds.items()}
    monkeypatch.setattr(large_inputs, "program", lambda command, _: programs[command[0]])
    row = large_inputs.measured("text", "JSONL", [1, 10, 40], lambda size: [str(size)])
    assert row.growth == 1.0
    assert row.memory == [7, 7, 7]
    assert "growth 1.00" in large_inputs.line_of(row)
    assert json.dumps(row.cpu) == "[5.0, 6.0, 9.0]"
