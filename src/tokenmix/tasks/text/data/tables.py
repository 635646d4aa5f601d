"""Tables of texts: files of the user's own, and data sets of the Hugging Face hub."""

import hashlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenmix.data.lookup import DataRequest, cache_root
from tokenmix.data.reading import LeftOut, check_file
from tokenmix.errors import UserError, needs
from tokenmix.tasks.text.data.files import Row, find_parts, is_test, read_rows

__all__ = ["Table", "import_datasets", "open_table"]

TEST_SPLITS = ("validation", "validation_matched", "dev", "test")
"""Parts of a set of the hub that are tested on; what is called its test part often has no labels."""
TRIED = 10
"""After that many unusable rows at the start the wrong column must be named."""


@dataclass(frozen=True)
class Table:
    """Rows by column, for training and for testing.

    Attributes:
        name: what was asked for.
        parts: functions that start reading: the rows for training and those for testing, or all of them, of which a
            tenth is held out by the contents of their texts.
        columns: those that are asked for; none if the user names none.
        source: where it came from, in a line.
        files: what holds the contents.
        types: of columns of the hub, where known.
        left_out: rows that cannot be used.
    """

    name: str
    parts: tuple[Callable[[], Iterator[Row]], ...]
    columns: tuple[str, ...]
    source: str
    files: tuple[Path, ...]
    types: dict[str, Any] = field(default_factory=dict)
    left_out: LeftOut = field(default_factory=LeftOut)

    def texts(self, column: str, test: bool) -> Iterator[str]:
        """The texts of a column in the rows for training or testing."""
        alone = len(self.parts) == 1
        for (text,), _ in self._read(0 if alone else int(test), (column,)):
            if not alone or is_test(text) == test:
                yield text

    def labelled(self, columns: Sequence[str]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Texts, and the label from the last column, of the rows for training and for testing."""
        sides: tuple[list[tuple[str, ...]], list[tuple[str, ...]]] = ([], [])
        for number in range(len(self.parts)):
            for texts, label in self._read(number, columns[:-1], columns[-1]):
                side = number if len(self.parts) == 2 else is_test(" ".join(texts))
                sides[side].append((*texts, label))
        return sides

    def _read(self, part: int, columns: Sequence[str], label: str | None = None) -> Iterator[tuple[list[str], str]]:
        """The texts of some columns and the label of each row, without rows that lack one.

        Raises:
            UserError: what is wrong with the first row, if none can be used, or none of the first ten.
        """
        usable, waiting = False, list[tuple[str, UserError]]()
        for where, row in self.parts[part]():
            try:
                values = _values(where, row, columns, label)
            except UserError as reason:
                values = None
                waiting.append((where, reason))
            if values is None and not usable and len(waiting) < TRIED:
                continue
            if values is None and not usable:
                break
            usable = True
            while waiting:
                self.left_out.add(*map(str, waiting.pop(0)))
            if values is not None:
                yield values
        if not usable:
            raise waiting[0][1] if waiting else UserError(f"{self.name} has no rows; write it again or leave it out")


def _values(
    where: str, row: dict[str, Any] | UserError, columns: Sequence[str], label: str | None
) -> tuple[list[str], str]:
    """The texts of some columns and the label of a row; `UserError` if it has not all of them."""
    if isinstance(row, UserError):
        raise row
    for name in (*columns, *([] if label is None else [label])):
        if name not in row:
            raise UserError(f"{where} has no column {name!r}; it has {', '.join(map(repr, row)) or 'none'}")
    for name in columns:
        if not isinstance(row[name], str):
            raise UserError(f"{where}: {name!r} is {row[name]!r}, not text; leave the row out or name another column")
    if label is None:
        return [row[name] for name in columns], ""
    value = row[label]
    if value is None or isinstance(value, list | dict) or not str(value).strip():
        raise UserError(f"{where}: {label!r} is {value!r}, no label; leave the row out or name another column")
    return [row[name] for name in columns], str(value)


def import_datasets(what: str) -> Any:
    """Hugging Face's package of that name, without progress bars where nobody sees them; it is imported when needed."""
    with needs(what):
        import datasets
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    # What fails is raised as well; we report it, in one line.
    for name in ("datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return datasets


def open_table(request: DataRequest) -> Table:
    """`csv:PATH#text,label` and its like, a file or a folder with train.csv and test.csv; or `hf:NAME[:CONFIG]#...`."""
    place, _, named = request.variant.partition("#")
    columns = tuple(named.split(",")) if named else ()
    if request.name == "hf":
        return _open_hub(request, place, columns)
    path, kind = Path(place).expanduser(), request.name
    source = f"{kind}: {path.resolve()}"
    if path.is_dir():
        files = find_parts(path, f".{kind}")
        if files is None:
            raise UserError(f"{path} has no train.{kind} with a test.{kind}; name the file, or add them")
    else:
        files, source = (check_file(path),), f"{source}, a tenth of the rows held out"
    return Table(request.spec, tuple(partial(read_rows, file, kind) for file in files), columns, source, files)


def _open_hub(request: DataRequest, place: str, columns: tuple[str, ...]) -> Table:
    """A set of the hub, or a folder in a form that `datasets` reads, kept as Arrow files under the cache."""
    name, _, config = place.partition(":")
    if not name:
        raise UserError("hf needs a name: give --data hf:NAME, hf:NAME:CONFIG or hf:NAME#text,label")
    datasets = import_datasets(request.spec)
    try:
        splits = datasets.load_dataset(name, config or None, cache_dir=str(_hub_cache(name, request.root)))
    except Exception as error:  # Errors of the network, the hub, files and formats have no common class.
        told = " ".join(f"{type(error).__name__}: {error.__cause__ or error}".split())[:300]
        raise UserError(f"{request.spec} cannot be read ({told}); check name and network, or use a file") from None
    tested = [split for split in TEST_SPLITS if split in splits]
    if "train" not in splits:
        raise UserError(f"{request.spec} has no part for training; it has {', '.join(splits)}")
    names = ["train", *tested[:1]]
    source = f"{request.spec}: {', '.join(names) if tested else 'a tenth of the rows of train held out'}"
    parts = tuple(partial(_hub_rows, splits[split], f"{request.spec}, {split}") for split in names)
    files = tuple(Path(file["filename"]) for split in names for file in splits[split].cache_files)
    return Table(request.spec, parts, columns, source, files, dict(splits["train"].features))


def _hub_cache(name: str, root: Path | None) -> Path:
    """The folder of Arrow files. Of a folder with a data card, datasets 5.2 would keep what it read first for ever."""
    files = sorted((str(path), path.stat().st_mtime_ns) for path in Path(name).rglob("*") if path.is_file())
    return cache_root(root) / "huggingface" / (hashlib.sha256(repr(files).encode()).hexdigest()[:16] if files else "")


def _hub_rows(part: Any, name: str) -> Iterator[Row]:
    """The rows with the names of their classes; None where there is no label, which the hub writes as -1."""
    classes = {column: [*kind.names, None] for column, kind in part.features.items() if hasattr(kind, "names")}
    rows = (dict(zip(batch, values)) for batch in part.iter(1000) for values in zip(*batch.values()))
    for number, row in enumerate(rows, 1):
        for column, names in classes.items():
            row[column] = names[-1 if row[column] is None else row[column]]
        yield f"{name}, row {number}", row
