"""Every block of a page runs, Python and commands, in order, in a folder with a reader's files."""

import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from readers_files import FILES, RUNS, SHORT, provide, reader, shortened, store_data_sets

from test_docs import PAGES, blocks, identifier, split_words
from tokenmix.lab import cli

# Code and commands are the English page's: tests/test_readme.py.
ONCE = [page for page in PAGES if page.name != "README.zh.md"]
NOT_RUN = {
    "pip install": "installs from a package index",
    "git clone": "needs a public repository",
    "make test": "runs these tests",
    "s3://": "needs an object store",
    "gs://": "needs an object store",
    "hf://": "needs the hub",
    "--engine": "needs a cluster",
    "--device cuda": "needs a GPU",
    "--push": "uploads to the hub",
    "--features inception": "fetches Inception's weights",
    "torchvision:fasterrcnn": "fetches weights",
}
"""Parts of commands that do not run here, and why; tests/test_docs.py checks their names."""
SLOW = {"compare", "cost", "distill", "doctor", "export", "probe", "--rank", "--recipe", "--token-parallel"}
SLOW |= {"deit_tiny_patch16_224", "gmlp_small", "torchvision", "trees", "runs/trees", "english"}
"""Commands with one of these words run in the slow tests only."""
EXIT_CODES = {"tokenmix doctor torch.nn:MultiheadAttention --dim 64": 1}
"""Of commands that find something, as the page says."""
TABLES = {
    "docs/guides/cost.md": "cost/cost.md",
    "docs/guides/report.md": "runs/compare-fashion-mnist",
    "docs/guides/runs.md": "runs/ext",
}
"""Where the rows of a page's tables `| file |` and `| column |` are found when its commands have run."""
BY_TIME = {"~", "exponent", "faster than self from about N"}
"""Columns that a report shows for some times only."""


def commands(code: str) -> Iterator[str]:
    return (line.strip() for line in code.replace("\\\n", " ").splitlines() if line.strip())


def in_pages(page: Path) -> list[str]:
    return [command for _, _, code in blocks(page, "console") for command in commands(code)]


def runs(command: str) -> bool:
    return not any(part in command for part in NOT_RUN)


def is_slow(command: str) -> bool:
    return not SLOW.isdisjoint(re.split("[ :]", command))


def cases() -> Iterator[Any]:
    for page in ONCE:
        if any(blocks(page, "python", "console")):
            yield pytest.param(page, False, id=identifier(page))
        if any(map(is_slow, filter(runs, in_pages(page)))):
            yield pytest.param(page, True, id=f"{identifier(page)}-slow", marks=pytest.mark.slow)


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs and data sets of the reader, for all pages."""
    folder = tmp_path_factory.mktemp("reader")
    store_data_sets(folder / "data")
    return folder


@pytest.fixture
def here(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's folder. A measurement is one round, and the modules of a page are gone when it ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENMIX_DATA", str(kept / "data"))
    monkeypatch.setattr("tokenmix.registry._imported", [])
    costs, cost = (importlib.import_module(f"tokenmix.{name}") for name in ("lab.compare.costs", "profiling.cost"))
    monkeypatch.setattr(costs, "time_interleaved", once := functools.partial(short_timing, cost.time_interleaved))
    monkeypatch.setattr(cost, "time_interleaved", once)
    monkeypatch.setattr(costs, "TOKENS", (4, 16))
    probe = importlib.import_module("tokenmix.testing.probe")
    monkeypatch.setattr(probe, "STEPS", dict.fromkeys(probe.STEPS, 2))
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        file = getattr(sys.modules[name], "__file__", None)
        if name == "my_layers" or (file or "").startswith(str(tmp_path)):
            del sys.modules[name]


def short_timing(measure: Any, functions: Any, **options: Any) -> Any:
    return measure(functions, **{**options, "repeats": 1, "warmup": 0, "turns": None, "calls": None})


# What a page adds for the reader's own code is gone when the page ends.
@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize(("page", "slow"), [*cases()])
def test_page_runs(page: Path, slow: bool, here: Path, kept: Path) -> None:
    """`no-run` needs a reason in the block's first line. A block after "In a file `NAME.py`:" is that module."""
    torch.manual_seed(0)
    lines = page.read_text().splitlines()
    namespace: dict[str, object] = {"__name__": "page"}
    for line, info, code in blocks(page, "python", "console"):
        if info == "console":
            for command in filter(runs, commands(code)):
                if slow or not is_slow(command):
                    run(command, f"{page}:{line}", kept)
        elif "no-run" in info:
            assert code.startswith("# not run: "), f"{page}:{line} does not say why it is not run"
        elif file := re.search(r"[Ii]n a file `(\w+)\.py`:$", lines[line - 4]):
            (here / f"{file[1]}.py").write_text(code)
            sys.path.append(str(here))
            importlib.invalidate_caches()
            namespace |= vars(importlib.import_module(file[1]))
        else:
            # Empty lines in front, so that a traceback shows the page's own line.
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
    if slow or Path(TABLES.get(identifier(page), "-")).exists():
        check_tables(page)


def run(command: str, place: str, kept: Path) -> None:
    _, *words = split_words(reader(command))
    provide(words, kept)
    importlib.invalidate_caches()
    if "--resume" in words:  # a run that ended before its result
        (Path(words[-1]) / "result.json").unlink()
    assert cli.main(shortened(words)) == EXIT_CODES.get(command, 0), f"{place} {command}"


def check_tables(page: Path) -> None:
    """What the page says that its command writes is there: files of a folder, columns of a report."""
    written = Path(TABLES.get(identifier(page), "."))
    for kind, table in re.findall(r"^\| (file|column) \|.*\n\|.*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE):
        names = [name for row in table.splitlines() for name in row.split("|")[1].replace("`", "").split(", ")]
        report = written / "report.html" if written.is_dir() else written
        for name in {name.strip() for name in names} - BY_TIME:
            found = (written / name).exists() if kind == "file" else name in report.read_text()
            assert found, f"{page}: {name} is not in {written}"


def test_the_tables_of_this_test_name_what_pages_have() -> None:
    shown = [command for page in PAGES for command in in_pages(page)]
    for command in filter(runs, shown):
        assert command.startswith("tokenmix "), command
    assert [part for part in NOT_RUN if not any(part in command for command in shown)] == []
    words = [[*split_words(reader(command)), *RUNS.values()] for command in shown]
    assert [key for key in SHORT if not any({*key.split()} <= {*one} for one in words)] == []
    said = {part for one in words for word in one for part in re.split("[ :=,#]", word)}
    assert {*FILES, *RUNS} - said == set()
