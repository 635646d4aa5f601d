"""Plain text to learn a language from: documents for training and documents that are held out."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenmix.data.lookup import DataRequest, load_data
from tokenmix.errors import UserError
from tokenmix.tasks.text.data.files import TableKind, check_columns, check_file, read_lines, read_rows
from tokenmix.tasks.text.data.split import TEST_SHARE, choose_test, is_test

__all__ = [
    "Corpus",
    "Documents",
    "digest_of",
    "find_parts",
    "load_text",
    "load_text_files",
    "table_corpus",
]

PIECE = 1 << 18
"""Characters after which a long file is cut at the end of a line, so that no file has to fit into memory."""
TRAIN_NAMES, TEST_NAMES = ("train", "training"), ("test", "validation", "valid", "val", "dev", "heldout")
ENDINGS = (".txt", ".text", ".md")


class Documents:
    """Documents that can be gone through as often as wanted, read one at a time."""

    def __init__(self, start: Callable[[], Iterator[str]]) -> None:
        self.start = start

    def __iter__(self) -> Iterator[str]:
        return self.start()


@dataclass(frozen=True)
class Corpus:
    """Documents for training and documents that are held out.

    Attributes:
        name: what was asked for.
        train, test: re-iterable, streamed.
        source: where it came from, in a line.
        digest: of the contents and the split.
    """

    name: str
    train: Iterable[str]
    test: Iterable[str]
    source: str
    digest: str


def load_text(spec: str, *, root: Path | None = None) -> Corpus:
    """The documents of a corpus, for training and held out; streamed, so that it may be larger than memory.

    What is held out never depends on a seed: whole speeches, books, chapters or sections of a named corpus, a tenth
    of the files of a folder, the last tenth of a single file, a tenth of the rows of a table.

    Args:
        spec: `english` or one of its parts, `text:PATH`, `jsonl:PATH#column`, `csv:PATH#column` or
            `parquet:PATH#column`; the column is `text` if not named.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown corpus, unreadable file, or a set that can be had from nowhere.
    """
    return load_data(spec, "corpus", root=root)


def load_text_files(request: DataRequest) -> Corpus:
    """`text:PATH`: train/ and test/ of a folder; else a tenth of its files; of one file the last tenth."""
    path = request.path
    if not path.exists():
        raise UserError(f"{str(path)!r} does not exist; give text:PATH of a file or a folder of text files")
    if path.is_file():
        return _one_file(check_file(path))
    parts = find_parts(path, "")
    if parts is not None:
        train, test = (_text_files(part) for part in parts)
        files = [*train, *test]
    else:
        files = _text_files(path)
        if len(files) == 1:
            return _one_file(files[0])
        digests = [digest_of([file]) for file in files]
        held = choose_test(digests)
        train = [file for file, digest in zip(files, digests) if digest not in held]
        test = [file for file, digest in zip(files, digests) if digest in held]
        if not train:
            raise UserError(f"all {len(files)} files of {path} are copies of one; give more text")
    source = f"text: {path.resolve()}, {len(train)} + {len(test)} files"
    digest = digest_of(files, f"text {len(train)}")
    return Corpus(f"text:{path}", Documents(partial(_pieces, train)), Documents(partial(_pieces, test)), source, digest)


def table_corpus(kind: TableKind, rest: str) -> Corpus:
    """`jsonl:PATH#column` and its like, a document a row; train.* and test.* of a folder, else a tenth of the rows."""
    place, _, column = rest.partition("#")
    column = column or "text"
    path = Path(place).expanduser()
    source = f"{kind}: column {column!r} of {path.resolve()}"
    if path.is_dir():
        parts = find_parts(path, f".{kind}")
        if parts is None:
            raise UserError(f"{path} has no train.{kind} with a test.{kind}; name the file, or add them")
        train, test = (Documents(partial(_column, part, kind, column, None)) for part in parts)
        return Corpus(f"{kind}:{rest}", train, test, source, digest_of(parts, column))
    check_file(path)
    train, test = (Documents(partial(_column, path, kind, column, side)) for side in (False, True))
    return Corpus(f"{kind}:{rest}", train, test, f"{source}, a tenth of the rows held out", digest_of([path], column))


def find_parts(folder: Path, ending: str) -> tuple[Path, Path] | None:
    """The parts of a folder for training and for testing, by the names in use; None if one is missing."""
    found = [
        next((p for name in names if (p := folder / f"{name}{ending}").exists()), None)
        for names in (TRAIN_NAMES, TEST_NAMES)
    ]
    train, test = found
    return None if train is None or test is None else (train, test)


def digest_of(files: Sequence[Path], more: str = "") -> str:
    """A checksum of the contents of files, in order, and of further words."""
    whole = hashlib.sha256(more.encode())
    for file in files:
        with file.open("rb") as opened:
            whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [check_file(path)]
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in ENDINGS and p.is_file())
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if not files:
        raise UserError(f"there are no text files ({', '.join(ENDINGS)}) in {path}; give another folder or rename them")
    return [check_file(file) for file in files]


def _one_file(path: Path) -> Corpus:
    cut = path.stat().st_size * (TEST_SHARE - 1) // TEST_SHARE
    train, test = (Documents(partial(_side, path, cut, side)) for side in (False, True))
    source = f"text: {path.resolve()}, its last tenth held out"
    return Corpus(f"text:{path}", train, test, source, digest_of([path], "one"))


def _pieces(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        yield from _joined(read_lines(file))


def _side(path: Path, cut: int, test: bool) -> Iterator[str]:
    """The lines that begin before the cut, or those behind it."""

    def lines() -> Iterator[str]:
        offset = 0
        for line in read_lines(path):
            if (offset >= cut) == test:
                yield line
            offset += len(line.encode())

    return _joined(lines())


def _joined(lines: Iterable[str]) -> Iterator[str]:
    piece, size = [], 0
    for line in lines:
        piece.append(line)
        size += len(line)
        if size >= PIECE:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def _column(path: Path, kind: TableKind, column: str, side: bool | None) -> Iterator[str]:
    rows = 0
    for where, row in read_rows(path, kind):
        if not rows:
            check_columns(path, row, (column,))
        rows += 1
        text = row.get(column)
        if not isinstance(text, str):
            raise UserError(f"{where}: {column!r} is {text!r}, not text; leave the row out or name another column")
        if text.strip() and (side is None or is_test(text) == side):
            yield text
    if not rows:
        raise UserError(f"{path} has no rows; write it again or leave it out")
