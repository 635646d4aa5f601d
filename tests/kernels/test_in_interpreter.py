"""Runs the kernels' comparisons on a CPU, in Triton's interpreter.

In a process of their own: the variable that picks the interpreter is read when triton is imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(str(file) for file in Path(__file__).parent.glob("interpreted_*.py"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_interpreted(which: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", which, *FILES],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
