"""WebDataset shards, read in place and nearly sequentially; nothing is unpacked, images are decoded on demand.

A shard is a POSIX tar. Files whose names differ only after the first dot form a sample: 07.jpg, 07.cls, 07.json. Shard
headers are read once; the cache keeps an index of the samples' positions.
"""

import json
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import open_regular, user_path
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.images.decode import is_read, stored_size
from tokenmix.lab.data.images.image_set import CHANNELS, ImageData, LazyImages, warn_of_shrinking
from tokenmix.lab.data.lookup import DataRequest, cache_root, glob_urls, is_url, local_copies, local_copy_if_any, origin
from tokenmix.lab.data.reading import TEST_SHARE, Skipped, UnreadableImage, log_skipped, names_in, parse_json
from tokenmix.lab.data.store import Names, fetched_of_files

USAGE = "give --data wds:PATH/train-{000000..000009}.tar,PATH/val-{000000..000001}.tar"
MOST_SHARDS = 1_000_000
# Preferred endings of a sample's image, in order; then any other format that is read.
PICTURES = ("jpg", "jpeg", "png", "webp", "ppm")
BLOCK = 512
# Labels from here on count as damage, or need a classes.txt, unless there are more samples.
UNNAMED_CLASSES = 1000
# A head has a row for each class.
MOST_CLASSES = 1_000_000
# Increase when the content of the index changes, so that cached ones are rebuilt.
INDEX = 3
# Size of the shuffle buffer: about four shards of ImageNet's usual size.
BUFFER = 5000


Parts = dict[str, tuple[int, int]]
"""Offset and size of each file of a sample, by its ending."""


class Found(NamedTuple):
    """One sample, or why it is unusable."""

    name: str
    offset: int = 0
    size: int = 0
    label: int = 0
    wrong: str = ""
    again: bool = False


def expand(pattern: str, root: Path | None = None) -> list[Path]:
    """Files of a pattern such as train-{000..009}.tar, or cached copies of URLs; `UserError` if one is missing."""
    whole = pattern if is_url(pattern) else str(user_path(pattern))
    names = list(islice(_expand(whole), MOST_SHARDS + 1))
    if len(names) > MOST_SHARDS:
        raise UserError(f"wds:{pattern}: these are more than {MOST_SHARDS} shards; {USAGE}")
    paths = local_copies(names, cache_root(root)) if is_url(pattern) else [Path(name) for name in names]
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        wrong = "is no file" if missing and missing[0].exists() else "does not exist"
        what = f"{missing[0]} {wrong} ({len(missing)} of {len(paths)} shards)" if paths else "no file fits it"
        raise UserError(f"wds:{pattern}: {what}; {USAGE}")
    return paths


def _expand(pattern: str) -> Iterator[str]:
    braces = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if braces is None:
        found = glob_urls if is_url(pattern) else glob
        yield from sorted(found(pattern)) if re.search(r"[*?]", pattern) else [pattern]
        return
    for number in range(int(braces[1]), int(braces[2]) + 1):
        yield from _expand(f"{pattern[: braces.start()]}{number:0{len(braces[1])}}{pattern[braces.end() :]}")


def _scan_all(paths: Sequence[Path]) -> tuple[dict[str, Tensor], dict[str, str]]:
    with ThreadPoolExecutor(8) as pool:
        shards = list(pool.map(_scan, paths))
    good = [(place, found) for place, shard in enumerate(shards) for found in shard if not found.wrong]
    named = [(f"{path}: {found.name}", found) for path, shard in zip(paths, shards) for found in shard]
    columns = {name: [getattr(found, name) for _, found in good] for name in ("offset", "size", "label")}
    columns["shard"] = [place for place, _ in good]
    tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in columns.items()}
    names = Names.of(found.name for _, found in good)
    notes = {
        "skipped": [(name, found.wrong) for name, found in named if found.wrong],
        "again": [name for name, found in named if found.again],
    }
    return {**tensors, "text": names.text, "ends": names.ends}, {key: json.dumps(value) for key, value in notes.items()}


def _scan(path: Path) -> list[Found]:
    """Samples of one shard, from its headers and labels; `UserError` if the shard is truncated or damaged."""
    members: dict[str, list[Parts]] = {}
    last, problem, offset, before = "the beginning", "is truncated", 0, ""
    try:
        with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                key, _, ending = base.partition(".")
                if member.isfile() and key and not member.issparse():
                    # Files of one key that follow each other.
                    groups = members.setdefault(name := f"{folder}/{key}" if folder else key, [])
                    if name != before or ending.lower() in groups[-1]:
                        groups.append({})
                    groups[-1][ending.lower()] = (member.offset_data, member.size)
                    before = name
                last = member.name
            offset = tar.offset
            # A tar ends with zero blocks; the library also takes a damaged header for the end.
            if (end := os.pread(file.fileno(), BLOCK, offset)) == bytes(BLOCK):
                file.seek(offset)
                if not any(part.strip(b"\0") for part in iter(lambda: file.read(1 << 20), b"")):
                    return [one for key, groups in members.items() for one in _of_key(key, groups, file.fileno())]
                problem = "has further files behind its end, as several joined by cat have,"
            else:
                problem = "is truncated" if len(end) < BLOCK else "is damaged"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    # Headers of a damaged shard may announce more than the memory, or hold no numbers.
    except Exception as error:
        told = str(error) or type(error).__name__
        problem = "is truncated" if "unexpected end" in told else f"is no uncompressed tar file ({told})"
    raise UserError(f"the shard {path} {problem} after {last}; fetch or write it again")


