"""The driver of all evidence: missing jobs in their order, a note of what has ended, the budget, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tokenmix.errors import UserError
from tokenmix.lab.train.sources import list_comparisons

ROOT = Path(__file__).parents[2]
JOB = """
import sys, time
from pathlib import Path
name, seconds, code = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
with Path("{log}").open("a") as log:
    log.write(f"{{name}} started\\n")
try:
    time.sleep(seconds)
except KeyboardInterrupt:
    with Path("{log}").open("a") as log:
        log.write(f"{{name}} saved\\n")
    sys.exit(130)
sys.exit(code)
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "toy_job.py").write_text(JOB.format(log=tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))
    from recipes import run_all

    return run_all


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def test_what_is_missing_is_run_in_order_and_then_the_ledger(driver: Any, tmp_path: Path) -> None:
    jobs = {"one": "-m toy_job one 0 0", "two": "-m toy_job two 0 2", "three": "-m toy_job three 0 0"}
    args = driver.Args(budget=1.0, out=tmp_path / "all")
    assert driver.run_all(args, jobs, "-m toy_job ledger 0 0") == 1, "one job failed"
    assert log(tmp_path) == ["one started", "two started", "three started", "ledger started"]
    assert json.loads((tmp_path / "all" / "ended.json").read_text()).keys() == {"one", "three"}
    assert driver.run_all(args, jobs, "-m toy_job ledger 0 0") == 1
    assert log(tmp_path)[4:] == ["two started", "ledger started"], "what has ended is not started again"
    again = driver.Args(budget=1.0, out=tmp_path / "all", again=("three",))
    driver.run_all(again, jobs, "-m toy_job ledger 0 0")
    assert log(tmp_path)[6:] == ["two started", "three started", "ledger started"]


def test_the_end_of_the_time_saves_what_runs(driver: Any, tmp_path: Path) -> None:
    jobs = {"long": "-m toy_job long 600 0", "next": "-m toy_job next 0 0"}
    args = driver.Args(budget=4 / 3600, out=tmp_path / "all")
    assert driver.run_all(args, jobs, "-m toy_job ledger 0 0") == driver.STOPPED
    assert log(tmp_path) in (
        ["long started", "long saved", "ledger started"],
        # A busy machine may not have started Python by then.
        ["ledger started"],
    )


def test_ctrl_c_goes_to_the_job_and_ends_the_driver(tmp_path: Path) -> None:
    (tmp_path / "toy_job.py").write_text(JOB.format(log=tmp_path / "log"))
    program = (
        "import sys; from recipes import run_all as r; from pathlib import Path; "
        f"sys.exit(r.run_all(r.Args(budget=1.0, out=Path({str(tmp_path)!r})), {{'long': '-m toy_job long 600 0'}}))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT)])}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, start_new_session=True)
    while not (tmp_path / "log").exists():
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert log(tmp_path) == ["long started", "long saved"]


def test_every_comparison_is_a_job(driver: Any) -> None:
    assert set(driver.ORDER) == set(list_comparisons())


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (None, 0, ""),
        (True, 0, ""),
        (False, 3, ""),
        (KeyboardInterrupt("saved; go on with this"), 130, "saved; go on with this\n"),
        (UserError("no such file; give another"), "tokenmix: no such file; give another", ""),
    ],
)
def test_a_recipe_ends_with_an_exit_code_and_without_a_traceback(
    outcome: Any, code: Any, said: str, driver: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.program import run_program

    def main(args: Any) -> bool | None:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(sys, "argv", ["recipe", "--budget", "1"])
    with pytest.raises(SystemExit) as ended:
        run_program(main, driver.Args)
    assert ended.value.code == code
    assert capsys.readouterr().err == said
