"""Data sets by what follows --data: `name` or `name:variant`; nothing here imports PyTorch."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import user_path
from tokenmix.lab.data.remote import check_address, is_url, local_copies, reaching
from tokenmix.lab.registry import DATA_SETS, DataEntry, Kind
from tokenmix.registry import load_object
from tokenmix.trust import from_caller


@dataclass(frozen=True)
class DataRequest:
    """The request that a data reader gets.

    Attributes:
        name: of the data set.
        variant: what follows the name and a colon: a path, a number, a name, or nothing.
        kind: which of the entry's kinds is wanted.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if None.
        seed: of training samples that are composed on the fly; what is for testing never depends on it.
        img_size: (height, width) of labelled images; the set's own if None.
        channels: of labelled images, 1 or 3; the set's own if None.
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
        """Name and variant as the user gives them."""
        return f"{self.name}:{self.variant}" if self.variant else self.name

    @property
    def path(self) -> Path:
        """The variant as a path; of the file at a URL its copy in the cache."""
        return local_path(self.variant, self.root)


@dataclass(frozen=True)
class DataInfo:
    """One line of `tokenmix list data`; `cached` says that it can be read without a network."""

    name: str
    kinds: tuple[Kind, ...]
    about: str
    licence: str
    origin: str
    cached: bool


def parse_spec(spec: str, kind: Kind | None = None) -> tuple[DataEntry, str]:
    """The entry and the variant of `name` or `name:variant`; `UserError` for what is unknown, or without `kind`."""
    name, colon, variant = spec.partition(":")
    able = [entry for entry in DATA_SETS if kind is None or kind in entry.kinds]
    if not spec:
        raise UserError(f"no data given; give --data with one of {_usable(able)}")
    if name not in DATA_SETS:
        layouts = [entry.name for entry in able if entry.variant == "path"]
        if layouts and user_path(spec).exists():
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
    """What the reader of a data set returns for this kind; `UserError` for a place on the network that a file names."""
    entry, variant = parse_spec(spec, kind)
    img_size = img_size or (None if entry.img_size is None else (entry.img_size, entry.img_size))
    if entry.name == "hf":
        check_address(spec.partition("#")[0])
    for piece in re.split("[,#]", variant):
        if "://" in piece or "::" in piece:
            check_address(piece)
    with reaching():
        data = load_object(entry.load)(DataRequest(entry.name, variant, kind, root, seed, img_size, channels))
    return replace(data, spec=spec)


def fetch_data(spec: str, root: Path | None = None) -> str:
    """Fetch a data set unless it is in the cache; returns the line that says where it came from."""
    entry, _ = parse_spec(spec)
    return load_data(spec, entry.kinds[0], root=root).source


def list_data(root: Path | None = None) -> list[DataInfo]:
    """All data sets, in the order of registration."""
    return [
        DataInfo(e.name, e.kinds, e.about, e.licence, e.origin, all(stored_path(s, root).exists() for s in e.stored))
        for e in DATA_SETS
    ]


def data_sets(specs: str) -> list[str]:
    """The data sets that are separated by commas; after data with a path only the name of one begins another."""
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
    """A path; of the file at a URL its copy in the cache, which is fetched if need be."""
    return local_copies([address], cache_root(root))[0] if is_url(address) else user_path(address)


def with_absolute_paths(spec: str) -> str:
    """The same with full paths, so that a run can be evaluated from anywhere; URLs stay."""
    name, _, variant = spec.partition(":")
    if not variant or name not in DATA_SETS or DATA_SETS[name].variant not in ("path", "shards"):
        return spec
    # Shards are two patterns: for training, and for testing.
    paths = variant.split(",") if DATA_SETS[name].variant == "shards" else [variant]
    full = (path if is_url(path) else str(user_path(path).absolute()) for path in paths)
    return f"{name}:{','.join(full)}"


def short_name(spec: str) -> str:
    """The data in a word or two, fit for the name of a folder."""
    name, _, variant = spec.partition(":")
    if not variant:
        return name
    # Columns of a table follow its path.
    path = user_path(variant.partition("#")[0].split(",")[0]).absolute()
    shards = name in DATA_SETS and DATA_SETS[name].variant == "shards"
    return f"{name}-{path.parent.name if shards else path.name}"


def cache_root(root: str | Path | None = None) -> Path:
    """The folder of fetched data: `root`, else $TOKENMIX_DATA, else ~/.cache/tokenmix/data."""
    chosen = root or os.environ.get("TOKENMIX_DATA") or Path.home() / ".cache" / "tokenmix" / "data"
    return user_path(chosen)


def stored_path(name: str, root: str | Path | None = None) -> Path:
    """Where the data set of this name is, or will be."""
    return cache_root(root) / f"{name}.safetensors"
