"""Other packages' own tests, which only their source distributions hold; nothing of them is in this repository."""

import subprocess
import sys
import tarfile
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tokenmix.lab.data.lookup import cache_root


def unpacked(package: str) -> Path:
    """The source distribution of the installed version, fetched once by pip; a skip with the reason if that fails."""
    name = f"{package}-{version(package)}"
    folder = cache_root() / "source-distributions"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not (folder / name).is_dir():
            wanted = f"{package}=={version(package)}"
            fetch = ["download", "--quiet", "--no-binary", ":all:", "--no-deps", "--dest", str(folder), wanted]
            done = subprocess.run([sys.executable, "-m", "pip", *fetch], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"pip cannot fetch the source of {wanted}: {done.stderr.strip()}", allow_module_level=True)
            with tarfile.open(folder / f"{name}.tar.gz") as archive:
                archive.extractall(folder, filter="data")
    return folder / name


def package(name: str, path: Path | None = None, **contents: Any) -> None:
    """A package of theirs under a name of its own: its folder, or what is imported from it where that is missing."""
    module: Any = types.ModuleType(name)
    module.__path__ = [] if path is None else [str(path)]
    vars(module).update(contents)
    sys.modules[name] = module
