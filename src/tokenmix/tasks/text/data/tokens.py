"""Documents as token ids on the disk: made once, read through a memory map, so that neither has to fit into memory."""

import copy
import hashlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmix.data.lookup import cache_root
from tokenmix.errors import UserError
from tokenmix.tasks.text.data.corpus import Corpus
from tokenmix.tasks.text.data.tables import import_datasets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Tokens", "tokenized"]

FORMAT = 2
GROUP_CHARACTERS = 1 << 21


class Tokens:
    """Documents one after the other, each with [SEP] after it, in the Arrow file that holds them.

    Args:
        rows: a `Dataset`; a row is a group of documents, in bytes: `ids`, and `starts`, uint8, 1 where a word begins.
        wide: the type of the ids.
    """

    def __init__(self, rows: Any, wide: np.dtype) -> None:
        self._ids, self._starts = _flat(rows.data.column("ids"), wide), _flat(rows.data.column("starts"), np.uint8)

    def __len__(self) -> int:
        return len(self._ids)

    def part(self, begin: int, end: int) -> "Tokens":
        """Those from `begin` to `end`, without a copy."""
        part = copy.copy(self)
        part._ids, part._starts = (column.slice(begin, end - begin) for column in (self._ids, self._starts))
        return part

    def read(self, begin: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and starts from `begin` on, at most `count`."""
        return self._ids.slice(begin, count).to_numpy(), self._starts.slice(begin, count).to_numpy()


def _flat(column: Any, kind: Any) -> Any:
    """The numbers in a column of bytes as one pyarrow.ChunkedArray, without a copy."""
    import pyarrow as pa

    arrow, width = pa.from_numpy_dtype(kind), np.dtype(kind).itemsize
    buffers = [value.as_buffer() for value in column]
    return pa.chunked_array([pa.Array.from_buffers(arrow, b.size // width, [None, b]) for b in buffers], type=arrow)


def tokenized(corpus: Corpus, tokenizer: "PreTrainedTokenizerFast", root: Path | None = None) -> tuple[Tokens, Tokens]:
    """The token ids of a corpus for training and held out, kept under the cache by the contents of both.

    Safe among concurrent runs: one tokenises while the others wait; a run that is killed leaves nothing half-written.

    Raises:
        UserError: a side without text, or a cache that cannot be written.
    """
    told = f"{FORMAT} {corpus.digest} {tokenizer.backend_tokenizer.to_str()}"
    folder = cache_root(root) / "tokens" / hashlib.sha256(told.encode()).hexdigest()[:24]
    train = _side(folder / "train", tokenizer, corpus.train, f"{corpus.name} holds no text for training")
    return train, _side(folder / "test", tokenizer, corpus.test, f"{corpus.name} holds no text for testing")


def _side(folder: Path, tokenizer: "PreTrainedTokenizerFast", documents: Iterable[str], empty: str) -> Tokens:
    datasets = import_datasets("masked-lm")
    wide = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)

    def rows() -> Any:
        found = datasets.Dataset.from_generator(
            _encoded,
            features=datasets.Features({name: datasets.Value("binary") for name in ("ids", "starts")}),
            cache_dir=str(folder),
            gen_kwargs={"documents": documents, "tokenizer": tokenizer, "wide": wide, "empty": empty},
            fingerprint=folder.parent.name,
            writer_batch_size=4,  # A row is a few megabytes.
        )
        if len(found) != found.info.splits["train"].num_examples:
            raise OSError("rows are missing")
        return found

    try:
        try:
            return Tokens(rows(), wide)
        except (OSError, ValueError):  # A file was cut; pyarrow's error is a ValueError.
            shutil.rmtree(folder, ignore_errors=True)
            return Tokens(rows(), wide)
    except (datasets.exceptions.DatasetGenerationError, OSError) as error:
        reason = error if isinstance(error, OSError) else error.__cause__
        if isinstance(reason, UserError):
            raise reason from None
        raise UserError(
            f"cannot keep tokens in {folder} ({reason}); free space or set TOKENMIX_DATA to a writable folder"
        ) from None


def _encoded(documents: Iterable[str], tokenizer: Any, wide: np.dtype, empty: str) -> Iterator[dict[str, bytes]]:
    """Groups of documents as bytes of ids and of starts."""
    some = False
    for group in _groups(documents):
        ids, starts = [], []
        for encoding in tokenizer.backend_tokenizer.encode_batch(group, add_special_tokens=False):
            if encoding.ids:
                words = np.array([-1 if word is None else word for word in encoding.word_ids])
                ids += [*encoding.ids, tokenizer.sep_token_id]
                starts.append(np.append(np.diff(words, prepend=-2) != 0, True))
        if ids:
            some = True
            yield {"ids": np.array(ids, wide).tobytes(), "starts": np.concatenate(starts).astype(np.uint8).tobytes()}
    if not some:
        raise UserError(f"{empty}; give more text, or a folder with train and test inside")


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
