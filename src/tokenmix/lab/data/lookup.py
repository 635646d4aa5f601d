"""Data sets by the value of --data: `name` or `name:variant`, paths, and URLs. No import of PyTorch.

fsspec fetches files at URLs (https://, s3://, gs://, hf://) into the cache. fsspec's file systems list, sign, fetch and
retry; their environment variables and fsspec's configuration set their options. This module decides which addresses may
be read, where copies are kept and whether a copy is current. A copy is written under another name and renamed, so the
cache never has part of a file.
"""

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tokenmix.errors import UserError, missing_extra, one_line, unknown_name
from tokenmix.files import inside, read_text, replace_file, user_path
from tokenmix.lab.data.fetch import log
from tokenmix.lab.registry import DATA_SETS, DataEntry, Kind
from tokenmix.registry import load_object
from tokenmix.trust import check_typed, from_caller, held

SCHEMES = ("https", "s3", "gs", "hf")
"""Allowed schemes; others of fsspec read and write local files, or chain one address in another."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Hosts allowed for http://, which is neither encrypted nor signed."""
# Sub-folder of copies in the cache.
COPIES = "remote"
# Concurrent downloads.
CONCURRENT = 8
# s3fs 2026.9 resumes an interrupted body, but not if several requests read one file.
OPTIONS = {"s3": {"max_concurrency": 1}}
# Fields that change with a file's content: of S3 and HTTP, Google, Hugging Face, and local disks.
VERSION = ("ETag", "Last-Modified", "etag", "generation", "blob_id", "mtime", "size")


class RemoteFile(NamedTuple):
    """A file at a URL: file system, path, and copy in the cache."""

    url: str
    system: Any
    path: str
    copy: Path
    version: str
    size: int

    @property
    def mark(self) -> Path:
        return self.copy.with_name(f".{self.copy.name}.version")

    @property
    def current(self) -> bool:
        there = self.copy.is_file() and self.mark.is_file() and not self.copy.is_symlink()
        return there and read_text(self.mark) == self.version


def is_url(address: str) -> bool:
    """Whether the address is a URL such as s3://BUCKET/FILE, not a path."""
    return re.match(r"[a-z][a-z0-9+.-]*://", address) is not None


_reaching: ContextVar[bool] = ContextVar("reaching", default=False)
"""Whether a data set with checked addresses is being read, which may derive other addresses from them."""


def check_address(address: str) -> None:
    """`UserError` for a network address that comes from a file, not from the user."""
    check_typed(address, "a place on the network", "read", "give the data yourself with --data")


@from_caller
def glob_urls(pattern: str) -> list[str]:
    """Sorted URLs that match a pattern with * or ?."""
    system, path = _file_system(pattern)
    with _one_line(pattern):
        return sorted(system.unstrip_protocol(name) for name in system.glob(path))


@from_caller
def local_copies(urls: Sequence[str], cache: Path) -> list[Path]:
    """Cached copies of the files at these URLs; one process fetches missing or changed files."""
    from filelock import FileLock

    places: list[tuple[str, Any, str]] = [(url, *_file_system(url)) for url in urls]
    with ThreadPoolExecutor(CONCURRENT) as pool:
        files = list(pool.map(lambda place: _describe(place, cache), places))
        for folder in dict.fromkeys(file.copy.parent for file in files):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with FileLock(folder / ".lock"):
                    missing = [file for file in files if file.copy.parent == folder and not file.current]
                    if missing:
                        size = sum(file.size for file in missing) / 1e6
                        log(f"fetching {len(missing)} of {len(files)} files ({size:,.1f} MB) into {folder}")
                    list(pool.map(_fetch, missing))
            except OSError as error:
                raise UserError(
                    f"cannot keep files in {folder} ({error}); free space or set TOKENMIX_DATA to a writable folder"
                ) from None
    return [file.copy for file in files]


@from_caller
def local_copy_if_any(url: str, cache: Path) -> Path | None:
    """Cached copy of the file at a URL; None if there is no file."""
    system, path = _file_system(url)
    with _one_line(url):
        if not system.exists(path):
            return None
    return local_copies([url], cache)[0]


def origin(path: Path, cache: Path) -> str:
    """URL of a copy in the cache, or of a folder of copies; for other paths the absolute path."""
    path, copies = path.resolve(), (cache / COPIES).resolve()
    if not path.is_relative_to(copies):
        return str(path)
    protocol, *parts = path.relative_to(copies).parts
    return f"{protocol}://{'/'.join(parts)}"