def _of_key(key: str, groups: Sequence[Parts], handle: int) -> list[Found]:
    """Samples of a key: each group with a picture and a label, or one of all, if pictures precede all labels."""
    if len(groups) == 1:
        return [_sample(key, groups[0], handle)]
    kinds = [(bool(_pictures(parts)), "cls" in parts or "json" in parts) for parts in groups]
    together = {ending: place for parts in groups for ending, place in parts.items()}
    if (True, True) not in kinds and len(together) == sum(map(len, groups)):
        return [_sample(key, together, handle)]
    if {(True, False), (False, True)} <= {*kinds}:
        wrong = "repeats a key, with pictures and labels apart; give each sample its own key"
        return [Found(key, wrong=wrong)] * len(groups)
    whole = [place for place, kind in enumerate(kinds) if all(kind)]
    return [
        _sample(key, groups[place], handle)._replace(again=place in whole[1:])
        for place, kind in enumerate(kinds)
        if any(kind)
    ]


def _pictures(parts: Parts) -> list[str]:
    """The endings of pictures, the preferred ones first."""
    return [one for one in (*PICTURES, *(one for one in parts if is_read(f".{one}"))) if one in parts]


def _sample(key: str, parts: Parts, handle: int) -> Found:
    picture = next((parts[ending] for ending in _pictures(parts)), None)
    if picture is None:
        return Found(key, wrong=f"has no picture, only .{', .'.join(sorted(parts))}")
    if picture[1] == 0:
        return Found(key, wrong="is empty (0 bytes)")
    # The integer in .cls, else "label" in .json, also as text or as 1.0.
    ending = next((ending for ending in ("cls", "json") if ending in parts), None)
    if ending is None:
        return Found(key, wrong="has no label: neither .cls nor .json")
    try:
        value: object = os.pread(handle, parts[ending][1], parts[ending][0]).decode("utf-8-sig")
        if ending == "json":
            held = parse_json(str(value), "its .json")
            if not isinstance(held, dict) or "label" not in held:
                raise ValueError('its .json has no "label"')
            value = held["label"]
        written = str(value).strip() if isinstance(value, int | float | str) else ""
        if isinstance(value, bool) or not re.fullmatch(r"[+-]?[0-9]+(\.0*)?", written):
            raise ValueError(f"{str(value)[:40]!r} is not a whole number")
        label = int(written.partition(".")[0])
    except ValueError as error:
        return Found(key, wrong=f"has no label: {error}")
    if not 0 <= label < MOST_CLASSES:
        return Found(key, wrong=f"has the label {label}, which is no class")
    return Found(key, *picture, label)


