"""Atomic file writes, and reads restricted to regular files.

A file is written under a random name in the same folder and then renamed. Readers see the old or the new file, never a
part. Links are never followed.
"""

import contextlib
import errno
import html
import io
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tokenmix.errors import UserError, needs, printable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Values = dict[str, Any]
"""A JSON object."""

# Remedies by errno.
DISK_ERRORS = {
    errno.ENOSPC: "free space on the disk",
    errno.EDQUOT: "free space in your quota",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions, or give another path"),
    errno.ENOTDIR: "give another folder as out",
}


def disk_remedy(error: OSError) -> str:
    return DISK_ERRORS.get(error.errno or 0, "give another place as out")


def user_path(text: str | Path) -> Path:
    """Expand `~` in a path; `UserError` if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text}: there is no such user's home; give the whole path, or set HOME") from None


def inside(root: Path, name: str) -> Path:
    """`root / name` for an untrusted name; `UserError` unless the result is inside the root."""
    path = root / name
    if "\0" in name or not path.resolve().is_relative_to(root.resolve()) or path.resolve() == root.resolve():
        raise UserError(f"the name {name!r} leaves the folder {root}; rename the file")
    return path


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open a regular file for reading; `UserError` for a folder, a device or a pipe (never waited for)."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path} is a folder, a pipe or a device, not a file; copy its content into one")
    return os.fdopen(handle, "rb")


def check_regular(path: Path) -> Path:
    """The path, for libraries that open files themselves; raises like `open_regular`."""
    open_regular(path).close()
    return path


def read_bytes(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Content of a regular UTF-8 file, without a byte order mark; `UserError` for another encoding."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8; save it in this encoding") from None


class DiskError(OSError, UserError):
    """The disk refuses writes; later runs would also fail."""


def make_folder(path: Path) -> None:
    """Make a folder and its parents; `DiskError` if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"cannot make the folder {path} ({error.strerror}); give another as out") from None


def check_new(folder: Path) -> None:
    """`UserError` unless `new_folder` can write a folder, which is empty or does not exist."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; remove it, or give another --out")
    _refuse_link(folder)
    # It is written beside its place, and renamed.
    if folder.exists() and (os.path.ismount(folder) or folder.samefile(Path.cwd())):
        raise UserError(f"{folder} is the current folder or a mount, which is not replaced; give --out a folder in it")
    above = next(place for place in folder.absolute().parents if os.path.lexists(place))
    if not above.is_dir() or not os.access(above, os.W_OK):
        problem = "Permission denied" if above.is_dir() else f"{above} is not a folder"
        raise DiskError(f"cannot write {folder} ({problem}); give another --out")


def _refuse_link(folder: Path) -> None:
    if folder.is_symlink():
        raise UserError(f"{folder} is a link to {os.readlink(folder)}, which is not replaced; give the folder itself")


@contextmanager
def _shown_as(path: Path, partial: Path) -> Iterator[None]:
    """Errors of the disk with the user's path instead of the random one."""
    try:
        yield
    except OSError as error:
        if str(error.filename) == str(partial):  # Setting it to None would remove the error's text.
            error.filename = str(path)
        raise
    except Exception as error:
        # safetensors and tokenizers have no class for a refusing disk.
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None or isinstance(error, UserError):
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None


