"""No interpreter that a run starts imports files of the current folder, whatever their names."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmix.lab.data.indexed import IndexedDataset, make_loader
from tokenmix.lab.grid import Cell, in_processes, make_engine
from tokenmix.lab.train.config import EngineConfig
from tokenmix.lab.train.launch import launch
from tokenmix.lab.train.sources import make_config

NAMES = (
    "argparse",
    "asyncio",
    "base64",
    "collections",
    "copy",
    "cupy",
    "dataclasses",
    "datetime",
    "enum",
    "fsspec",
    "functools",
    "hashlib",
    "importlib",
    "inspect",
    "json",
    "logging",
    "multiprocessing",
    "numpy",
    "pickle",
    "platform",
    "random",
    "ray",
    "re",
    "runpy",
    "selectors",
    "signal",
    "site",
    "sitecustomize",
    "socket",
    "struct",
    "subprocess",
    "submitit",
    "tempfile",
    "threading",
    "timm",
    "tokenmix",
    "torch",
    "traceback",
    "types",
    "typing",
    "tyro",
    "usercustomize",
    "uuid",
    "warnings",
    "weakref",
)


class Numbers(IndexedDataset):
    """The numbers from 0 to 7."""

    unit = "numbers"

    def __len__(self) -> int:
        return 8

    def read(self, indices: torch.Tensor, epoch: int) -> Any:
        return indices


def by_engine(engine: Callable[..., Any]) -> None:
    """One cell that ends before it trains, so that most of the time is the start of its interpreter."""
    config = make_config(
        model="mixer_nano",
        data="digits",
        limit=8,
        batch_size=1000,
        accumulate=1000,
        device="cpu",
        out=Path("run").absolute(),
    )
    ((cell, outcome),) = engine([Cell("c", config)])
    assert cell.name == "c"
    assert "1000 parts of a step" in str(outcome)


def jobs() -> None:
    by_engine(functools.partial(in_processes, jobs=1))


def devices() -> None:
    assert launch(1, ["--version"]) == 0


def workers() -> None:
    loader = make_loader(Numbers(), batch_size=4, shuffle=False, seed=0, workers=1)
    loader.multiprocessing_context = "spawn"  # As on macOS, and on Linux from Python 3.14 on.
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def submitit() -> None:
    pytest.importorskip("submitit")
    by_engine(make_engine(EngineConfig(engine="slurm", slurm={"cluster": "local"}), Path("jobs").absolute(), 0))


def ray() -> None:
    pytest.importorskip("ray")
    by_engine(make_engine(EngineConfig(engine="ray"), Path("jobs"), 0))


@pytest.mark.parametrize(
    "start", [jobs, devices, *(pytest.param(slow, marks=pytest.mark.slow) for slow in (workers, submitit, ray))]
)
def test_a_child_imports_nothing_of_the_current_folder(
    start: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(marks / name)!r}, 'w')\nraise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    # pytest's own sys.path may hold an entry that means the current folder.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    start()
    assert not list(marks.iterdir())
