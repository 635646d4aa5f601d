"""Corpora for language modelling: documents, their token ids in a memory-mapped file, and sequences with masks."""

import base64
import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from tokenmix.environment import filtered_stderr
from tokenmix.errors import UserError, one_line
from tokenmix.files import Values, open_regular, replace_file
from tokenmix.lab.data.indexed import DataSet, IndexedDataset, hash_indices
from tokenmix.lab.data.lookup import DataRequest, cache_root, load_data, origin
from tokenmix.lab.data.reading import LeftOut, check_file
from tokenmix.lab.tasks.text.files import TEST_SHARE, choose_test, digest_of, find_parts, open_table, read_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


PIECE = 1 << 18
"""Characters after which a long file is cut at a line end, so that no file must fit into memory.

Documents and lines of more than twice this length are cut at a blank."""
ENDINGS = (".txt", ".text", ".md")
FORMAT = 6
CHECKSUM_BYTES = 4
T = TypeVar("T")
IGNORED = -100
"""Label of a position without a prediction; cross-entropy's `ignore_index`."""
# Purposes in `hash_indices`.
SHIFT, SEQUENCE, CHOICE, ACTION, RANDOM = 10, 11, 12, 13, 14
BLOCK = 1 << 21
# Rust's message before a panic, which Python raises as an error.
PANIC = re.compile(rb"^\n?thread '[^\n]*panicked at .*?(note: [^\n]*\n|\Z)", re.DOTALL | re.MULTILINE)


class Documents:
    """Re-iterable documents, read one at a time."""

    def __init__(self, start: Callable[[], Iterator[str]]) -> None:
        self.start = start

    def __iter__(self) -> Iterator[str]:
        return self.start()


@dataclass(frozen=True)
class Corpus(DataSet[Iterable[str]]):
    """Training and held-out documents, re-iterable and streamed; `digest` is a checksum of contents and split."""

    digest: str = ""


def load_text(spec: str, *, root: Path | None = None) -> Corpus:
    """Training and held-out documents of a corpus, streamed, so that it may exceed the memory.

    The split never depends on a seed. The held-out part is a tenth of a folder's files, the last tenth of a single
    file, a tenth of a table's rows, or whole books, speeches or chapters of a named corpus.

    Args:
        spec: `text:PATH`; `jsonl:PATH#column`, also csv and parquet, or `hf:NAME[:CONFIG]#column`, with the column
            `text` by default; or the name of a registered corpus.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown corpus, unreadable file, or a data set that cannot be obtained.
    """
    return load_data(spec, "corpus", root=root)


def load_column(request: DataRequest) -> Corpus:
    """A column of a table with one document per row; rows without text are skipped."""
    table = open_table(request)
    column = ",".join(table.columns) or "text"
    train, test = (Documents(partial(table.texts, column, side)) for side in (False, True))
    source = f"{table.source}, column {column!r}"
    return Corpus(train, test, [], source, digest=digest_of(table.files, column))


def load_text_files(request: DataRequest) -> Corpus:
    """`text:PATH`: train/ and test/ of a folder; else tests on a tenth of its files, or the last tenth of a file."""
    path = request.path
    if not path.exists():
        raise UserError(f"{str(path)!r} does not exist; give text:PATH of a file or a folder of text files")
    parts = find_parts(path, "")
    if parts is not None:
        train, test = (_text_files(part) for part in parts)
        files = [*train, *test]
    else:
        files = _text_files(path)
        if len(files) == 1:
            cut = files[0].stat().st_size * (TEST_SHARE - 1) // TEST_SHARE
            train, test = (Documents(partial(_side, files[0], cut, side)) for side in (False, True))
            source = f"text: {origin(files[0], cache_root(request.root))}, its last tenth held out"
            return Corpus(train, test, [], source, digest=digest_of(files, "one"))
        digests = [digest_of([file]) for file in files]
        held = choose_test(digests)
        train, test = ([f for f, digest in zip(files, digests) if (digest in held) == side] for side in (False, True))
        if not train:
            raise UserError(f"all {len(files)} files of {path} are copies of one file; give more text")
    source = f"text: {path.resolve()}, {len(train)} + {len(test)} files"
    digest, left_out = digest_of(files, f"text {len(train)}"), LeftOut()
    learnt, tested = (Documents(partial(_pieces, side, left_out)) for side in (train, test))
    return Corpus(learnt, tested, [], source, digest=digest)


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [check_file(path)]
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in ENDINGS and p.is_file())
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if not files:
        raise UserError(f"there are no text files ({', '.join(ENDINGS)}) in {path}; give another folder or rename them")
    return files


