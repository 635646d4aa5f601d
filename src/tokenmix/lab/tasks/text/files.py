"""Text files by line, tables by row, and data sets of the Hugging Face hub; errors name the file and the line."""

import csv
import hashlib
import logging
import math
import re
import reprlib
import sys
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenmix.errors import UserError, needs, one_line
from tokenmix.files import Values, open_regular, read_text
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.lookup import DataRequest, cache_root, check_scheme, is_url, local_path, origin
from tokenmix.lab.data.reading import LeftOut, check_file, parse_json
from tokenmix.trust import texts_in

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

Row = tuple[str, Values | UserError]
"""Location, such as "FILE, line 7", and values by column, or an error."""
TEST_SHARE = 10
"""One in this many is held out."""
TRAIN_NAMES, TEST_NAMES = ("train", "training"), ("test", "validation", "valid", "val", "dev", "heldout")
MISSING = ("na", "n/a", "null", "none", "-")
"""Labels that other programs write for none."""
TEST_SPLITS = ("validation", "validation_matched", "dev", "test")
"""Splits of a hub data set used for testing; a split named test often has no labels."""
TRIED = 10
"""Number of unusable first rows after which the column is considered wrong."""
# Text compresses ten to one, a repeated value without limit; small files may repeat. Each row also takes memory.
LARGE, DENSEST, ROW = 1 << 28, 100, 64


def find_parts(folder: Path, ending: str) -> tuple[Path, Path] | None:
    """Training and testing part of a folder, by their usual names; None if one is missing."""
    train, test = (
        next((path for name in names if (path := folder / f"{name}{ending}").exists()), None)
        for names in (TRAIN_NAMES, TEST_NAMES)
    )
    return None if train is None or test is None else (train, test)


def is_test(key: str, share: int = TEST_SHARE) -> bool:
    """Whether the sample with this key is held out; one in `share` is, independent of case, blanks and seed."""
    words = " ".join(key.lower().split())
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") % share == 0


def choose_test(keys: Iterable[str]) -> set[str]:
    """Held-out keys: one in `TEST_SHARE` of the different keys, at least one."""
    ordered = sorted(set(keys), key=lambda key: hashlib.sha256(key.encode()).digest())
    return set(ordered[: math.ceil(len(ordered) / TEST_SHARE)])


