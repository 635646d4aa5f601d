"""Atomic writes: a kill or a full disk at any instant leaves the old file or the new one, never a part."""

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tokenmix.errors import UserError

# What a user can do about a disk that refuses.
DISK_ERRORS = {
    errno.ENOSPC: "free space on the disk",
    errno.EDQUOT: "free space in your quota",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EACCES: "give a folder that you may write with --out",
    errno.EPERM: "give a folder that you may write with --out",
    errno.EROFS: "give a folder that you may write with --out",
    errno.ENOTDIR: "give another folder with --out",
}


def disk_remedy(error: OSError) -> str:
    """What a user can do about it."""
    return DISK_ERRORS.get(error.errno or 0, "give another place with --out")


class DiskError(OSError, UserError):
    """The disk refuses: every further run on it would fail as well."""


def make_folder(path: Path) -> None:
    """Make a folder and its parents; `DiskError` if that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"cannot make the folder {path} ({error.strerror}); give another with --out") from None


# What `one_writer` leaves in a folder.
LOCKS = (".lock", ".writer")


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Lock a folder against a second process that would write into it.

    The lock is the operating system's and ends with the process, however that ends, so none is ever stale.

    Raises:
        UserError: another process holds it; the message says which. Or the folder, which may be a stranger's, has a
            link in it, through which another place would be written.
    """
    link = next((path for path in folder.rglob("*") if path.is_symlink()), None)
    if link is not None:
        raise UserError(f"{link} is a link to {os.readlink(link)}, where nothing is written; put the files themselves")
    path, writer = (folder / name for name in LOCKS)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        holder = writer.read_text() if writer.is_file() else "another process"
        raise UserError(
            f"{folder} is being written by {holder}; wait for it, or give another folder by --out"
        ) from None
    except OSError as error:
        raise DiskError(f"{error.strerror}: {path}; {disk_remedy(error)}") from None
    try:
        with contextlib.suppress(OSError):  # The lock holds without the line for whom it keeps out.
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            writer.write_text(f"process {os.getpid()} on {socket.gethostname()} since {began}")
        yield
    finally:
        with contextlib.suppress(OSError):  # The folder may be gone.
            writer.unlink()
        lock.release()


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write under another name and rename."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        write_bytes(beside, data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`replace_file` with indented JSON; a list of numbers, such as a row of a confusion matrix, is one line."""
    text = json.dumps(value, indent=2, default=str)
    # No string of JSON holds a line break, so this can only meet lists.
    text = re.sub(r"\[\n([^\[\]{}\"]*?)\n\s*\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    replace_file(path, (text + "\n").encode())


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    return json.loads(path.read_text())


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder next to `path` to write into, renamed to it at the end; nothing is left of it after an error."""
    partial = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        yield partial
        partial.chmod(0o755)
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_folder(beside: Path, path: Path) -> None:
    """Rename a finished folder to `path`.

    A folder cannot be renamed over a full one, so the one before steps aside first; `latest_complete_checkpoint` finds
    it if a kill falls between the two renames.
    """
    aside = _aside(path)
    _sync_folder(beside)
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    beside.rename(path)
    _sync_folder(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def latest_complete_checkpoint(path: Path) -> Path:
    """`path`, or the folder that had stepped aside for it when the process was killed."""
    aside = _aside(path)
    return aside if aside.exists() and not path.exists() else path


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.before")


def _sync_folder(folder: Path) -> None:
    # Without this a rename may be lost in a power cut; some systems cannot open a folder, and then it is not needed.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