def check_scheme(url: str) -> None:
    """`UserError` for a URL with a scheme outside `SCHEMES`, with "..", or with another URL in it."""
    protocol, _, place = url.partition("://")
    if not is_url(url) or "::" in url or ".." in PurePosixPath(place).parts or "#" in place:
        raise UserError(f"{url!r} is not a plain URL; give one such as s3://BUCKET/FOLDER/FILE")
    host: str | None = None
    with contextlib.suppress(ValueError):
        host = urlsplit(url).hostname
    if protocol not in SCHEMES and not (protocol == "http" and host in LOOPBACK):
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise UserError(f"{url}: {protocol}:// is not read; give a path, or a URL that begins with one of {known}")


def _file_system(url: str) -> tuple[Any, str]:
    """File system of a URL, and the path in it."""
    if not _reaching.get():
        check_address(url)
    check_scheme(url)
    protocol = url.partition("://")[0]
    from fsspec.core import url_to_fs

    with _one_line(url):
        system, path = url_to_fs(url, **OPTIONS.get(protocol, {}))
        # Earlier listings may be outdated.
        system.invalidate_cache()
    return system, path


def _describe(place: tuple[str, Any, str], cache: Path) -> RemoteFile:
    url, system, path = place
    with _one_line(url):
        info = system.info(path)
    if info["type"] != "file":
        raise UserError(f"{url} is a folder; give the URL of a file, shards (wds:), or tables in a folder (hf:)")
    version = " ".join(f"{key}={info[key]}" for key in VERSION if info.get(key) is not None)
    protocol, _, name = url.partition("://")
    return RemoteFile(url, system, path, inside(cache / COPIES / protocol, name), version, info.get("size") or 0)


def _fetch(file: RemoteFile) -> None:
    folder = file.copy.parent
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-", ignore_cleanup_errors=True) as temporary:
        fetched = Path(temporary) / file.copy.name
        with _one_line(file.url):
            file.system.get_file(file.path, str(fetched))
        fetched.replace(file.copy)
    replace_file(file.mark, file.version.encode())


@contextmanager
def _one_line(url: str) -> Iterator[None]:
    """Report errors of any file system in one line, except a full disk."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{url} does not exist; check the address") from None
    except Exception as error:  # Errors of networks and services have no common class.
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        # fsspec's message hides which module is missing.
        cause = error.__cause__
        missing = missing_extra(url, cause) if isinstance(cause, ImportError) else None
        if missing is not None:
            raise missing from None
        raise UserError(f"{url} cannot be read ({one_line(error)}); check address, network and credentials") from None


@dataclass(frozen=True)
class DataRequest:
    """Request to a data reader.

    Attributes:
        name: name of the data set.
        variant: text after the name and a colon: a path, a number, a name, or empty.
        kind: requested kind, one of the entry's.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if None.
        seed: seed of training samples composed on the fly; test samples never depend on it.
        img_size: (height, width) of labelled images; the set's own if None.
        channels: 1 or 3 for labelled images; the set's own if None.
    """

    name: str
    variant: str
    kind: Kind
    root: Path | None = None
    seed: int = 0
    img_size: tuple[int, int] | None = None
    channels: int | None = None

    @property
    def spec(self) -> str:
        """Name and variant as the user writes them."""
        return f"{self.name}:{self.variant}" if self.variant else self.name

    @property
    def path(self) -> Path:
        """The variant as a path; for a URL, the path of the cached copy."""
        return local_path(self.variant, self.root)


@dataclass(frozen=True)
class DataInfo:
    """One line of `tokenmix list data`; `cached` means readable without a network."""

    name: str
    kinds: tuple[Kind, ...]
    about: str
    licence: str
    origin: str
    cached: bool


def parse_spec(spec: str, kind: Kind | None = None) -> tuple[DataEntry, str]:
    """Entry and variant of `name` or `name:variant`; `UserError` if it is unknown or lacks `kind`."""
    name, colon, variant = spec.partition(":")
    able = [entry for entry in DATA_SETS if kind is None or kind in entry.kinds]
    if not spec:
        raise UserError(f"no data given; give --data with one of {_usable(able)}")
    if name not in DATA_SETS:
        layouts = [entry.name for entry in able if entry.variant == "path"]
        if layouts and user_path(spec).exists():
            suffix = "text" if spec.endswith(".txt") else user_path(spec).suffix[1:].lower()
            layouts = [suffix] if suffix in layouts else layouts
            others = f", or {', '.join(f'{layout}:' for layout in layouts[1:])} before it" * (len(layouts) > 1)
            raise UserError(f"unknown data set {spec!r}; for what is at that path give {layouts[0]}:{spec}{others}")
        raise unknown_name("data set", name, [entry.name for entry in able])
    entry = DATA_SETS[name]
    if kind is not None and kind not in entry.kinds:
        raise UserError(f"{name} has {' and '.join(entry.kinds)}, not {kind}; give one of {_usable(able)}")
    if not variant and entry.variant in ("path", "shards"):
        raise UserError(f"{name} needs a path: give --data {entry.about}")
    if variant and entry.variant == "none":
        raise UserError(f"{name} has no variants, got {spec!r}; give {name}")
    if colon and not variant:
        raise UserError(f"{name} has no variant '', got {spec!r}; give {name}")
    return entry, variant


def _usable(entries: Iterable[DataEntry]) -> str:
    return ", ".join(f"{entry.name}{':PATH' * (entry.variant in ('path', 'shards'))}" for entry in entries)


@from_caller
def load_data(
    spec: str,
    kind: Kind,
    *,
    root: Path | None = None,
    seed: int = 0,
    img_size: tuple[int, int] | None = None,
    channels: int | None = None,
) -> Any:
    """Result of a data set's reader for this kind; `UserError` for a network address that comes from a file."""
    entry, variant = parse_spec(spec, kind)
    img_size = img_size or entry.size
    if entry.name == "hf":
        check_address(spec.partition("#")[0])
    for piece in re.split("[,#]", variant):
        if "://" in piece or "::" in piece:
            check_address(piece)
    with held(_reaching, True):
        data = load_object(entry.load)(DataRequest(entry.name, variant, kind, root, seed, img_size, channels))
    return replace(data, spec=spec)