def digest_of(files: Sequence[Path], more: str = "") -> str:
    """Checksum of the contents of files, in order, and of further text."""
    whole = hashlib.sha256(more.encode())
    for file in files:
        with open_regular(file) as opened:
            whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a UTF-8 file with their ends, one at a time; `UserError` names the first byte that is not UTF-8."""
    offset = 0
    with open_regular(check_file(path)) as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise UserError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
            if number == 1 and b"\r" in line and b"\n" not in line:
                raise UserError(f"{path} ends its lines with CR alone; convert it: tr '\\r' '\\n' < FILE > NEW_FILE")
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
    """Rows of RFC 4180, also with tabs or semicolons.

    After a line with a stray quotation mark, reading continues with the next line.
    """
    # Fields often contain a whole document; the library's limit is 128 KiB.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    lines, ahead, number = read_lines(path), deque[str](), 1
    header: list[str] = []
    twice: Values = {}
    # The separator is a tab or semicolon if the header has no comma but one of them.
    for line in lines:
        ahead.append(line)
        if line.strip():
            break
    outside = re.sub('"[^"]*"', "", ahead[-1]) if ahead else ""
    separator = next((mark for mark in ",\t;" if mark in outside), ",")
    # Short values of each column: one of them in a line inside a field shows that the line is a row.
    seen: list[set[str]] = []
    while True:
        taken: list[str] = []
        where, fields = f"{path}, line {number}", list[str]()
        try:
            fields = next(csv.reader(_taken(lines, ahead, taken), strict=True, delimiter=separator), fields)
            stray = "it holds lines that are rows of their own" * _are_rows(taken, seen, separator)
        except csv.Error as error:
            stray = str(error)
            if len(taken) == 1 and "expected after" in stray:
                # "Nice" before other words affects no other line.
                fields, stray = next(csv.reader(taken, delimiter=separator)), ""
        if not taken:
            return
        if stray:
            ahead.extendleft(reversed(taken[1:]))
            reason = UserError(
                f"{where}: the quoted field that ends on line {number + len(taken) - 1} is damaged ({stray}); "
                "double quotation marks inside a field"
            )
            if not header:
                raise reason
            yield where, reason
            number += 1
            continue
        number += len(taken)
        if not header:
            header, seen = [name.strip() for name in fields], [set() for _ in fields]
            twice = {name: ValueError("two columns have this name") for name in header if header.count(name) > 1}
        elif len(fields) == len(header):
            yield where, {**dict(zip(header, fields)), **twice}
            for value, known in zip(fields, seen):
                if len(value) <= 50 and len(known) < 1000:
                    known.add(value)
        elif fields:
            told = f"{where} has {len(fields)} fields, the header {len(header)}"
            yield where, UserError(f"{told}; quote fields that contain the separator")


def _taken(lines: Iterator[str], ahead: deque[str], taken: list[str]) -> Iterator[str]:
    """The next lines, those read ahead first; also appends them to `taken`."""
    for line in iter(lambda: ahead.popleft() if ahead else next(lines, ""), ""):
        taken.append(line)
        yield line


def _are_rows(lines: list[str], seen: list[set[str]], separator: str) -> bool:
    """Whether the lines of one record are rows: each has all columns, and one repeats a value inside the quotes."""
    if len(lines) < 2 or len(seen) < 2:
        return False
    rows = list(csv.reader(lines, quoting=csv.QUOTE_NONE, delimiter=separator))
    if any(len(row) != len(seen) for row in rows):
        return False
    first, last = (next(i for i, value in enumerate(row) if '"' in value) for row in (rows[0], rows[-1]))
    rows[0][: first + 1] = [""] * (first + 1)
    rows[-1][last:] = [""] * (len(seen) - last)
    columns = [[value for value in column if value.strip()] for column in zip(*rows)]
    return any(len({*column}) < len(column) or not known.isdisjoint(column) for column, known in zip(columns, seen))


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Rows with these columns, by default text and label; an unreadable value is replaced by its error.

    Text is decoded as a dictionary with values shared by rows: a file of 3 kB can expand to 40 GB.
    """
    with needs(f"reading {path.name}"):
        from pyarrow import parquet, types
    most = max(LARGE, DENSEST * check_file(path).stat().st_size)
    try:
        with open_regular(path) as opened, parquet.ParquetFile(opened) as file:
            schema = file.schema_arrow
        missing = [name for name in columns or ("text",) if name not in schema.names]
        if missing:
            raise _no_column(path, missing[0], schema.names)
        wanted = [name for name in columns or ("text", "label") if name in schema.names]
        for name in wanted:
            kind = schema.field(name).type
            if types.is_nested(kind) or types.is_fixed_size_binary(kind):
                raise UserError(f"{path}: {name!r} is {kind}, neither text nor a label; name another column")
        with open_regular(path) as opened, parquet.ParquetFile(opened, read_dictionary=wanted) as file:
            groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
            chunks = (group.column(i) for group in groups for i in range(group.num_columns))
            size = max((chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema in wanted), default=0)
            rows = (zip(*map(_python, batch.columns)) for batch in file.iter_batches(1 << 14, columns=wanted))
            # The first item is no row: a chunk's declared size is checked before it is decoded.
            for number, values in enumerate(chain([()], chain.from_iterable(rows))):
                size += ROW + sum(len(value) for value in values if isinstance(value, str | bytes))
                if size > most:
                    raise UserError(
                        f"{path} unpacks to {size:,} bytes and more (row {number}), over {most:,}, which a file of its "
                        "size may; split it, or write it without repetitions"
                    )
                if number:
                    yield f"{path}, row {number}", dict(zip(wanted, values))
    except UserError:
        raise
    except Exception as error:  # Arrow's, and Python's for names and indices that Arrow did not check.
        raise UserError(
            f"{path} is truncated or not a parquet file ({one_line(error)}); write or fetch it again"
        ) from None


def _python(array: "pa.Array") -> list[object]:
    """Values of an Arrow array; an error replaces a value that Python cannot represent."""
    if hasattr(array, "dictionary"):
        words = _python(array.dictionary)
        return [None if place is None else words[place] for place in array.indices.to_pylist()]
    try:
        return array.to_pylist()
    except Exception:  # Bytes that are not UTF-8, a date after the year 9999, an unknown time zone.
        return [_value(scalar) for scalar in array]


def _value(scalar: "pa.Scalar") -> object:
    try:
        return scalar.as_py()
    except Exception as error:
        return error


