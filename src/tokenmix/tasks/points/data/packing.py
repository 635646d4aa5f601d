"""Files of clouds, read once and packed; what cannot be read is left out and named."""

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from tokenmix.data.fetch import log
from tokenmix.data.images.image_set import Skipped
from tokenmix.data.store import Names, Stored, fetched
from tokenmix.errors import UserError
from tokenmix.tasks.points.data.cloud import Cloud, PackedClouds
from tokenmix.tasks.points.data.files import read_points

__all__ = ["CloudItem", "kept", "pack", "unit_ball"]


@dataclass(frozen=True)
class CloudItem:
    """A file and the class of what is in it."""

    path: Path
    label: int


Read = Callable[[CloudItem], Cloud]


def read_item(item: CloudItem) -> Cloud:
    """The cloud of a file about its middle; points on a surface are the same wherever the file lies."""
    seed = zlib.crc32(item.path.name.encode("utf-8", "surrogateescape"))
    cloud = read_points(item.path, seed=seed, centred=True)
    return replace(cloud, label=item.label)


def unit_ball(cloud: Cloud) -> Cloud:
    """The same about the middle of its points, with the farthest at distance 1; one point alone lies in the middle."""
    points = cloud.points - cloud.points.mean(0)
    radius = points.norm(dim=1).max()
    if not 0 < radius < torch.inf:
        # Squares of very large or small numbers leave the range of float32.
        points = cloud.points.double() - cloud.points.double().mean(0)
        radius = points.norm(dim=1).max()
        points = points / radius if radius > 0 else points
        return replace(cloud, points=points.float())
    return replace(cloud, points=points / radius)


def pack(items: Sequence[CloudItem], read: Read = read_item, label: str = "") -> tuple[PackedClouds, list[Skipped]]:
    """The clouds of these files, and those that were left out.

    Normals are kept if every cloud has them, parts likewise.

    Raises:
        UserError: none can be read.
    """
    if not items:
        raise UserError(f"there are no {label} clouds; the list of them, or the folder, is empty")
    console = Console(stderr=True)
    hidden = not console.is_terminal or len(items) < 200
    clouds: list[Cloud] = []
    skipped: list[Skipped] = []
    for item in track(items, f"reading {label} clouds", console=console, transient=True, disable=hidden):
        try:
            clouds.append(read(item))
        except UserError as reason:
            skipped.append(Skipped(str(item.path), str(reason).removeprefix(str(item.path)).lstrip(": ")))
    if not clouds:
        raise UserError(f"none of {len(items)} files could be read; the first: {items[0].path} {skipped[0].reason}")
    normals = [cloud.normals for cloud in clouds if cloud.normals is not None]
    parts = [cloud.parts for cloud in clouds if cloud.parts is not None]
    packed = PackedClouds(
        torch.cat([cloud.points for cloud in clouds]),
        torch.tensor([len(cloud.points) for cloud in clouds]).cumsum(0),
        torch.tensor([cloud.label for cloud in clouds], dtype=torch.int64),
        Names.of(cloud.name for cloud in clouds),
        normals=torch.cat(normals) if len(normals) == len(clouds) else None,
        parts=torch.cat(parts) if len(parts) == len(clouds) else None,
    )
    return packed, skipped


def kept(
    name: str, sides: Sequence[Sequence[CloudItem]], root: Path | None, read: Read
) -> tuple[list[PackedClouds], list[Skipped]]:
    """The packed clouds of a large set of text files: read once, scaled to the unit ball, and kept in the cache.

    Half precision there is 0.05 % of the radius. The files' names, sizes and times are in the name of what is kept, so
    a set that has changed is read again.
    """
    items = [item for side in sides for item in side]
    stats = [(item.path, item.path.stat()) for item in items]
    told = "\n".join(f"{path}|{stat.st_size}|{stat.st_mtime_ns}" for path, stat in stats)
    digest = hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()[:12]

    def fetch(_: Path) -> Stored:
        log(f"reading {len(items)} files of {name}, once")
        tensors: dict[str, torch.Tensor] = {}
        notes: list[list[str]] = []
        for number, side in enumerate(sides):
            packed, bad = pack(side, lambda item: unit_ball(read(item)), name)
            tensors |= {f"{number}.{key}": value for key, value in _tensors(packed).items()}
            notes += [[s.path, s.reason] for s in bad]
        return tensors, {"skipped": json.dumps(notes)}

    tensors, notes = fetched(f"{name}-{digest}", root, fetch)
    packed = [_unpacked(tensors, f"{number}.") for number in range(len(sides))]
    return packed, [Skipped(path, reason) for path, reason in json.loads(notes["skipped"])]


def _tensors(packed: PackedClouds) -> dict[str, torch.Tensor]:
    names = packed.names
    found = {
        "points": packed.points.half(),
        "ends": packed.ends,
        "labels": packed.labels,
        "name text": names.text,
        "name ends": names.ends,
    }
    if packed.normals is not None:
        found["normals"] = packed.normals.half()
    if packed.parts is not None:
        found["parts"] = packed.parts.byte()
    return found


def _unpacked(tensors: dict[str, torch.Tensor], prefix: str) -> PackedClouds:
    return PackedClouds(
        tensors[prefix + "points"],
        tensors[prefix + "ends"],
        tensors[prefix + "labels"],
        Names(tensors[prefix + "name text"], tensors[prefix + "name ends"]),
        normals=tensors.get(prefix + "normals"),
        parts=tensors.get(prefix + "parts"),
    )
