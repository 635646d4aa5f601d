"""Where the samples of WebDataset shards lie: the headers of a shard are read once, and the index is kept in the cache.

A shard is a POSIX tar; files whose names differ only after the first dot are one sample: 07.jpg, 07.cls, 07.json.
"""

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix.data.images.image_set import Skipped
from tokenmix.data.reading import parse_json
from tokenmix.data.store import Names, fetched
from tokenmix.errors import UserError

__all__ = ["USAGE", "ShardIndex", "expand", "read_index"]

USAGE = "give --data wds:PATH/train-{000000..000009}.tar,PATH/val-{000000..000001}.tar"
MOST_SHARDS = 1_000_000
PICTURES = ("jpg", "jpeg", "png", "webp", "ppm")
BLOCK = 512
# More would be a damaged label, and a head of that many rows.
MOST_CLASSES = 1_000_000


@dataclass(frozen=True)
class ShardIndex:
    """Of each sample: its shard, where its picture lies there, label and name; and what is no sample."""

    paths: list[Path]
    shard: Tensor
    offset: Tensor
    size: Tensor
    label: Tensor
    names: Names
    skipped: list[Skipped]


class Found(NamedTuple):
    """One sample, or why there is none."""

    name: str
    offset: int = 0
    size: int = 0
    label: int = 0
    wrong: str = ""


def expand(pattern: str) -> list[Path]:
    """The files that a pattern such as train-{000..009}.tar or train-*.tar means; `UserError` if one is missing."""
    paths = [Path(path) for path in islice(_expand(str(Path(pattern).expanduser())), MOST_SHARDS + 1)]
    if len(paths) > MOST_SHARDS:
        raise UserError(f"wds:{pattern}: these are more than {MOST_SHARDS} shards; {USAGE}")
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        what = f"{missing[0]} does not exist ({len(missing)} of {len(paths)} shards)" if paths else "no file fits it"
        raise UserError(f"wds:{pattern}: {what}; {USAGE}")
    return paths


def _expand(pattern: str) -> Iterator[str]:
    braces = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if braces is None:
        yield from sorted(glob(pattern)) if re.search(r"[*?]", pattern) else [pattern]
        return
    for number in range(int(braces[1]), int(braces[2]) + 1):
        yield from _expand(f"{pattern[: braces.start()]}{number:0{len(braces[1])}}{pattern[braces.end() :]}")


def read_index(paths: Sequence[Path], root: Path | None) -> ShardIndex:
    """The index of shards, from the cache if none of them has changed since."""
    marks = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    digest = hashlib.blake2b(json.dumps(marks).encode(), digest_size=12).hexdigest()
    tensors, notes = fetched(f"shards/index-of-{paths[0].stem}-{digest}", root, lambda folder: _scan_all(paths))
    names = Names(tensors["text"], tensors["ends"])
    skipped = [Skipped(*pair) for pair in json.loads(notes["skipped"])]
    return ShardIndex(
        list(paths), tensors["shard"], tensors["offset"], tensors["size"], tensors["label"], names, skipped
    )


def _scan_all(paths: Sequence[Path]) -> tuple[dict[str, Tensor], dict[str, str]]:
    with ThreadPoolExecutor(8) as pool:
        shards = list(pool.map(_scan, paths))
    good = [(place, found) for place, shard in enumerate(shards) for found in shard if not found.wrong]
    wrong = [
        (f"{path}: {found.name}", found.wrong) for path, shard in zip(paths, shards) for found in shard if found.wrong
    ]
    columns = {name: [getattr(found, name) for _, found in good] for name in ("offset", "size", "label")}
    columns["shard"] = [place for place, _ in good]
    tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in columns.items()}
    names = Names.of(found.name for _, found in good)
    return {**tensors, "text": names.text, "ends": names.ends}, {"skipped": json.dumps(wrong)}


def _scan(path: Path) -> list[Found]:
    """The samples of one shard, from its headers and labels; `UserError` if it is cut off or damaged."""
    members: dict[str, dict[str, tuple[int, int]]] = {}
    last, problem, offset = "the beginning", "is truncated", 0
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                key, _, ending = base.partition(".")
                if member.isfile() and key and not member.issparse():
                    members.setdefault(f"{folder}/{key}" if folder else key, {})[ending.lower()] = (
                        member.offset_data,
                        member.size,
                    )
                last = member.name
            offset = tar.offset
            # A tar ends with blocks of zeros; the library takes a damaged header for an end as well.
            if (end := os.pread(file.fileno(), BLOCK, offset)) == bytes(BLOCK):
                return [_sample(key, parts, file.fileno()) for key, parts in members.items()]
            problem = "is truncated" if len(end) < BLOCK else "is damaged"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    # Headers of a damaged shard may announce more than there is memory, or hold no numbers.
    except Exception as error:
        told = str(error) or type(error).__name__
        problem = "is truncated" if "unexpected end" in told else f"is no uncompressed tar file ({told})"
    raise UserError(f"the shard {path} {problem} after {last}; fetch or write it again")


def _sample(key: str, parts: dict[str, tuple[int, int]], handle: int) -> Found:
    picture = next((parts[ending] for ending in PICTURES if ending in parts), None)
    if picture is None:
        return Found(key, wrong=f"has no picture, only .{', .'.join(sorted(parts))}")
    if picture[1] == 0:
        return Found(key, wrong="is empty (0 bytes)")
    try:
        label = _label(parts, handle)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        return Found(key, wrong=f"has no label ({error!r})")
    if not 0 <= label < MOST_CLASSES:
        return Found(key, wrong=f"has the label {label}, which is no class")
    return Found(key, *picture, label)


def _label(parts: dict[str, tuple[int, int]], handle: int) -> int:
    """The number in .cls, else "label" in .json."""

    def text(ending: str) -> Any:
        offset, size = parts[ending]
        return os.pread(handle, size, offset).decode()

    if "cls" in parts:
        return int(text("cls"))
    if "json" in parts:
        return int(parse_json(text("json"), ".json")["label"])
    raise ValueError("neither .cls nor .json")
