"""The cache of fetched data sets: one safetensors file each, with its name and checksum, written under a lock."""

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import replacing
from tokenmix.lab.data.fetch import FetchError, log
from tokenmix.lab.data.lookup import stored_path
from tokenmix.lab.data.tensor_files import read_sealed, sealed

# The note of a file that says what it was kept as.
NAME = "stored_as"
Stored = tuple[dict[str, Tensor], dict[str, str]]


def fetched(
    name: str,
    root: str | Path | None,
    fetch: Callable[[Path], Stored],
    instead: str = "use --data digits, which is embedded",
) -> Stored:
    """Tensors and notes of a data set: from the cache, else what `fetch(empty folder)` gives, which is then kept.

    Safe among concurrent runs: one fetches while the others wait; a run that is killed leaves nothing half-written.
    """
    path = stored_path(name, root)
    stored = _read_stored(path, quiet=True)
    if stored is not None:
        return stored
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            stored = _read_stored(path)
            if stored is None:
                stored = _fetch_into(path, fetch)
    except FetchError as reason:
        raise UserError(
            f"{name} is not in {path.parent} and could not be fetched ({reason}); "
            f"{instead}, or set TOKENMIX_DATA to a folder that has it"
        ) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot keep {name} ({error}); free space or set TOKENMIX_DATA to a writable folder") from None
    return stored


def _fetch_into(path: Path, fetch: Callable[[Path], Stored]) -> Stored:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-", ignore_cleanup_errors=True) as folder:
        # apt's download helper is another user and must reach the folder.
        os.chmod(folder, 0o755)
        tensors, notes = fetch(Path(folder))
        with replacing(path) as partial:
            save_file(tensors, partial, metadata=sealed(tensors, {**notes, NAME: path.stem}))
    log(f"{path.stem} is now in {path}")
    return tensors, notes


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
    """Strings in little memory, as one uint8 tensor and where each ends (int64).

    A million Python strings would be copied into every loader process.
    """

    def __init__(self, text: Tensor, ends: Tensor) -> None:
        self.text, self.ends = text, ends

    @classmethod
    def of(cls, names: Iterable[str]) -> "Names":
        """These strings."""
        coded = [name.encode("utf-8", "surrogateescape") for name in names]
        text = torch.frombuffer(bytearray(b"".join(coded)), dtype=torch.uint8) if any(coded) else torch.empty(0).byte()
        return cls(text, torch.tensor([len(name) for name in coded], dtype=torch.int64).cumsum(0))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return self.text[start : int(self.ends[index])].numpy().tobytes().decode("utf-8", "surrogateescape")
