"""Safetensors files with the SHA-256 of their content, which detects changes, and the cache of fetched data sets."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import check_regular, replacing
from tokenmix.lab.data.fetch import FetchError, log
from tokenmix.lab.data.lookup import stored_path

FORMAT, DIGEST = "format", "sha256"
# Metadata key: the name under which a file was stored.
NAME = "stored_as"
Stored = tuple[dict[str, Tensor], dict[str, str]]


def sealed(tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Metadata for these tensors, on the CPU and contiguous: the notes, and the SHA-256 of tensors and notes."""
    notes = dict(notes or {})
    return {FORMAT: "pt", **notes, DIGEST: digest(tensors, notes)}


def digest(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> str:
    """SHA-256 of names, types, shapes, values and notes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.flatten().view(torch.uint8).numpy().data)
    for name in sorted(notes):
        found.update(f"{name} {notes[name]}".encode())
    return found.hexdigest()


def read_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, str], str | None]:
    """Tensors, notes and SHA-256 (if present) of a safetensors file; `UserError` if its content changed."""
    check_regular(path)
    try:
        with safe_open(path, "pt") as opened:
            notes = dict(opened.metadata() or {})
        tensors = load_file(path)
    except (SafetensorError, TypeError, RuntimeError) as error:  # the last two for shapes that torch does not have
        raise UserError(f"{path} is not a whole safetensors file ({error}); give another") from None
    written = notes.pop(DIGEST, None)
    notes.pop(FORMAT, None)
    if written is not None and written != digest(tensors, notes):
        raise UserError(f"{path} is damaged: its values are not those that were written; give another")
    return tensors, notes, written


def fetched(
    name: str,
    root: str | Path | None,
    fetch: Callable[[Path], Stored],
    instead: str = "use --data digits, which is embedded",
) -> Stored:
    """Tensors and notes of a data set from the cache, else from `fetch(empty folder)`; safe for concurrent runs."""
    path = stored_path(name, root)
    stored = _read_stored(path, quiet=True)
    if stored is not None:
        return stored
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            stored = _read_stored(path)
            if stored is not None:
                return stored
            place = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-", ignore_cleanup_errors=True)
            with place as folder:
                # apt's download helper runs as another user and needs access to the folder.
                os.chmod(folder, 0o755)
                tensors, notes = fetch(Path(folder))
                with replacing(path) as partial:
                    save_file(tensors, partial, metadata=sealed(tensors, {**notes, NAME: path.stem}))
            log(f"{path.stem} is now in {path}")
            return tensors, notes
    except FetchError as reason:
        raise UserError(
            f"{name} is not in {path.parent} and could not be fetched ({reason}); "
            f"{instead}, or set TOKENMIX_DATA to a folder that has it"
        ) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot keep {name} ({error}); free space or set TOKENMIX_DATA to a writable folder") from None


def fetched_of_files(
    name: str, paths: Sequence[Path], root: str | Path | None, make: Callable[[Path], Stored]
) -> Stored:
    """Cached result of `make` on these files; the cached name includes their names, sizes and times."""
    try:
        found = [(path.resolve(), path.stat()) for path in paths]
    except OSError as error:
        raise UserError(f"cannot read {error.filename} ({error.strerror}); remove it, or unpack it again") from None
    listing = "\n".join(f"{path}|{stat.st_size}|{stat.st_mtime_ns}" for path, stat in found)
    mark = hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return fetched(f"{name}-{mark}", root, make)


def _read_stored(path: Path, *, quiet: bool = False) -> Stored | None:
    if not path.exists():
        return None
    try:
        tensors, notes, sha256 = read_sealed(path)
    except UserError as error:
        problem = f"is damaged ({error})"
    else:
        if sha256 is not None and notes.pop(NAME, None) == path.stem:
            return tensors, notes
        problem = f"does not have the checksum of {path.stem}"
    if not quiet:
        log(f"{path} {problem}; it is fetched again")
    return None


class Names:
    """Strings as one uint8 tensor with ends (int64), since loader processes would copy a list of a million strings."""

    def __init__(self, text: Tensor, ends: Tensor) -> None:
        self.text, self.ends = text, ends

    @classmethod
    def of(cls, names: Iterable[str]) -> "Names":
        coded = [name.encode("utf-8", "surrogateescape") for name in names]
        text = torch.frombuffer(bytearray(b"".join(coded)), dtype=torch.uint8) if any(coded) else torch.empty(0).byte()
        return cls(text, torch.tensor([len(name) for name in coded], dtype=torch.int64).cumsum(0))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return self.text[start : int(self.ends[index])].numpy().tobytes().decode("utf-8", "surrogateescape")
