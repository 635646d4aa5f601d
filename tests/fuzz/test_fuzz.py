"""Whatever a user types or gives, a command works, or refuses in one line: never a traceback, a hang or all the memory.

`make fuzz` runs for an hour, `FUZZ_SECONDS` for as long as it says; in `make test-all` it is a minute. Cases are drawn
from a seed, so the same ones again in each run; `FUZZ_SEED` gives others.
"""

import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grammar
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from sandbox import run_command

pytestmark = pytest.mark.slow
SECONDS, FIRST = float(os.environ.get("FUZZ_SECONDS", "60")), int(os.environ.get("FUZZ_SEED", "0"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two finished runs, one with a tokenizer, and of a comparison, to be copied."""
    folder = tmp_path_factory.mktemp("fuzz")
    _write(grammar.small_data("masked-lm"), folder)
    words = ("train", "image-classification", *grammar.TASKS["image-classification"], *grammar.BUDGET)
    for command in (
        [*words, "--max-steps", "none", "--epochs", "2", "--limit", "16"],
        [*grammar.training("masked-lm", "text:data")[:-1], "text"],
        grammar.COMPARISON,
    ):
        outcome = run_command(command, folder)
        assert outcome.verdict == "clean", outcome.output
    return folder


@pytest.mark.parametrize(
    ("task", "layout"),
    [(task, words[1]) for task, words in grammar.TASKS.items()]
    + [(task, layout) for task, layouts in grammar.LAYOUTS.items() for layout in layouts],
)
def test_what_is_varied_trains(task: str, layout: str, tmp_path: Path) -> None:
    _write(grammar.small_data(task), tmp_path)
    outcome = run_command(grammar.training(task, layout), tmp_path)
    assert outcome.verdict == "clean", outcome.output


def _write(files: dict[str, bytes], folder: Path) -> None:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def _strategies(runs: Path) -> dict[str, Any]:
    files = {
        str(path.relative_to(runs)): path.read_bytes()
        for name in ("run", "text", "compared")
        for path in (runs / name).rglob("*")
        if path.is_file()
    }
    return {
        "options": grammar.options(),
        "verbs": grammar.verbs(),
        "recipes": grammar.recipes(),
        "run folders": grammar.run_folders(files),
        "data files": grammar.data_files(),
    }


def _try(case: grammar.Case, runs: Path) -> tuple[str, str]:
    """The verdict on a case, and what failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(case.files, folder)
        for path, new in case.damage:
            run = Path(path).parts[0]
            shutil.copytree(runs / run, folder / run)
            (folder / path).unlink()
            if new is not None:
                (folder / path).write_bytes(new)
            # Where to resume, the run is not finished.
            if "--resume" in case.words:
                (folder / run / "result.json").unlink(missing_ok=True)
        outcome = run_command(case.words, folder)
        if outcome.verdict == "failed":
            kept = Path(tempfile.mkdtemp(prefix="tokenmix-fuzz-")) / "case"
            shutil.copytree(folder, kept, symlinks=True)
            words = " ".join(word if len(word) < 100 else f"{word[:20]}..." for word in case.words)
            told = f"exit code {outcome.code}, {outcome.seconds:.1f} s, {outcome.memory / 2**20:.0f} MiB in {kept}"
            return "failed", f"{told}: tokenmix {words!r}\n{outcome.output[-1500:]}"
        return outcome.verdict, ""


@pytest.mark.parametrize("kind", ["options", "verbs", "recipes", "run folders", "data files"])
def test_nothing_that_is_typed_or_given_breaks_a_command(kind: str, runs: Path, record_property: Any) -> None:
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    strategy, number, end = _strategies(runs)[kind], FIRST, time.monotonic() + SECONDS / 5
    quiet = settings(
        max_examples=20, database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
    )
    while time.monotonic() < end:

        @seed(number)
        @quiet
        @given(strategy)
        def search(case: grammar.Case) -> None:
            if time.monotonic() < end:
                verdict, told = _try(case, runs)
                counts[verdict] += 1
                if told:
                    failures.setdefault(told.rstrip().rpartition("\n")[2], told)

        search()
        number += 1
    print(f"\n{kind}: {sum(counts.values())} cases, {dict(counts)}")
    record_property("counts", dict(counts))
    assert counts["clean"] + counts["refused"] > 0
    if kind == "options" and sum(counts.values()) >= 20:
        assert counts["clean"] > 0.3 * sum(counts.values()), "most of their values are right"
    assert not failures, "\n\n".join(failures.values())
