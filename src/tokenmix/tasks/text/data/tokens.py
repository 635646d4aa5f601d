"""Documents as token ids on the disk: made once, read through a memory map, so that neither has to fit into memory."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from filelock import FileLock
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tokenmix.data.fetch import log
from tokenmix.data.lookup import cache_root
from tokenmix.errors import UserError
from tokenmix.tasks.text.data.corpus import Corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Tokens", "tokenized", "tokenizer_digest"]

FORMAT = 1
SIDES = ("train", "test")
GROUP_CHARACTERS = 1 << 21


@dataclass(frozen=True)
class Tokens:
    """Documents one after the other, each with [SEP] behind it.

    Attributes:
        ids: uint16 or uint32 (T,), mapped from the disk.
        starts: uint8 (T,), 1 where a word begins.
    """

    ids: np.ndarray
    starts: np.ndarray


def tokenized(corpus: Corpus, tokenizer: "PreTrainedTokenizerFast", root: Path | None = None) -> tuple[Tokens, Tokens]:
    """The token ids of a corpus for training and held out, kept under the cache by the contents of both.

    Safe among concurrent runs: one tokenises while the others wait; a run that is killed leaves nothing half-written.

    Raises:
        UserError: a side without text, or a cache that cannot be written.
    """
    key = hashlib.sha256(f"{FORMAT} {corpus.digest} {tokenizer_digest(tokenizer)}".encode()).hexdigest()[:24]
    folder = cache_root(root) / "tokens" / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not _whole(folder):
                _write(corpus, tokenizer, folder)
    except OSError as error:
        raise UserError(
            f"cannot keep the tokens of {corpus.name} ({error}); free space or set TOKENMIX_DATA to a writable folder"
        ) from None
    train, test = (_open(folder, side) for side in SIDES)
    return train, test


def tokenizer_digest(tokenizer: "PreTrainedTokenizerFast") -> str:
    """A checksum of all that decides the ids of a text."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def _whole(folder: Path) -> bool:
    """Whether the files are there and as long as was noted last."""
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _write(corpus: Corpus, tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    wide = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".tokens-"))
    try:
        for side, documents in zip(SIDES, (corpus.train, corpus.test)):
            count = _write_side(documents, tokenizer, beside, side, wide, f"{corpus.name}: {side}")
            if not count:
                raise UserError(
                    f"{corpus.name} holds no text for {'training' if side == 'train' else 'testing'}; give more text, "
                    "or a folder with train and test inside"
                )
        sizes = {path.name: path.stat().st_size for path in beside.iterdir()}
        (beside / "sizes.json").write_text(json.dumps(sizes))
        beside.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        beside.replace(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    log(f"the tokens of {corpus.name} are now in {folder}")


def _write_side(documents: Iterable[str], tokenizer: Any, folder: Path, side: str, wide: np.dtype, label: str) -> int:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    total = 0
    with (
        (folder / f"{side}.{wide.name}").open("wb") as ids,
        (folder / f"{side}.starts").open("wb") as starts,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task(f"tokenising {label}", total=None)
        for group in _groups(documents):
            total += _append(tokenizer, group, wide, ids, starts)
            progress.update(task, description=f"tokenising {label}, {total:,} tokens")
        for file in (ids, starts):
            file.flush()
            os.fsync(file.fileno())
    return total


def _append(tokenizer: Any, group: list[str], wide: np.dtype, ids: BinaryIO, starts: BinaryIO) -> int:
    """Write the ids of some documents; returns how many are not [SEP]."""
    count = 0
    for encoding in tokenizer.backend_tokenizer.encode_batch(group, add_special_tokens=False):
        if encoding.ids:
            words = np.array([-1 if word is None else word for word in encoding.word_ids])
            begins = np.diff(words, prepend=-2) != 0
            ids.write(np.array([*encoding.ids, tokenizer.sep_token_id], dtype=wide).tobytes())
            starts.write(np.array([*begins, True], dtype=np.uint8).tobytes())
            count += len(encoding.ids)
    return count


def _groups(documents: Iterable[str]) -> Iterator[list[str]]:
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document)
        if size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _open(folder: Path, side: str) -> Tokens:
    path = next(folder.glob(f"{side}.uint*"))
    ids = np.memmap(path, dtype=np.dtype(path.suffix[1:]), mode="r")
    return Tokens(ids, np.memmap(folder / f"{side}.starts", dtype=np.uint8, mode="r"))