def fetch_data(spec: str, root: Path | None = None) -> str:
    """Fetch a data set unless it is cached; return a line with its source."""
    entry, _ = parse_spec(spec)
    return load_data(spec, entry.kinds[0], root=root).source


def list_data(root: Path | None = None) -> list[DataInfo]:
    """All data sets, in the order of registration."""
    return [
        DataInfo(e.name, e.kinds, e.about, e.licence, e.origin, all(stored_path(s, root).exists() for s in e.stored))
        for e in DATA_SETS
    ]


def data_sets(specs: str) -> list[str]:
    """Split data sets at commas; after data with a path, only a data set's name starts another one."""
    found: list[str] = []
    for piece in specs.split(","):
        before = found[-1].partition(":")[0] if found else ""
        has_path = before in DATA_SETS and DATA_SETS[before].variant in ("path", "shards")
        if has_path and piece.partition(":")[0] not in DATA_SETS:
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return list(dict.fromkeys(found))


@from_caller
def local_path(address: str, root: Path | None = None) -> Path:
    """A path; for a URL, the path of the cached copy, fetched if needed."""
    return local_copies([address], cache_root(root))[0] if is_url(address) else user_path(address)


def with_absolute_paths(spec: str) -> str:
    """The spec with absolute paths, so that a run can be evaluated from anywhere; URLs stay."""
    name, _, variant = spec.partition(":")
    if not variant or name not in DATA_SETS or DATA_SETS[name].variant not in ("path", "shards"):
        return spec
    # Shards are two patterns, for training and testing.
    paths = map(str.strip, variant.split(",")) if DATA_SETS[name].variant == "shards" else [variant]
    full = (path if is_url(path) else str(user_path(path).absolute()) for path in paths)
    return f"{name}:{','.join(full)}"


def short_name(spec: str) -> str:
    """Short name of the data, usable as a folder name."""
    name, _, variant = spec.partition(":")
    if not variant:
        return name
    # Columns of a table follow its path.
    path = user_path(variant.partition("#")[0].split(",")[0]).absolute()
    shards = name in DATA_SETS and DATA_SETS[name].variant == "shards"
    return f"{name}-{path.parent.name if shards else path.name}"


def cache_root(root: str | Path | None = None) -> Path:
    """Folder of fetched data: `root`, else $TOKENMIX_DATA, else ~/.cache/tokenmix/data."""
    return user_path(root or os.environ.get("TOKENMIX_DATA") or "~/.cache/tokenmix/data")


def stored_path(name: str, root: str | Path | None = None) -> Path:
    """Path of a data set in the cache, whether it exists or not."""
    return cache_root(root) / f"{name}.safetensors"
