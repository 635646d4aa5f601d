"""Text files line by line, tables row by row, sets of the Hugging Face hub, and which part is held out.

Errors name the file and the line.
"""

import csv
import hashlib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenmix.data.lookup import DataRequest, cache_root, local_path
from tokenmix.data.reading import LeftOut, check_file, parse_json
from tokenmix.data.remote import check_scheme, is_url, origin
from tokenmix.errors import UserError, needs, one_line
from tokenmix.files import read_text
from tokenmix.trust import texts_in

Row = tuple[str, dict[str, Any] | UserError]
"""Its location, as "FILE, line 7", and its values by column, or why it has none."""
TEST_SHARE = 10
"""One in that many is held out."""
TRAIN_NAMES, TEST_NAMES = ("train", "training"), ("test", "validation", "valid", "val", "dev", "heldout")
TEST_SPLITS = ("validation", "validation_matched", "dev", "test")
"""Parts of a set of the hub that are tested on; what is called its test part often has no labels."""
TRIED = 10
"""After that many unusable rows at the start the wrong column must be named."""


def find_parts(folder: Path, ending: str) -> tuple[Path, Path] | None:
    """The parts of a folder for training and for testing, by the names in use; None if one is missing."""
    train, test = (
        next((path for name in names if (path := folder / f"{name}{ending}").exists()), None)
        for names in (TRAIN_NAMES, TEST_NAMES)
    )
    return None if train is None or test is None else (train, test)


def is_test(key: str, share: int = TEST_SHARE) -> bool:
    """Whether what has this key is held out; one in `share` is. Neither case nor blanks nor a seed change it."""
    words = " ".join(key.lower().split())
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") % share == 0


def choose_test(keys: Iterable[str], share: int = TEST_SHARE) -> set[str]:
    """The keys that are held out: one in `share` of the different ones, and at least one."""
    ordered = sorted(set(keys), key=lambda key: hashlib.sha256(key.encode()).digest())
    return set(ordered[: math.ceil(len(ordered) / share)])


def digest_of(files: Sequence[Path], more: str = "") -> str:
    """A checksum of the contents of files, in order, and of further words."""
    whole = hashlib.sha256(more.encode())
    for file in files:
        with file.open("rb") as opened:
            whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file with their ends, one at a time; `UserError` naming the first byte that is not UTF-8."""
    offset = 0
    with check_file(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise UserError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: byte 0x{line[error.start]:02x} at offset {offset + error.start} is not "
                    "UTF-8; convert the file, for example: iconv -f LATIN1 -t UTF-8"
                ) from None
            offset += len(line)


def _json_rows(path: Path) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_json(line, where)
        except UserError as reason:
            row = reason
        if not isinstance(row, dict | UserError):
            row = UserError(f"{where} is a JSON {type(row).__name__}, not an object; write one object on each line")
        yield where, row


def _csv_rows(path: Path) -> Iterator[Row]:
    # Fields of a whole document are common; the library's own limit is 128 KiB.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(read_lines(path))
    try:
        header = next(reader, [])
        for fields in filter(None, reader):
            where = f"{path}, line {reader.line_num}"
            if len(fields) == len(header):
                yield where, dict(zip(header, fields))
            else:
                told = f"{where} has {len(fields)} fields, the header {len(header)}"
                yield where, UserError(f"{told}; quote fields that contain the separator")
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}; write the table again as RFC 4180 CSV") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    with needs(f"reading {path.name}"):
        from pyarrow import ArrowInvalid, parquet
    check_file(path)
    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
    except (ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} is truncated or not a parquet file ({str(error).splitlines()[0]}); write or fetch it again"
        ) from None


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
        """The texts of a column in the rows for training or testing, without blank ones."""
        alone = len(self.parts) == 1
        for (text,), _ in self._read(0 if alone else int(test), (column,)):
            if text.strip() and (not alone or is_test(text) == test):
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
            values = None
            try:
                values = _values(where, row, columns, label)
                usable = True
            except UserError as reason:
                waiting.append((where, reason))
            if usable:
                while waiting:
                    self.left_out.add(*map(str, waiting.pop(0)))
            elif len(waiting) == TRIED:
                break
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
        raise UserError(f"{where}: {label!r} is {value!r}, not a label; leave the row out or name another column")
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
    """`csv:PATH#text,label` and its like, a file, its URL, or a folder with train.csv and test.csv; or `hf:...#...`."""
    place, _, named = request.variant.partition("#")
    columns = tuple(named.split(",")) if named else ()
    if request.name == "hf":
        return _open_hub(request, place, columns)
    path, kind = local_path(place, request.root), request.name
    source = f"{kind}: {origin(path, cache_root(request.root))}"
    if path.is_dir():
        files = find_parts(path, f".{kind}")
        if files is None:
            raise UserError(f"{path} has no train.{kind} with a test.{kind}; name the file, or add them")
    else:
        files, source = (check_file(path),), f"{source}, a tenth of the rows held out"
    rows = {"jsonl": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows}[kind]
    return Table(request.spec, tuple(partial(rows, file) for file in files), columns, source, files)


def _open_hub(request: DataRequest, place: str, columns: tuple[str, ...]) -> Table:
    """A set of the hub, or a folder or its URL in a form that `datasets` reads, kept as Arrow files under the cache."""
    name, _, config = (place, "", "") if is_url(place) else place.partition(":")
    if not name:
        raise UserError("hf needs a name: give --data hf:NAME, hf:NAME:CONFIG or hf:NAME#text,label")
    datasets = import_datasets(request.spec)
    if is_url(name):
        check_scheme(name)
    elif Path(name).is_dir():
        _check_card(Path(name))
    try:
        kind, settings = _found_at(name, datasets) if is_url(name) else (name, {})
        splits = datasets.load_dataset(kind, config or None, cache_dir=str(_hub_cache(name, request.root)), **settings)
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


def _check_card(folder: Path) -> None:
    """`UserError` if the data card of a folder names files elsewhere, which `datasets` would read or fetch."""
    import yaml
    from huggingface_hub import DatasetCard

    card, settings = folder / "README.md", folder / ".huggingface.yaml"
    try:
        told = DatasetCard(read_text(card)).data.to_dict() if card.exists() else {}
        told |= (yaml.safe_load(read_text(settings)) if settings.exists() else None) or {}
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"the data card of {folder} cannot be read ({one_line(error)}); remove it") from None
    for text in texts_in(told.get("configs")):
        if "://" in text or "::" in text or text.startswith(("/", "~")) or ".." in Path(text).parts:
            raise UserError(f"the data card of {folder} names {text}, outside of the folder; remove it from the card")


def _found_at(url: str, datasets: Any) -> tuple[str, dict[str, Any]]:
    """The builder for the files in a folder at a URL, and its arguments: `load_dataset` takes names and paths only."""
    found = datasets.data_files.get_data_patterns(url)
    files = datasets.data_files.DataFilesDict.from_patterns(found, base_path=url)
    kind, settings = datasets.load.infer_module_for_data_files(files)
    return kind, {"data_files": files, **settings}


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
