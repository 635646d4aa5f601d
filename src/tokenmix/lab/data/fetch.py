"""Fetch files from a URL or a Debian package, without root. A source that fails raises a short `FetchError`."""

import hashlib
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from tokenmix.errors import printable
from tokenmix.files import open_regular
from tokenmix.trust import held

T = TypeVar("T")
CONNECT_SECONDS = 8
PACKAGE_SECONDS = 300
_muted: ContextVar[bool] = ContextVar("muted", default=False)


class FetchError(Exception):
    """A short reason why a source could not be used."""


def log(message: str) -> None:
    """One line on stderr, without control characters, which names in data may have."""
    if not _muted.get():
        print(printable(f"tokenmix: {message}"), file=sys.stderr, flush=True)


def muted(quiet: bool) -> AbstractContextManager[None]:
    """Let `log` print nothing in the block, if `quiet`."""
    return held(_muted, quiet or _muted.get())


def first_that_works(what: str, sources: Sequence[tuple[str, Callable[[], T]]]) -> T:
    """Result of the first source that works; `FetchError` with all reasons if none does."""
    reasons = []
    for name, fetch in sources:
        log(f"fetching {what} from {name}")
        try:
            return fetch()
        except FetchError as reason:
            log(f"{name}: {reason}")
            reasons.append(f"{name}: {reason}")
    raise FetchError("; ".join(reasons))


def check_digest(files: Sequence[Path], expected: str, algorithm: str = "sha256") -> None:
    """`FetchError` unless these files, concatenated, have this checksum."""
    digest = hashlib.new(algorithm)
    for path in files:
        with open_regular(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    if (found := digest.hexdigest()) != expected:
        names = " to ".join(dict.fromkeys((files[0].name, files[-1].name)))
        raise FetchError(f"{names} has {algorithm} {found[:12]}…, expected {expected[:12]}…")


def download(url: str, path: Path) -> Path:
    """Download a URL to a path by pooch: one attempt, with a progress bar on a terminal; `FetchError` if it fails."""
    import pooch
    import requests

    fetch = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=CONNECT_SECONDS)
    try:
        fetch(url, str(path), None)
    except requests.RequestException as error:
        # The cause is wrapped three times.
        cause: BaseException = error
        while cause.__context__ is not None:
            cause = cause.__context__
        raise FetchError(str(cause) or type(cause).__name__) from None
    return path


def apt_package(package: str, folder: Path) -> tuple[Path, str]:
    """Unpack a Debian package under a folder; return the root of its files, and its version."""
    apt, dpkg = find_program("apt-get"), find_program("dpkg")
    options = ["-o", f"Acquire::http::Timeout={CONNECT_SECONDS}", "-o", "Acquire::Retries=1"]
    try:
        run_client([apt, *options, "download", package], folder)
    except FetchError:
        # A new machine has no package lists; private lists need no root.
        lists, cache = folder / "apt" / "lists", folder / "apt" / "cache"
        (lists / "partial").mkdir(parents=True)
        (cache / "archives" / "partial").mkdir(parents=True)
        options += ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
        run_client([apt, *options, "update"], folder)
        run_client([apt, *options, "download", package], folder)
    archives = sorted(folder.glob(f"{package}_*.deb"))
    if not archives:
        raise FetchError(f"apt-get download left no {package}_*.deb")
    root = folder / "root"
    run_client([dpkg, "-x", str(archives[-1]), str(root)], folder)
    return root, urllib.parse.unquote(archives[-1].stem.split("_")[1])


def find_program(name: str) -> str:
    """Path of a program; `FetchError` if it is not installed."""
    path = shutil.which(name)
    if path is None:
        raise FetchError(f"{name} is not on this machine")
    return path


def run_client(command: list[str], folder: Path) -> None:
    """Run a package manager in a folder; `FetchError` with its last line if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PACKAGE_SECONDS)
    except subprocess.TimeoutExpired:
        raise FetchError(f"{Path(command[0]).name} gave no answer in {PACKAGE_SECONDS} s") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise FetchError(lines[-1].strip() if lines else f"{Path(command[0]).name} ended with code {done.returncode}")
