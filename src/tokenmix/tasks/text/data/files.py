"""Reading text files line by line and tables row by row; what is wrong is told with its file and line."""

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tokenmix.errors import UserError, needs

__all__ = ["Row", "TableKind", "check_columns", "check_file", "read_lines", "read_rows"]

TableKind = Literal["jsonl", "csv", "tsv", "parquet"]
Row = tuple[str, dict[str, Any]]
"""Where it stands, as "FILE, line 7", and its values by column."""


def check_file(path: Path) -> Path:
    """The path, if it is a file that holds something."""
    if not path.is_file():
        raise UserError(
            f"{str(path)!r} {'is a folder' if path.is_dir() else 'does not exist'}; give the path of a file"
        )
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty (0 bytes); write it again or leave it out")
    return path


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file with their ends, one at a time; `UserError` naming the first byte that is not UTF-8."""
    check_file(path)
    offset = 0
    with path.open("rb") as file:
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


def read_rows(path: Path, kind: TableKind) -> Iterator[Row]:
    """The rows of a table, one at a time."""
    if kind == "jsonl":
        return _json_rows(path)
    if kind == "parquet":
        return _parquet_rows(path)
    return _csv_rows(path, kind)


def check_columns(path: Path, row: dict[str, Any], wanted: tuple[str, ...]) -> None:
    """`UserError` listing the columns that there are, unless all the wanted ones are among them."""
    for name in wanted:
        if name not in row:
            raise UserError(f"{path} has no column {name!r}; it has {', '.join(map(repr, row)) or 'none'}")


def _json_rows(path: Path) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where} is no JSON ({error}); write one object on each line") from None
        if not isinstance(row, dict):
            raise UserError(f"{where} is a JSON {type(row).__name__}, not an object; write one object on each line")
        yield where, row


def _csv_rows(path: Path, kind: TableKind) -> Iterator[Row]:
    # Fields of a whole document are common; the library's own limit is 128 KiB.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    if kind == "tsv":
        # Published .tsv files have bare quotation marks inside.
        reader = csv.DictReader(read_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.DictReader(read_lines(path))
    try:
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                given = sum(value is not None for key, value in row.items() if key is not None) + len(
                    row.get(None) or ()
                )
                raise UserError(
                    f"{where} has {given} fields, the header {len(reader.fieldnames or ())}; "
                    "put fields with the separator in quotes"
                )
            yield where, row
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}; write the table again as RFC 4180 CSV") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    with needs(f"reading {path.name}"):
        import pyarrow
        import pyarrow.parquet as parquet
    check_file(path)
    count = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    count += 1
                    yield f"{path}, row {count}", row
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} is truncated or no parquet file ({str(error).splitlines()[0]}); write or fetch it again"
        ) from None
