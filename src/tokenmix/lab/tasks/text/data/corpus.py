"""Corpora for language modelling: training and held-out documents, and their token ids in a memory-mapped file."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from filelock import FileLock

from tokenmix.errors import UserError
from tokenmix.files import replace_file
from tokenmix.lab.data.indexed import DataSet
from tokenmix.lab.data.lookup import DataRequest, cache_root, load_data, origin
from tokenmix.lab.data.reading import LeftOut, check_file
from tokenmix.lab.tasks.text.data.files import TEST_SHARE, choose_test, digest_of, find_parts, open_table, read_lines
from tokenmix.lab.tasks.text.tokenizer import block_characters, tokenizing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


PIECE = 1 << 18
"""Characters after which a long file is cut at a line end, so that no file must fit into memory.

Documents and lines of more than twice this length are cut at a blank."""
ENDINGS = (".txt", ".text", ".md")
FORMAT = 4
COUNT = np.dtype(np.int64)
T = TypeVar("T")


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
            yield from map("".join, groups(read_lines(file), PIECE))
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

    return map("".join, groups(lines(), PIECE))


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
                    replace_file(path, _encoded(documents, tokenizer, kind, empty))
    except OSError as error:
        raise UserError(
            f"cannot keep tokens in {path.parent} ({error}); free space or set TOKENMIX_DATA to a writable folder"
        ) from None
    return found


def _mapped(path: Path, kind: np.dtype) -> Tokens | None:
    """Tokens of a file that ends with their number; None if the file is missing or truncated."""
    if not path.is_file() or path.stat().st_size < COUNT.itemsize:
        return None
    content = np.memmap(path, np.uint8, "r")
    numbers, count = content[: -COUNT.itemsize], content[-COUNT.itemsize :].view(COUNT)[0]
    return Tokens(numbers.view(kind)) if len(numbers) == count * kind.itemsize else None


def _encoded(
    documents: Iterable[str], tokenizer: "PreTrainedTokenizerFast", kind: np.dtype, empty: str
) -> Iterator[bytes]:
    """Groups of documents in the format of `Tokens`, then the number of tokens."""
    total, block = 0, block_characters(tokenizer)
    for group in groups(pieces(documents, block), block):
        with tokenizing("the tokenizer cannot read this text"):
            encodings = tokenizer.backend_tokenizer.encode_batch(group, add_special_tokens=False)
        for encoding in encodings:
            if encoding.ids:
                words = np.array([-1 if word is None else word for word in encoding.word_ids])
                starts = np.append(np.diff(words, prepend=-2) != 0, True)
                numbers = 2 * np.array([*encoding.ids, tokenizer.sep_token_id]) + starts
                total += len(numbers)
                yield numbers.astype(kind).tobytes()
    if not total:
        raise UserError(f"{empty}; give more text, or a folder with train and test inside")
    yield np.array(total, COUNT).tobytes()


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