class ShardImages(LazyImages):
    """Images of shards, read by offset with a cached index; `skipped` are no samples, `again` repeat a key."""

    reads_in_order = True

    def __init__(
        self, paths: Sequence[Path], size: tuple[int, int], channels: int = CHANNELS, root: Path | None = None
    ) -> None:
        self._read_ahead: set[int] = set()
        stem = re.sub(r"[^\w.-]", "_", paths[0].stem, flags=re.ASCII)[:60]
        name = f"shards/index-{INDEX}-of-{stem}"
        index, notes = fetched_of_files(name, paths, root, lambda folder: _scan_all(paths))
        super().__init__(index["label"], size, channels=channels, photographs=True)
        self.paths, self.names = paths, Names(index["text"], index["ends"])
        self.shard, self.offset, self.length = index["shard"], index["offset"], index["size"]
        self.skipped = [Skipped(*pair) for pair in json.loads(notes["skipped"])]
        self.again: list[str] = json.loads(notes["again"])

    def name(self, index: int) -> str:
        place = int(self.indices[index])
        return f"{self.paths[int(self.shard[place])]}: {self.names[place]}"

    def source(self, index: int) -> bytes:
        place = int(self.indices[index])
        offset, size = int(self.offset[place]), int(self.length[place])
        shard = int(self.shard[place])
        try:
            with open_regular(self.paths[shard]) as file:
                if shard not in self._read_ahead and hasattr(os, "posix_fadvise"):
                    # The system reads the shard ahead sequentially: the buffer's picks are then in memory.
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
                    self._read_ahead.add(shard)
                data = os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise UserError(
                f"the shard {self.paths[shard]} cannot be read any more ({error.strerror}); put it back"
            ) from None
        if len(data) < size:
            raise UnreadableImage("is truncated (the shard is shorter than it was)")
        return data

    def check_shares(self, world_size: int) -> None:
        count = len(np.unique(self.shard[self.indices].numpy()))
        if count < world_size:
            raise UserError(
                f"{count} shards cannot be distributed over {world_size} processes; write at least that many shards, "
                f"or give --devices {count} or fewer"
            )

    def training_order(self, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
        """Shards of an epoch in random order, distributed over the ranks; each rank has a shuffle buffer.

        A rank with too few samples repeats its shards. A rank with too many leaves some out, others in the next epoch.
        """
        shard = self.shard[self.indices].numpy()
        self.check_shares(world_size)
        mine = np.random.default_rng([abs(seed), epoch]).permutation(np.unique(shard))[rank::world_size]
        by_shard = np.argsort(shard, kind="stable")
        starts = np.searchsorted(shard[by_shard], mine, "left")
        stops = np.searchsorted(shard[by_shard], mine, "right")
        stream = np.concatenate([by_shard[start:stop] for start, stop in zip(starts, stops)])
        order = shuffled(stream, BUFFER, np.random.default_rng([abs(seed), epoch, 1, rank]))
        return np.resize(order, -(-len(self) // world_size))


def shuffled(stream: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Output of a shuffle buffer of `size` over a stream."""
    out = np.empty_like(stream)
    buffer = stream[:size].copy()
    draws = rng.integers(0, len(buffer), len(stream)) if len(buffer) else []
    for i, place in enumerate(draws[: max(0, len(stream) - size)]):
        out[i], buffer[place] = buffer[place], stream[i + size]
    out[max(0, len(stream) - size) :] = rng.permutation(buffer)
    return out


def load_webdataset(request: DataRequest) -> ImageData:
    """Images of shards for training and, after a comma, for testing; without test shards, a fifth of each class.

    The split depends only on the samples' names. A classes.txt next to the shards names the classes, else numbers do.
    """
    patterns = [pattern for pattern in request.variant.split(",") if pattern]
    if not 1 <= len(patterns) <= 2:
        raise UserError(f"wds needs one pattern of shards, or two, got {request.variant!r}; {USAGE}")
    paths = [expand(pattern.strip(), request.root) for pattern in patterns]
    if len(paths) == 2 and (both := {path.resolve() for path in paths[0]} & {path.resolve() for path in paths[1]}):
        raise UserError(f"wds: {min(both)} is in both patterns, so training samples would be tested; {USAGE}")
    size, channels = request.img_size, request.channels or CHANNELS
    assert size is not None  # The registry has one.
    sets = [ShardImages(part, size, channels, request.root) for part in paths]
    skipped = [one for images in sets for one in images.skipped]
    log_skipped(skipped, unit="sample")
    if again := [name for images in sets for name in images.again]:
        keys = "key" if len(again) == 1 else "keys"
        log(f"{len(again)} {keys} repeated in one shard, the first {again[0]}; all samples are kept")
    for images, part in zip(sets, paths):
        if not len(images):
            raise UserError(
                f"{part[0]} and the other shards hold no sample with an image and a .cls or .json label; "
                "write both under one key"
            )
    train, test = sets if len(sets) == 2 else _split(sets[0])
    cache = cache_root(request.root)
    place = origin(paths[0][0].parent, cache)
    source = f"wds: {sum(map(len, paths))} shards in {place}, read where they lie"
    names = f"{place}/classes.txt"
    named = local_copy_if_any(names, cache) if is_url(place) else Path(names)
    classes = _classes(named, sets)
    warn_of_shrinking(lambda index: stored_size(train.source(index)), len(train), size)
    return ImageData(train, test, classes, source, skipped)


def _classes(file: Path | None, sets: Sequence[ShardImages]) -> list[str]:
    """Names in classes.txt, else numbers; `UserError` for a label beyond them, or beyond what is plausible."""
    last = max(sets, key=lambda images: int(images.labels.max()))
    count = 1 + int(last.labels.max())
    where = f"{last.name(int(last.labels.argmax()))} has the label {count - 1}"
    if file is None or not file.exists():
        most = max(UNNAMED_CLASSES, sum(map(len, sets)))
        if count > most:
            raise UserError(
                f"{where}, and there are {sum(map(len, sets))} samples; correct it, or name the classes in a "
                "classes.txt next to the shards, one line per class"
            )
        return [str(label) for label in range(max(count, 2))]
    names = names_in(file)
    if len(names) < count:
        raise UserError(
            f"{file} names {len(names)} classes, the labels go up to {count - 1} ({where}); give one line per class"
        )
    return names


def _split(images: ShardImages) -> tuple[LazyImages, LazyImages]:
    marks = np.array([zlib.crc32(images.names[i].encode("utf-8", "replace")) for i in range(len(images))])
    test = np.zeros(len(images), dtype=bool)
    labels = images.labels.numpy()
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        chosen = own[np.argsort(marks[own], kind="stable")]
        test[chosen[: min(len(own) - 1, max(1, round(TEST_SHARE * len(own))))]] = True
    if not test.any():
        raise UserError(f"every class has one sample only, none is left for testing; {USAGE}")
    train, tested = (torch.from_numpy(np.flatnonzero(part)) for part in (~test, test))
    return images.subset(train), images.subset(tested)