def _pieces(files: Sequence[Path], left_out: LeftOut) -> Iterator[str]:
    """Text of files; of a file with an unreadable part, the text before it."""
    for file in files:
        try:
            yield from map(_joined, groups(read_lines(file), PIECE))
        except UserError as reason:
            left_out.add(file, str(reason))


def _side(path: Path, cut: int, test: bool) -> Iterator[str]:
    """Lines that begin before the cut, or lines after it."""

    def lines() -> Iterator[str]:
        offset = 0
        for line in read_lines(path):
            if (offset >= cut) == test:
                yield line
            offset += len(line.encode())

    return map(_joined, groups(lines(), PIECE))


def _joined(lines: list[str]) -> str:
    """Lines as one text, with the line ends of Unix."""
    return "".join(lines).replace("\r\n", "\n")


@contextmanager
def tokenizing(what: str, *more: type[BaseException]) -> Iterator[None]:
    """Raise `UserError` for the tokenizers library's bare `Exception`s, Rust panics (no `Exception`) and `more`."""
    try:
        with filtered_stderr(lambda said: PANIC.sub(b"", said)):
            yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if isinstance(error, UserError) or not (panic or type(error) is Exception or isinstance(error, more)):
            raise
        raise UserError(f"{what} ({one_line(error)}); copy it again, or train it again") from None