# Files left by `one_writer`, and the prefix of half-written files.
LOCKS = LOCK, WRITER = ".lock", ".writer"
PARTIAL = ".partial-"


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Lock a folder against a second writing process; `UserError` names the process that holds the lock.

    The lock is an operating system lock, which ends with the process and is never stale. A link in the folder raises
    `UserError`, because writing would follow it to another place.
    """
    link = next((path for path in folder.rglob("*") if path.is_symlink()), None)
    if link is not None:
        raise UserError(f"{link} is a link to {os.readlink(link)}, where nothing is written; put the files themselves")
    writer = folder / WRITER
    with _locked(folder):
        try:
            with contextlib.suppress(OSError):  # the lock holds without the line about its owner
                began = time.strftime("%Y-%m-%d %H:%M:%S")
                replace_file(writer, f"process {os.getpid()} on {socket.gethostname()} since {began}".encode())
            yield
        finally:
            with contextlib.suppress(OSError):  # the folder may be gone
                writer.unlink()


def check_no_writer(folder: Path) -> None:
    """Raise `UserError`, naming the process, if another process writes into the folder. Leaves no files."""
    if (folder / LOCK).exists():
        with _locked(folder):
            return


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    path = folder / LOCK
    if os.path.lexists(path) and not (stat.S_ISREG((found := path.lstat()).st_mode) and found.st_nlink == 1):
        raise UserError(f"{path} is not a file of its own, so it cannot be locked; remove it")
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        try:
            with open_regular(folder / WRITER) as file:
                writer = file.read(200).decode(errors="replace")
        except (OSError, UserError):
            writer = "another process"
        raise UserError(f"{folder} is being written by {writer}; wait for it, or give another folder as out") from None
    except OSError as error:
        raise DiskError(f"{error.strerror}: {path}; {disk_remedy(error)}") from None
    try:
        yield
    finally:
        lock.release()


def is_unused(folder: Path) -> bool:
    """Whether a folder has only a lock and partial files of a killed writer."""
    return all(entry.name in LOCKS or entry.name.startswith(PARTIAL) for entry in folder.iterdir())


def remove_partial(folder: Path) -> None:
    """Remove partial files of a killed writer; the caller must hold the folder's lock."""
    for path in folder.glob(f"{PARTIAL}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file in a folder of our own and sync it to disk; a link is never followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new file; on exit it is synced and renamed to `path` (`UserError` if not a file), or removed on error."""
    if os.path.lexists(path) and not path.is_symlink() and not stat.S_ISREG(path.lstat().st_mode):
        raise UserError(f"{path} is a folder, a pipe or a device; give another name for the file")
    partial = path.with_name(f"{PARTIAL}{secrets.token_hex(8)}{path.suffix}")
    try:
        with _shown_as(path, partial):
            handle = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            mode = stat.S_IMODE(os.fstat(handle).st_mode)
            os.close(handle)
            yield partial
            with open_regular(partial) as file:
                # A library may have put another file in its place.
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


def replace_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file, given as bytes or as parts, under another name and rename."""
    with replacing(path) as partial:
        write_bytes(partial, data)


def copy_folder(source: Path, target: Path) -> None:
    """Copy the files of an untrusted folder into an empty folder; `UserError` for a link or a pipe."""
    for entry in sorted(source.iterdir()):
        if entry.is_symlink():
            raise UserError(f"{entry} is a link to {os.readlink(entry)}, which is not copied; put the files themselves")
        if entry.is_dir():
            (target / entry.name).mkdir()
            copy_folder(entry, target / entry.name)
        elif entry.name not in LOCKS:
            write_bytes(target / entry.name, read_bytes(entry))


def open_to_append(path: Path) -> TextIO:
    """Open a regular file for appending; a link is never followed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path} is a folder, a pipe or a device, not a file; remove it")
    return os.fdopen(handle, "a", newline="", encoding="utf-8")


def to_json(value: object, indent: int | None = 2) -> str:
    """JSON text: non-finite numbers are null, other objects `str`; a list of numbers (matrix row) is one line."""
    text = json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)
    # JSON strings contain no line break, so this only matches lists.
    return re.sub(r"\[\n([^\[\]{}\"]*?)\n\s*\]", lambda m: f"[{' '.join(m[1].split())}]", text)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def to_text(rows: Sequence[Sequence[str]]) -> str:
    """A table as text, its header first: names on the left, numbers aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def to_html(rows: Sequence[Sequence[str]], about: str) -> str:
    """An HTML table, header first, under a sentence, for notebooks."""
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<p>{html.escape(about)}</p><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def to_frame(rows: Iterable[Values]) -> "pd.DataFrame":
    """A pandas table with a row for each of these."""
    with needs("to_pandas"):
        import pandas as pd

    return pd.DataFrame(rows)


def write_json(path: Path, value: object, indent: int | None = 2) -> None:
    replace_file(path, (to_json(value, indent) + "\n").encode())


def read_json(path: Path) -> Any:
    """The value in a JSON file; non-finite numbers are None, as `write_json` writes them."""
    return json.loads(read_text(path), parse_constant=lambda word: None, parse_float=lambda word: _finite(float(word)))


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `path` on exit, or is removed after an error.

    A full folder cannot be renamed over, so the old folder is first renamed aside. If the process is killed between the
    two renames, `latest_complete_checkpoint` finds the old folder. Raises `UserError` if `path` is a link.
    """
    _refuse_link(path)
    partial, aside = path.with_name(f"{PARTIAL}{secrets.token_hex(8)}"), _aside(path)
    make_folder(path.parent)
    try:
        with _shown_as(path, partial):
            partial.mkdir()
            yield partial
            _sync_folder(partial)
            if path.exists() and any(path.iterdir()):
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
            partial.replace(path)
        _sync_folder(path.parent)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def latest_complete_checkpoint(path: Path) -> Path:
    """`path`, or the folder renamed aside when the process was killed."""
    aside = _aside(path)
    return aside if aside.exists() and not path.exists() else path


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.before")


def _sync_folder(folder: Path) -> None:
    # Without this, a power cut may lose a rename. Systems that cannot open a folder do not need it.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def plain_text(figure: "Figure") -> "Figure":
    """Escape a matplotlib figure's text from files: a dollar starts no formula, control characters are visible."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
        text.set_text("\n".join(map(printable, text.get_text().split("\n"))))
    return figure


def save_figure(figure: "Figure", file: Path, dpi: float) -> None:
    with replacing(file) as partial:
        plain_text(figure).savefig(partial, dpi=dpi)
