"""Safetensors files that carry the SHA-256 of their content, so that a file that changed or was mixed up is found."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, uint8

from tokenmix.errors import UserError
from tokenmix.files import check_regular

FORMAT, DIGEST = "format", "sha256"


def sealed(tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The metadata to write with these tensors: the notes, and the SHA-256 of tensors and notes.

    Args:
        tensors: on the CPU and contiguous.
        notes: what the file says about itself; neither "format" nor "sha256".
    """
    notes = dict(notes or {})
    return {FORMAT: "pt", **notes, DIGEST: digest(tensors, notes)}


def digest(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> str:
    """SHA-256 of names, types, shapes, values and notes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.flatten().view(uint8).numpy().data)
    for name in sorted(notes):
        found.update(f"{name} {notes[name]}".encode())
    return found.hexdigest()


def read_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, str], str | None]:
    """Tensors, notes and SHA-256 of a safetensors file; None for a file that carries no SHA-256.

    Raises:
        UserError: not a regular file, not a whole safetensors file, or one that changed after it was written.
    """
    check_regular(path)
    try:
        with safe_open(path, "pt") as opened:
            notes = dict(opened.metadata() or {})
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}); give another") from None
    written = notes.pop(DIGEST, None)
    notes.pop(FORMAT, None)
    if written is not None and written != digest(tensors, notes):
        raise UserError(f"{path} is damaged: its values are not those that were written; give another")
    return tensors, notes, written