def block_characters(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Characters to encode at a time: a token takes 150 bytes until its number is kept."""
    return int(BLOCK / growth(tokenizer.backend_tokenizer.normalizer))


def settings_of(step: Any) -> Values:
    """The table of a tokenizer's step, as in tokenizer.json; empty for none."""
    return step if isinstance(step, dict) else {} if step is None else json.loads(step.__getstate__())


def growth(step: Any) -> float:
    """Largest number of bytes that a normalizer or decoder makes of one byte, from the texts that it inserts.

    The step, or none, may also be given as a table, as in tokenizer.json.
    """
    step = settings_of(step)
    steps = step.get("normalizers") or step.get("decoders") or ()
    kind, grown = step.get("type"), math.prod(map(growth, steps))
    if kind == "Replace":
        content, literal = len(step["content"].encode()), step["pattern"].get("String")
        # A regex may match between any two characters.
        grown = max(1, content / len(literal.encode())) if literal else 1 + content
    elif kind == "Prepend":
        grown = 1 + len(step["prepend"].encode())
    elif kind == "Precompiled":
        charsmap = base64.b64decode(step["precompiled_charsmap"])
        replaced = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        grown = max(map(len, replaced))
    return grown


class Tokens:
    """Documents, each followed by [SEP]; `numbers` are twice the ids, plus one where a word begins."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def part(self, begin: int, end: int) -> "Tokens":
        """Tokens from `begin` to `end`, without a copy."""
        return Tokens(self._numbers[begin:end])

    def read(self, begin: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """At most `count` ids from `begin` on, and 1 for each beginning of a word."""
        numbers = self._numbers[begin : begin + count]
        return numbers >> 1, numbers & 1


def tokenized(corpus: Corpus, tokenizer: "PreTrainedTokenizerFast", root: Path | None = None) -> tuple[Tokens, Tokens]:
    """Training and held-out token ids of a corpus, cached by content; safe for concurrent runs."""
    told = f"{FORMAT} {corpus.digest} {tokenizer.backend_tokenizer.to_str()}"
    folder = cache_root(root) / "tokens" / hashlib.sha256(told.encode()).hexdigest()[:24]
    train = _kept(folder / "train", tokenizer, corpus.train, f"{corpus.spec} holds no text for training")
    return train, _kept(folder / "test", tokenizer, corpus.test, f"{corpus.spec} holds no text for testing")


def _kept(path: Path, tokenizer: "PreTrainedTokenizerFast", documents: Iterable[str], empty: str) -> Tokens:
    kind = np.dtype(np.uint16 if len(tokenizer) <= 1 << 15 else np.uint32)
    found = _mapped(path, kind)
    try:
        while found is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                found = _mapped(path, kind)
                if found is None:
                    replace_file(path, _encoded(documents, tokenizer, kind, empty, _mark(path)))
    except OSError as error:
        raise UserError(
            f"cannot keep tokens in {path.parent} ({error}); free space or set TOKENMIX_DATA to a writable folder"
        ) from None
    return found


def _mark(path: Path) -> int:
    """Start of the checksum, so that the tokens of another corpus do not have it."""
    return zlib.crc32(f"{path.parent.name}/{path.name}".encode())


def _mapped(path: Path, kind: np.dtype) -> Tokens | None:
    """Tokens of a file that ends with their CRC-32; None if the file is missing, or was changed or exchanged.

    CRC-32 reads 1.6 GB/s on one core where SHA-256 reads 0.4.
    """
    if not path.is_file() or (size := path.stat().st_size - CHECKSUM_BYTES) <= 0:
        return None
    mark = _mark(path)
    with open_regular(path) as file:
        while block := file.read(min(BLOCK, size - file.tell())):
            mark = zlib.crc32(block, mark)
        if mark != int.from_bytes(file.read(CHECKSUM_BYTES), "little"):
            return None
    return Tokens(np.memmap(path, kind, "r", shape=(size // kind.itemsize,)))


def _encoded(
    documents: Iterable[str], tokenizer: "PreTrainedTokenizerFast", kind: np.dtype, empty: str, mark: int
) -> Iterator[bytes]:
    """Groups of documents in the format of `Tokens`, then the checksum, which begins with `mark`."""
    total, block = 0, block_characters(tokenizer)
    for group in groups(pieces(documents, block), block):
        with tokenizing("the tokenizer cannot read this text"):
            encodings = tokenizer.backend_tokenizer.encode_batch(group, add_special_tokens=False)
        used = [encoding for encoding in encodings if encoding.ids]
        ids = np.fromiter((id for one in used for id in (*one.ids, tokenizer.sep_token_id)), np.int64)
        # No word has the number of [SEP] here, so that it and the token after it begin words.
        words = np.fromiter((-1 if word is None else word for one in used for word in (*one.word_ids, -2)), np.int64)
        total += len(ids)
        numbers = (2 * ids + (np.diff(words, prepend=-2) != 0)).astype(kind).tobytes()
        mark = zlib.crc32(numbers, mark)
        yield numbers
    if not total:
        raise UserError(f"{empty}; give more text, or a folder with train and test inside")
    yield mark.to_bytes(CHECKSUM_BYTES, "little")


def pieces(texts: Iterable[str], most: int = PIECE) -> Iterator[str]:
    """The texts; a text of more than two pieces, or twice `most`, in pieces that end at a blank if possible."""
    piece = min(PIECE, most)
    for text in texts:
        begin = 0
        while len(text) - begin > 2 * piece:
            end = max(text.rfind(blank, begin, begin + piece) for blank in " \n") + 1
            end = end or begin + piece
            yield text[begin:end]
            begin = end
        yield text[begin:] if begin else text


def groups(items: Iterable[T], most: int, size: Callable[[Any], int] = len) -> Iterator[list[T]]:
    """Groups of neighbours with a total size of at least `most`; each group ends with the item that reaches it."""
    group, total = list[T](), 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= most:
            yield group
            group, total = [], 0
    if group:
        yield group


class PackedText(IndexedDataset):
    """Documents cut into sequences of one length, with some of their tokens masked.

    Sequence i of an epoch is [CLS], the n - 2 tokens from (n - 2) i + s on, and [SEP]; [SEP] also separates documents.
    In training each epoch draws a new s, which moves the cuts. In testing s is 0, masks are equal for all seeds and
    epochs, and the last sequence is padded with [PAD].

    A batch: input_ids, attention_mask (0 at [PAD]) and labels (-100 at unmasked tokens), all int64 (B, n), and index
    int64 (B,).

    `tokens` are one part of `tokenized`, `length` is n, and `share` the mean share of masked tokens, single ones or all
    of a word. `UserError` for a length without room for tokens, or less text than one sequence.
    """

    unit = "sequences"

    def __init__(
        self,
        tokens: Tokens,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        length: int,
        part: Literal["train", "test"],
        masking: Literal["token", "whole-word"] = "token",
        share: float = 0.15,
        seed: int = 0,
    ) -> None:
        if length < 3:
            raise UserError(f"a length of {length} leaves no token between [CLS] and [SEP]; give 3 or more")
        self.window = length - 2
        if part == "train" and len(tokens) < self.window:
            raise UserError(
                f"{len(tokens)} tokens of text do not fill one sequence of {length}; give more text, or a length "
                f"of {max(len(tokens) + 2, 3)} or less"
            )
        self.tokens, self.length, self.part, self.masking = tokens, length, part, masking
        self.share, self.seed = share, seed if part == "train" else 0
        self.special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
        self.ordinary = torch.tensor(sorted(set(range(len(tokenizer))) - set(self.special.tolist())))
        ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "mask", "pad")}
        if absent := [name for name, value in ids.items() if not isinstance(value, int)]:
            raise UserError(f"the tokenizer has no {absent[0].upper()} token; train one with tokenmix train-tokenizer")
        self.cls, self.sep, self.mask, self.pad = ids.values()

    def __len__(self) -> int:
        total = len(self.tokens)
        if self.part == "test":
            return -(-total // self.window)
        # The same number for every shift.
        return max(1, (total - self.window + 1) // self.window)

    def read(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        epoch = epoch if self.part == "train" else 0
        ids, units = self._windows(indices, epoch)
        inputs, labels = self._masked(ids, units, indices, epoch)
        return {"input_ids": inputs, "attention_mask": (ids != self.pad).long(), "labels": labels, "index": indices}

    def _windows(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Ids (B, n), and the index of each token's masking unit, -1 for special tokens."""
        ids = np.full((len(indices), self.length), self.pad, dtype=np.int64)
        starts = np.ones((len(indices), self.length), dtype=np.int64)
        room, shift = len(self.tokens) - len(self) * self.window, 0
        if self.part == "train" and room > 0:
            bits = hash_indices(self.seed, epoch, torch.zeros(1, dtype=torch.int64), SHIFT)
            shift = int(bits[0] % np.uint64(min(room + 1, self.window)))
        for row, index in enumerate(indices.tolist()):
            begin = index * self.window + shift
            window, begins = self.tokens.read(begin, self.window)
            ids[row, 0], ids[row, len(window) + 1] = self.cls, self.sep
            ids[row, 1 : len(window) + 1] = window
            starts[row, 1 : len(window) + 1] = begins
        whole = torch.from_numpy(ids)
        positions = np.broadcast_to(np.arange(self.length), ids.shape) if self.masking == "token" else starts.cumsum(1)
        units = torch.from_numpy(np.array(positions, dtype=np.int64))
        return whole, units.masked_fill(torch.isin(whole, self.special), -1)

    def _masked(self, ids: Tensor, units: Tensor, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of masked language modelling.

        Each unit, a token or a word, is chosen with probability `share`. Of the tokens of chosen units 80 % become the
        mask, 10 % an ordinary token drawn uniformly, and 10 % stay. Labels are the ids at chosen positions and -100
        elsewhere.

        Paper: Devlin et al., "BERT", arXiv:1810.04805, section 3.1. BERT masks exactly 15 % of a sequence; here the
        share is a mean.

        Shape: ids and units int64 (B, N), units -1 at positions that are never chosen; indices (B,).
        """
        rows = hash_indices(self.seed, epoch, indices, SEQUENCE)[:, None]
        chosen = (_uniform(self.seed, epoch, rows, units.numpy(), CHOICE) < self.share) & (units >= 0).numpy()
        positions = np.broadcast_to(np.arange(self.length), ids.shape)
        action = _uniform(self.seed, epoch, rows, positions, ACTION)
        drawn = (_uniform(self.seed, epoch, rows, positions, RANDOM) * len(self.ordinary)).astype(np.int64)
        picked = torch.from_numpy(chosen)
        labels = torch.where(picked, ids, IGNORED)
        inputs = torch.where(picked & torch.from_numpy(action < 0.8), self.mask, ids)
        other = self.ordinary[torch.from_numpy(drawn)]
        return torch.where(picked & torch.from_numpy(action >= 0.9), other, inputs), labels


def _uniform(seed: int, epoch: int, rows: np.ndarray, positions: np.ndarray, purpose: int) -> np.ndarray:
    """Uniform number in [0, 1) for each (row, position)."""
    keys = (rows + positions.astype(np.uint64)).astype(np.int64)
    bits = hash_indices(seed, epoch, torch.from_numpy(keys), purpose)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
