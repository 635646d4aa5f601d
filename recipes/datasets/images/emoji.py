"""Emoji pictures of one vendor, 64 x 64, in nine categories; training and test share no concept.

They are drawings, not photographs. A concept is what is depicted, whatever the skin tone, the gender or the colour of
it: a man surfing, a woman surfing and their skin tones are one concept, and so are all coloured circles. A random split
would test on near-copies of training images. The split is made from emoji.json alone and counts every vendor's
pictures alike, so the same concept is on the same side for each vendor.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recipes.datasets.packages import npm_archive
from tokenmix.errors import unknown_name
from tokenmix.lab.data.fetch import FetchError
from tokenmix.lab.data.images.image_set import ImageData, InMemoryImages
from tokenmix.lab.data.lookup import DataRequest, stored_path
from tokenmix.lab.data.store import Stored, fetched

__all__ = ["VENDORS", "Picture", "composite", "concept_of", "load_emoji", "pictures_of", "split_concepts"]

VERSION = "16.0.0"
TEST_SHARE = 0.2


@dataclass(frozen=True)
class Vendor:
    """Whose drawings, under which licence, and the registry's own checksum of the package."""

    licence: str
    integrity: str


# Only vendors whose drawings are free; apple's and facebook's are not.
VENDORS = {
    "google": Vendor(
        "Noto Emoji, Apache-2.0",
        "sha512-ZRexfzs7MVoLnmzZmNsO4TKhnAJp5D++Vm6PpUpH/jEQQlemp3l88CjZ+DoZ2faM9R4QxZkOPJCoT8DlPhfQ3A==",
    ),
    "twitter": Vendor(
        "Twemoji, CC-BY-4.0",
        "sha512-7F+uCuHH+7Qnrc15P5tnbvKkg9E6tlzi4MnT2uW1RlN4pLYTza6cP/dstIfSDMtpjFLWuZewWg8jBbuL2eyELQ==",
    ),
}


@dataclass(frozen=True)
class Picture:
    """One picture that emoji.json names: its file, its category, and the concept it shows."""

    file: str
    category: str
    concept: str


def load_emoji(request: DataRequest) -> ImageData:
    """The drawings of a vendor (`google` if none is named) on white, fetched once."""
    vendor = request.variant or "google"
    if vendor not in VENDORS:
        raise unknown_name("emoji vendor", vendor, VENDORS)
    name = f"emoji-{vendor}"
    tensors, notes = fetched(name, request.root, partial(fetch_emoji, vendor))
    images = composite(tensors["images"])
    sides = [torch.nonzero(tensors["test"] == side).flatten() for side in (0, 1)]
    whole = InMemoryImages(images, tensors["labels"], flip=True, fill=255)
    source = f"emoji: {notes['source']}, {VENDORS[vendor].licence}, in {stored_path(name, request.root)}"
    return ImageData(whole.subset(sides[0]), whole.subset(sides[1]), json.loads(notes["classes"]), source)


