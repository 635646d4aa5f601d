"""Plain text to learn a language from: documents for training and documents that are held out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenmix.data.lookup import DataRequest, load_data
from tokenmix.data.reading import LeftOut, check_file
from tokenmix.errors import UserError
from tokenmix.tasks.text.data.files import TEST_SHARE, choose_test, digest_of, find_parts, read_lines
from tokenmix.tasks.text.data.tables import Table, open_table

__all__ = ["Corpus", "Documents", "load_column", "load_text", "load_text_files"]

PIECE = 1 << 18
"""Characters after which a long file is cut at the end of a line, so that no file has to fit into memory."""
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

    What is held out never depends on a seed: a tenth of the files of a folder, the last tenth of a single file, a tenth
    of the rows of a table; of a named corpus whole books, speeches or chapters.

    Args:
        spec: `text:PATH`; `jsonl:PATH#column`, csv and parquet alike, or `hf:NAME[:CONFIG]#column`, where the column is
            `text` if not named; or the name of a registered corpus.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown corpus, unreadable file, or a set that can be had from nowhere.
    """
    return load_data(spec, "corpus", root=root)


def load_column(request: DataRequest) -> Corpus:
    """A column of a table, a document a row; rows without text are left out."""
    table = open_table(request)
    column = ",".join(table.columns) or "text"
    train, test = (Documents(partial(_column, table, column, side)) for side in (False, True))
    return Corpus(request.spec, train, test, f"{table.source}, column {column!r}", digest_of(table.files, column))


def _column(table: Table, column: str, test: bool) -> Iterator[str]:
    return (text for text in table.texts(column, test) if text.strip())


def load_text_files(request: DataRequest) -> Corpus:
    """`text:PATH`: train/ and test/ of a folder; else a tenth of its files; of one file the last tenth."""
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
            return _one_file(files[0])
        digests = [digest_of([file]) for file in files]
        held = choose_test(digests)
        train, test = ([f for f, digest in zip(files, digests) if (digest in held) == side] for side in (False, True))
        if not train:
            raise UserError(f"all {len(files)} files of {path} are copies of one; give more text")
    source = f"text: {path.resolve()}, {len(train)} + {len(test)} files"
    digest, left_out = digest_of(files, f"text {len(train)}"), LeftOut()
    sides = (Documents(partial(_pieces, side, left_out)) for side in (train, test))
    return Corpus(f"text:{path}", *sides, source=source, digest=digest)


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [check_file(path)]
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in ENDINGS and p.is_file())
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if not files:
        raise UserError(f"there are no text files ({', '.join(ENDINGS)}) in {path}; give another folder or rename them")
    return files


def _one_file(path: Path) -> Corpus:
    cut = path.stat().st_size * (TEST_SHARE - 1) // TEST_SHARE
    train, test = (Documents(partial(_side, path, cut, side)) for side in (False, True))
    source = f"text: {path.resolve()}, its last tenth held out"
    return Corpus(f"text:{path}", train, test, source, digest_of([path], "one"))


def _pieces(files: Sequence[Path], left_out: LeftOut) -> Iterator[str]:
    """The text of files; of one that cannot be read to its end what comes before."""
    for file in files:
        try:
            yield from _joined(read_lines(file))
        except UserError as reason:
            left_out.add(file, str(reason))


def _side(path: Path, cut: int, test: bool) -> Iterator[str]:
    """The lines that begin before the cut, or those after it."""

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