@dataclass(frozen=True)
class Table:
    """Rows by column, for training and testing."""

    name: str  # requested data
    # Functions that start reading: the training and the test rows, or all rows, of which a tenth is held out by the
    # contents of their texts.
    parts: tuple[Callable[[], Iterator[Row]], ...]
    columns: tuple[str, ...]  # requested columns; empty if the user names none
    source: str  # one line on the origin
    files: tuple[Path, ...]  # files with the contents
    types: Values = field(default_factory=dict)  # types of hub columns, if known
    left_out: LeftOut = field(default_factory=LeftOut)  # unusable rows

    def texts(self, column: str, test: bool) -> Iterator[str]:
        """Texts of a column in the training or test rows, without blank ones."""
        alone = len(self.parts) == 1
        for (text,), _ in self._read(0 if alone else int(test), (column,)):
            if text.strip() and (not alone or is_test(text) == test):
                yield text

    def labelled(self, columns: Sequence[str]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Texts and label (last column) of training and test rows; merges and reports spellings of one `label_name`."""
        sides: tuple[list[tuple[str, ...]], list[tuple[str, ...]]] = ([], [])
        names = dict[str, str]()
        for number in range(len(self.parts)):
            for texts, label in self._read(number, columns[:-1], columns[-1]):
                side = number if len(self.parts) == 2 else is_test(" ".join(texts))
                sides[side].append((*texts, names.setdefault(label, label_name(label))))
        if missing := [label for label in names if label.strip().lower() in MISSING]:
            log(f"{self.name}: the label {missing[0]!r} is a class; remove its rows if it means that there is none")
        counts = Counter(names.values())
        again = [label for label, name in names.items() if counts[name] > 1 and label != name]
        if again:
            more = f", and {len(again) - 1} others likewise" if again[1:] else ""
            log(f"{self.name}: the label {again[0]!r} is read as {names[again[0]]!r}{more}")
        return sides

    def _read(self, part: int, columns: Sequence[str], label: str | None = None) -> Iterator[tuple[list[str], str]]:
        """Texts of some columns and the label of each row, without incomplete rows.

        If no row, or none of the first ten, is usable, the first row's error is raised as `UserError`.
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


def _no_column(where: Path | str, name: str, known: Iterable[str]) -> UserError:
    names = ", ".join(map(repr, known)) or "none"
    return UserError(f"{where} has no column {name!r}; it has {names}: name columns after the path, as in #text,label")


def _values(where: str, row: Values | UserError, columns: Sequence[str], label: str | None) -> tuple[list[str], str]:
    """As `Table._read`; `UserError` for an incomplete row."""
    if isinstance(row, UserError):
        raise row
    for name in (*columns, *([] if label is None else [label])):
        if name not in row:
            raise _no_column(where, name, row)
    for name in columns:
        if not isinstance(row[name], str):
            raise UserError(
                f"{where}: {name!r} is {_shown(row[name])}, not text; leave the row out or name another column"
            )
    if label is None:
        return [row[name] for name in columns], ""
    value = row[label]
    infinite = isinstance(value, float) and math.isinf(value)
    no_label = value is None or infinite or isinstance(value, list | dict | bytes | Exception)
    if no_label or str(value).strip().lower() in ("", "nan"):
        raise UserError(f"{where}: {label!r} is {_shown(value)}, not a label; leave the row out or name another column")
    return [row[name] for name in columns], str(value)


def _shown(value: object) -> str:
    return f"damaged ({one_line(value)})" if isinstance(value, Exception) else reprlib.repr(value)


def label_name(label: str) -> str:
    """A label in Unicode NFC, without surrounding blanks, and a whole number without its fraction.

    Programs write 1 as 1.0 if a value of the column is missing, and é as one or two characters.
    """
    return re.sub(r"^([+-]?\d+)\.0*$", r"\1", unicodedata.normalize("NFC", label).strip())


def open_table(request: DataRequest) -> Table:
    """Open `csv:PATH#text,label` and the like: file, URL, or folder with train.csv and test.csv; or `hf:...#...`."""
    place, _, named = request.variant.partition("#")
    columns = tuple(named.split(",")) if named else ()
    if request.name == "hf":
        return _open_hub(request, place, columns)
    path, kind = local_path(place, request.root), request.name
    columns = tuple(map(str.strip, columns)) if kind == "csv" else columns
    source = f"{kind}: {origin(path, cache_root(request.root))}"
    if path.is_dir():
        files = find_parts(path, f".{kind}")
        if files is None:
            raise UserError(f"{path} has no train.{kind} with a test.{kind}; name the file, or add them")
    else:
        files, source = (check_file(path),), f"{source}, a tenth of the rows held out"
    rows = {"jsonl": _json_rows, "csv": _csv_rows, "parquet": partial(_parquet_rows, columns=columns)}[kind]
    return Table(request.spec, tuple(partial(rows, file) for file in files), columns, source, files)


def _open_hub(request: DataRequest, place: str, columns: tuple[str, ...]) -> Table:
    """A hub data set, or a folder or URL in a format of `datasets`, cached as Arrow files."""
    name, _, config = (place, "", "") if is_url(place) else place.partition(":")
    if not name:
        raise UserError("hf needs a name: give --data hf:NAME, hf:NAME:CONFIG or hf:NAME#text,label")
    with needs(request.spec):
        import datasets
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    # Errors are raised too; we report them in one line.
    for package in ("datasets", "huggingface_hub"):
        logging.getLogger(package).setLevel(logging.CRITICAL)
    if is_url(name):
        check_scheme(name)
    elif Path(name).is_dir():
        _check_card(Path(name))
    cache, kind, settings = cache_root(request.root) / "huggingface", name, Values()
    try:
        # For a folder with a data card, datasets 5.2 would cache its first content forever.
        files = sorted((str(path), path.stat().st_mtime_ns) for path in Path(name).rglob("*") if path.is_file())
        cache = cache / hashlib.sha256(repr(files).encode()).hexdigest()[:16] if files else cache
        if is_url(name):  # `load_dataset` only takes names and paths.
            patterns = datasets.data_files.get_data_patterns(name)
            settings["data_files"] = datasets.data_files.DataFilesDict.from_patterns(patterns, base_path=name)
            module, more = datasets.load.infer_module_for_data_files(settings["data_files"])
            kind, settings = str(module), settings | more
        splits = datasets.load_dataset(kind, config or None, cache_dir=str(cache), **settings)
    except Exception as error:  # Errors of the network, the hub, files and formats have no common class.
        told = " ".join(f"{type(error).__name__}: {error.__cause__ or error}".split())[:300]
        raise UserError(f"{request.spec} cannot be read ({told}); check name and network, or use a file") from None
    tested = [split for split in TEST_SPLITS if split in splits]
    if "train" not in splits:
        raise UserError(f"{request.spec} has no part for training; it has {', '.join(splits)}")
    names = ["train", *tested[:1]]
    source = f"{request.spec}: {', '.join(names) if tested else 'a tenth of the rows of train held out'}"
    parts = tuple(partial(_hub_rows, splits[split], f"{request.spec}, {split}") for split in names)
    kept = tuple(Path(file["filename"]) for split in names for file in splits[split].cache_files)
    return Table(request.spec, parts, columns, source, kept, dict(splits["train"].features))


def _check_card(folder: Path) -> None:
    """`UserError` if a folder's data card names files elsewhere, which `datasets` would read or fetch."""
    from huggingface_hub import DatasetCard

    card, settings = folder / "README.md", folder / ".huggingface.yaml"
    try:
        told = DatasetCard(read_text(card)).data.to_dict() if card.exists() else {}
        told |= DatasetCard(f"---\n{read_text(settings)}\n---\n").data.to_dict() if settings.exists() else {}
    except Exception as error:  # a YAML parser has its own errors
        raise UserError(f"the data card of {folder} cannot be read ({one_line(error)}); remove it") from None
    for text in texts_in(told.get("configs")):
        if "://" in text or "::" in text or text.startswith(("/", "~")) or ".." in Path(text).parts:
            raise UserError(f"the data card of {folder} names {text}, outside of the folder; remove it from the card")


def _hub_rows(part: "Dataset", name: str) -> Iterator[Row]:
    """Rows with class names; None for no label, which the hub writes as -1."""
    classes = {column: [*kind.names, None] for column, kind in part.features.items() if hasattr(kind, "names")}
    rows = (
        dict(zip(batch, values))
        for batch in part.iter(1000)
        for values in zip(*cast("Mapping[str, list[Any]]", batch).values())
    )
    for number, row in enumerate(rows, 1):
        for column, names in classes.items():
            row[column] = names[-1 if row[column] is None else row[column]]
        yield f"{name}, row {number}", row
