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
from torch import Tensor

from tokenmix.data.fetch import log
from tokenmix.data.images.image_set import Skipped
from tokenmix.data.lookup import DataRequest
from tokenmix.data.store import Names, Stored, fetched
from tokenmix.errors import MissingExtra, UserError
from tokenmix.tasks.points.data.cloud import Cloud, PackedClouds, unit_ball
from tokenmix.tasks.points.data.files import read_points

__all__ = ["CloudItem", "check_folder", "kept", "pack", "read_item"]


@dataclass(frozen=True)
class CloudItem:
    """A file and the class of what is in it."""

    path: Path
    label: int


Read = Callable[[CloudItem], Cloud]


def check_folder(request: DataRequest, layout: str) -> Path:
    """The folder that a data set is in; `UserError` with its layout if there is none."""
    if not request.path.is_dir():
        raise UserError(
            f"{request.name} needs a folder, got {request.variant!r}; give --data {request.name}:PATH with {layout}"
        )
    return request.path


def read_item(item: CloudItem) -> Cloud:
    """The cloud of a file about its middle; points on a surface are the same wherever the file lies."""
    seed = zlib.crc32(item.path.name.encode("utf-8", "surrogateescape"))
    cloud = read_points(item.path, seed=seed, centred=True)
    return replace(cloud, label=item.label)


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
        except MissingExtra:
            raise
        except UserError as reason:
            skipped.append(Skipped(str(item.path), str(reason).removeprefix(str(item.path)).lstrip(": ")))
    if not clouds:
        raise UserError(f"none of {len(items)} files could be read; the first: {items[0].path} {skipped[0].reason}")
    packed = PackedClouds(
        points=torch.cat([cloud.points for cloud in clouds]),
        ends=torch.tensor([len(cloud.points) for cloud in clouds]).cumsum(0),
        labels=torch.tensor([cloud.label for cloud in clouds], dtype=torch.int64),
        names=Names.of(cloud.name for cloud in clouds),
        normals=_of_all([cloud.normals for cloud in clouds]),
        parts=_of_all([cloud.parts for cloud in clouds]),
    )
    return packed, skipped


def _of_all(values: list[Tensor | None]) -> Tensor | None:
    known = [value for value in values if value is not None]
    return torch.cat(known) if len(known) == len(values) else None


def kept(
    name: str, sides: Sequence[Sequence[CloudItem]], root: Path | None, read: Read
) -> tuple[list[PackedClouds], list[Skipped]]:
    """The packed clouds of a large set of text files: read once, scaled to the unit ball, and kept in the cache.

    Half precision there is 0.05 % of the radius. The files' names, sizes and times are in the name of what is kept, so
    a set that has changed is read again.
    """
    items = [item for side in sides for item in side]
    try:
        stats = [(item.path, item.path.stat()) for item in items]
    except OSError as error:
        raise UserError(f"cannot read {error.filename} ({error.strerror}); remove it, or unpack {name} again") from None
    listing = "\n".join(f"{path}|{stat.st_size}|{stat.st_mtime_ns}" for path, stat in stats)
    digest = hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()[:12]

    def fetch(_: Path) -> Stored:
        log(f"reading {len(items)} files of {name}, once")
        tensors: dict[str, Tensor] = {}
        notes: list[list[str]] = []
        for number, side in enumerate(sides):
            packed, bad = pack(side, lambda item: unit_ball(read(item)), name)
            found = {"points": packed.points.half(), "ends": packed.ends, "labels": packed.labels}
            found |= {"name text": packed.names.text, "name ends": packed.names.ends}
            if packed.normals is not None:
                found["normals"] = packed.normals.half()
            if packed.parts is not None:
                found["parts"] = packed.parts.byte()
            tensors |= {f"{number}.{key}": value for key, value in found.items()}
            notes += [[s.path, s.reason] for s in bad]
        return tensors, {"skipped": json.dumps(notes)}

    tensors, notes = fetched(f"{name}-{digest}", root, fetch)
    packed = []
    for number in range(len(sides)):
        found = {key.partition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{number}.")}
        names = Names(found.pop("name text"), found.pop("name ends"))
        packed.append(PackedClouds(names=names, **found))
    return packed, [Skipped(path, reason) for path, reason in json.loads(notes["skipped"])]
