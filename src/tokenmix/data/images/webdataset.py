"""WebDataset shards, read where they lie and nearly in their order; nothing is unpacked, or decoded before its time."""

import os
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenmix.data.fetch import log
from tokenmix.data.images.decode import UnreadableImage
from tokenmix.data.images.image_set import LazyImages
from tokenmix.data.images.load import LoadedImages
from tokenmix.data.images.shards import USAGE, ShardIndex, expand, read_index
from tokenmix.data.lookup import DataRequest
from tokenmix.errors import UserError

__all__ = ["ShardImages", "load_webdataset", "shuffled"]

SIZE = (224, 224)
# Samples among which the next one is drawn: about four shards of ImageNet's usual size.
BUFFER = 5000
TEST_SHARE = 0.2
OPEN_FILES = 32


class ShardImages(LazyImages):
    """The pictures of shards, each read by its place in its shard."""

    def __init__(self, index: ShardIndex, size: tuple[int, int]) -> None:
        super().__init__(index.label, size, photographs=True)
        self.index = index
        self._open: OrderedDict[int, int] = OrderedDict()

    def name(self, index: int) -> str:
        place = int(self.places[index])
        return f"{self.index.paths[int(self.index.shard[place])]}: {self.index.names[place]}"

    def source(self, index: int) -> bytes:
        place = int(self.places[index])
        offset, size = int(self.index.offset[place]), int(self.index.size[place])
        shard = int(self.index.shard[place])
        try:
            data = os.pread(self._handle(shard), size, offset)
        except OSError as error:
            raise UserError(f"the shard {self.index.paths[shard]} cannot be read any more ({error.strerror})") from None
        if len(data) < size:
            raise UnreadableImage("is truncated (the shard is shorter than it was)")
        return data

    def check_shares(self, world_size: int) -> None:
        """Each process needs a shard of its own."""
        count = len(np.unique(self.index.shard[self.places].numpy()))
        if count < world_size:
            raise UserError(
                f"{count} shards cannot be dealt out to {world_size} processes; write at least as many shards, or give "
                f"--devices {count} or less"
            )

    def training_order(self, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
        """The shards of an epoch in a random order, dealt out to the processes; in each, a shuffle buffer.

        A process whose shards hold less than its share starts over with them; one whose hold more leaves the rest out,
        which in the next epoch are others.
        """
        shard = self.index.shard[self.places].numpy()
        self.check_shares(world_size)
        mine = np.random.default_rng([abs(seed), epoch]).permutation(np.unique(shard))[rank::world_size]
        by_shard = np.argsort(shard, kind="stable")
        starts = np.searchsorted(shard[by_shard], mine, "left")
        stops = np.searchsorted(shard[by_shard], mine, "right")
        stream = np.concatenate([by_shard[start:stop] for start, stop in zip(starts, stops)])
        order = shuffled(stream, BUFFER, np.random.default_rng([abs(seed), epoch, 1, rank]))
        return np.resize(order, -(-len(self) // world_size))

    def _handle(self, shard: int) -> int:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        if len(self._open) >= OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        handle = self._open[shard] = os.open(self.index.paths[shard], os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            # The system reads the shard from end to end, so that what the buffer picks from it lies in memory by then.
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
        return handle

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def __del__(self) -> None:
        for handle in self._open.values():
            os.close(handle)


def shuffled(stream: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """What comes out of a buffer of `size` that a stream fills, and from which a random one is drawn each time."""
    out = np.empty_like(stream)
    buffer = stream[:size].copy()
    draws = rng.integers(0, len(buffer), len(stream)) if len(buffer) else []
    for i, place in enumerate(draws[: max(0, len(stream) - size)]):
        out[i], buffer[place] = buffer[place], stream[i + size]
    out[max(0, len(stream) - size) :] = rng.permutation(buffer)
    return out


def load_webdataset(request: DataRequest) -> LoadedImages:
    """The pictures of shards for training, and after a comma those for testing; without them a fifth of each class.

    Which fifth depends on the samples' names alone. Classes are named by the lines of a classes.txt next to the shards,
    else by their numbers.
    """
    patterns = [pattern for pattern in request.variant.split(",") if pattern]
    if not 1 <= len(patterns) <= 2:
        raise UserError(f"wds needs one pattern of shards, or two, got {request.variant!r}; {USAGE}")
    paths = [expand(pattern) for pattern in patterns]
    indices = [read_index(part, request.root) for part in paths]
    skipped = [one for index in indices for one in index.skipped]
    if skipped:
        first = "; ".join(f"{s.path} {s.reason}" for s in skipped[:3])
        log(f"{len(skipped)} sample{'s' * (len(skipped) > 1)} left out: {first}{'; …' * (len(skipped) > 3)}")
    for index, part in zip(indices, paths):
        if not len(index.label):
            raise UserError(f"{part[0]} and the other shards hold no sample with an image and a .cls or .json label")
    sets = [ShardImages(index, request.img_size or SIZE) for index in indices]
    train, test = sets if len(sets) == 2 else _split(sets[0])
    source = f"wds: {sum(map(len, paths))} shards in {paths[0][0].parent.resolve()}, read where they lie"
    count = 1 + max(int(part.labels.max()) for part in (train, test))
    return LoadedImages(train, test, _classes(paths[0][0].parent / "classes.txt", count), source, skipped)


def _classes(file: Path, count: int) -> list[str]:
    if not file.is_file():
        return [str(label) for label in range(max(count, 2))]
    names = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    if len(names) < count:
        raise UserError(f"{file} names {len(names)} classes, the labels go up to {count - 1}; give one line a class")
    return names


def _split(images: ShardImages) -> tuple[LazyImages, LazyImages]:
    marks = np.array([zlib.crc32(images.index.names[i].encode("utf-8", "replace")) for i in range(len(images))])
    test = np.zeros(len(images), dtype=bool)
    labels = images.labels.numpy()
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        chosen = places[np.argsort(marks[places], kind="stable")]
        test[chosen[: min(len(places) - 1, max(1, round(TEST_SHARE * len(places))))]] = True
    if not test.any():
        raise UserError(f"every class has one sample only, none is left for testing; {USAGE}")
    train, tested = (torch.from_numpy(np.flatnonzero(part)) for part in (~test, test))
    return images.subset(train), images.subset(tested)