def composite(images: Tensor, level: int = 255) -> Tensor:
    """uint8 RGBA (N, 4, H, W) laid on a grey level, white by default: uint8 (N, 3, H, W)."""
    parts = []
    for part in images.split(512):
        color, alpha = part[:, :3].int(), part[:, 3:].int()
        parts.append(((color * alpha + level * (255 - alpha) + 127) // 255).byte())
    return torch.cat(parts)


def fetch_emoji(vendor: str, folder: Path) -> Stored:
    """From the registry by HTTPS, else by the npm client, which knows the user's own registry."""
    archive, source = npm_archive(f"emoji-datasource-{vendor}", VERSION, VENDORS[vendor].integrity, folder)
    tensors, notes = read_package(archive, vendor)
    return tensors, {**notes, "source": source}


def read_package(archive: Path, vendor: str) -> Stored:
    """Pictures (RGBA), labels and side of the split from an emoji-datasource .tgz."""
    pngs, meta = _members(archive, f"package/img/{vendor}/64/")
    listed = list(pictures_of(meta))
    test = split_concepts(listed)
    pictures = sorted((p for p in listed if p.file in pngs), key=lambda p: p.file)
    if not pictures:
        raise FetchError(f"{archive.name} holds none of the pictures that its emoji.json names")
    classes = sorted({p.category for p in listed})
    tensors = {
        "images": torch.from_numpy(np.stack([_pixels(pngs[p.file]) for p in pictures]))
        .permute(0, 3, 1, 2)
        .contiguous(),
        "labels": torch.tensor([classes.index(p.category) for p in pictures]),
        "test": torch.tensor([p.concept in test for p in pictures], dtype=torch.uint8),
    }
    notes = {"files": [p.file for p in pictures], "concepts": [p.concept for p in pictures], "classes": classes}
    return tensors, {key: json.dumps(value) for key, value in notes.items()}


def _members(archive: Path, prefix: str) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    pngs: dict[str, bytes] = {}
    meta: list[dict[str, Any]] | None = None
    try:
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                wanted = member.name.startswith(prefix) and member.name.endswith(".png")
                file = tar.extractfile(member) if wanted or member.name == "package/emoji.json" else None
                if file is not None and wanted:
                    pngs[member.name.removeprefix(prefix)] = file.read()
                elif file is not None:
                    meta = json.load(file)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise FetchError(f"{archive.name} is no readable package ({error})") from None
    if meta is None:
        raise FetchError(f"{archive.name} has no emoji.json")
    return pngs, meta


def _pixels(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as image:
        rgba = image.convert("RGBA")
    return np.asarray(rgba.resize((64, 64)) if rgba.size != (64, 64) else rgba)


def pictures_of(meta: Sequence[Mapping[str, Any]]) -> Iterator[Picture]:
    """Every picture that emoji.json names, skin tones included; `Component` is no picture of anything."""
    for entry in meta:
        if entry["category"] == "Component":
            continue
        concept = concept_of(entry)
        for form in (entry, *entry.get("skin_variations", {}).values()):
            yield Picture(form["image"], entry["category"], concept)


SKIN = {"1F3FB", "1F3FC", "1F3FD", "1F3FE", "1F3FF"}
# Joiner, emoji presentation, the two gender signs, "facing right".
MARKS = {"200D", "FE0F", "2640", "2642", "27A1"}
# Forms that have a code point of their own for a gender or an age-neutral form: each becomes the neutral one.
NEUTRAL = {
    **dict.fromkeys(("1F468", "1F469"), "1F9D1"),
    **dict.fromkeys(("1F466", "1F467"), "1F9D2"),
    **dict.fromkeys(("1F474", "1F475"), "1F9D3"),
    **dict.fromkeys(("1F934", "1F478"), "1FAC5"),
    **dict.fromkeys(("1F930", "1FAC3"), "1FAC4"),
    **dict.fromkeys(("1F936",), "1F385"),
    **dict.fromkeys(("1F57A",), "1F483"),
    **dict.fromkeys(("1F46B", "1F46C", "1F46D"), "holding hands"),
    "1F48F": "kiss",
    "1F491": "couple with heart",
    "1F46A": "family",
}
# The same things spelt as sequences of persons, after NEUTRAL.
SPELT: dict[tuple[str, ...], str] = {
    ("1F9D1", "1F91D", "1F9D1"): "holding hands",
    ("1F9D1", "2764", "1F48B", "1F9D1"): "kiss",
    ("1F9D1", "2764", "1F9D1"): "couple with heart",
    ("1F9D1", "1F384"): "1F385",
}
COLORS = {"RED", "ORANGE", "YELLOW", "GREEN", "BLUE", "PURPLE", "BROWN", "BLACK", "WHITE", "PINK", "GREY", "LIGHT"}
SIZES = {"LARGE", "MEDIUM", "SMALL", "HEAVY"}


def concept_of(entry: Mapping[str, Any]) -> str:
    """What an entry of emoji.json depicts, apart from skin tone, gender, direction, colour and size."""
    if entry["subcategory"] == "keycap":
        return "keycap"
    if entry["category"] == "People & Body":
        return _person(entry["unified"].split("-"))
    words = [word for word in entry["name"].upper().split() if word not in COLORS | SIZES]
    name = " ".join(words) or entry["name"].upper()
    return "CLOCK FACE" if name.startswith("CLOCK FACE") else name


def _person(points: Sequence[str]) -> str:
    kept = tuple(NEUTRAL.get(point, point) for point in points if point not in SKIN | MARKS)
    if len(kept) > 1 and set(kept) <= {"1F9D1", "1F9D2"}:
        return "family"
    return SPELT.get(kept, "-".join(kept))


def split_concepts(pictures: Sequence[Picture], share: float = TEST_SHARE) -> set[str]:
    """The concepts of the test side: in each category, by the hash of their names, about `share` of the pictures."""
    category = {p.concept: p.category for p in reversed(pictures)}
    count: dict[str, int] = {}
    for p in pictures:
        count[p.concept] = count.get(p.concept, 0) + 1
    test = set()
    for name in sorted(set(category.values())):
        concepts = sorted((c for c in category if category[c] == name), key=_hash)
        room = share * sum(count[c] for c in concepts)
        for concept in concepts:
            if count[concept] <= room:
                test.add(concept)
                room -= count[concept]
    return test


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
