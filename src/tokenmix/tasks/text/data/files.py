"""Text files line by line, tables row by row, and which part is held out; errors name the file and the line."""

import csv
import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenmix.data.reading import check_file, parse_json
from tokenmix.errors import UserError, needs

__all__ = ["Row", "choose_test", "digest_of", "find_parts", "is_test", "read_lines", "read_rows"]

Row = tuple[str, dict[str, Any] | UserError]
"""Where it stands, as "FILE, line 7", and its values by column, or why it has none."""
TEST_SHARE = 10
"""One in that many is held out."""
TRAIN_NAMES, TEST_NAMES = ("train", "training"), ("test", "validation", "valid", "val", "dev", "heldout")


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


def read_rows(path: Path, kind: str) -> Iterator[Row]:
    """The rows of a table, jsonl, csv or parquet, one at a time."""
    return {"jsonl": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows}[kind](path)


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
    reader = csv.DictReader(read_lines(path))
    try:
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                given = sum(value is not None for key, value in row.items() if key is not None) + len(
                    row.get(None) or ()
                )
                yield (
                    where,
                    UserError(
                        f"{where} has {given} fields, the header {len(reader.fieldnames or ())}; "
                        "put fields with the separator in quotes"
                    ),
                )
            else:
                yield where, row
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
            f"{path} is truncated or no parquet file ({str(error).splitlines()[0]}); write or fetch it again"
        ) from None
