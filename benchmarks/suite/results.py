"""What a benchmark run writes: plain dataclasses, and a reader that refuses whatever does not fit them."""

import json
import math
import types
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tokenmix.errors import UserError
from tokenmix.files import make_folder, replace_file

__all__ = ["SCHEMA", "Correctness", "Direction", "Measured", "Quantity", "Ratio", "Results", "Role", "Row", "Verdict"]
__all__ += ["read_results", "within", "write_results"]

SCHEMA = 2
READ = (1, 2)
"""In 1 no variant had failed by itself; otherwise they are the same."""

Role = Literal["ours", "floor", "peer", "baseline"]
Quantity = Literal["seconds", "bytes", "exponent", "tokens"]
Direction = Literal["at most", "at least"]


@dataclass
class Correctness:
    """The comparison that came before any timing: error relative to the largest entry, and what it may be.

    The error is None if the result had another shape, or was not finite, or the reference was 0.
    """

    against: str
    error: float | None
    bound: float
    passed: bool


def within(error: float | None, bound: float) -> bool:
    """Whether an error is one, and small enough."""
    return error is not None and error <= bound


@dataclass
class Measured:
    """One variant: median and quartiles of its runs, in the row's quantity; None where it cannot run, or failed."""

    name: str
    role: Role
    status: Literal["measured", "missing", "failed"]
    median: float | None
    q1: float | None
    q3: float | None
    runs: list[float]
    why: str


def of_rounds(ours: Measured, other: Measured) -> list[float]:
    """Ours over the other in each round."""
    return [a / b for a, b in zip(ours.runs, other.runs, strict=True)]


@dataclass
class Ratio:
    """Ours over the other: median and quartiles of the ratios in each round."""

    ours: str
    other: str
    median: float
    q1: float
    q3: float


@dataclass
class Verdict:
    """A target and what was reached: a ratio (`other` given), else the quantity itself."""

    ours: str
    other: str | None
    direction: Direction
    limit: float
    value: float
    met: bool


@dataclass
class Row:
    """One case."""

    group: str
    name: str
    quantity: Quantity
    shapes: dict[str, int]
    status: Literal["measured", "failed"]
    correctness: Correctness
    variants: list[Measured]
    ratios: list[Ratio]
    verdicts: list[Verdict]
    note: str

    @property
    def passed(self) -> bool:
        """Whether it was measured, and nothing in it failed."""
        return self.status == "measured" and not any(v.status == "failed" for v in self.variants)


@dataclass
class Results:
    """One group on one machine."""

    schema: int
    group: str
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]
    threads: int
    command: str
    environment: dict[str, Any]
    peers: dict[str, str]
    rows: list[Row]

    @property
    def file_name(self) -> str:
        """<device>-<type>-<group>.json."""
        return f"{self.device}-{self.dtype}-{self.group}.json"


def write_results(results: Results, folder: Path) -> Path:
    """Write one group's file, after reading it as everybody else will."""
    plain = json.loads(json.dumps(asdict(results)))
    _read(plain, Results, "results")
    make_folder(folder)
    file = folder / results.file_name
    replace_file(file, (json.dumps(plain, indent=1, allow_nan=False) + "\n").encode())
    return file


def read_results(file: Path) -> Results:
    """Read a results file.

    Raises:
        UserError: a file that is no JSON, a field too many, missing or of another type, or numbers that contradict
            each other, with the place.
    """
    try:
        results = _read(json.loads(file.read_text()), Results, "results")
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is no JSON: {error}; measure it again") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    if results.schema not in READ or results.file_name != file.name:
        raise UserError(f"{file} holds schema {results.schema} of {results.file_name}, not schema {SCHEMA} of its name")
    for row in results.rows:
        _check_row(row, f"{file}: {row.name}")
    return results


def _read(value: Any, wanted: Any, where: str) -> Any:
    """Plain JSON as the type `wanted`."""
    origin, inside = get_origin(wanted), get_args(wanted)
    if is_dataclass(wanted) and isinstance(wanted, type):
        return _read_fields(value, wanted, where)
    if origin is Literal:
        fits = value in inside
    elif origin in (Union, types.UnionType):
        return None if value is None else _read(value, next(t for t in inside if t is not type(None)), where)
    elif origin is list and isinstance(value, list):
        return [_read(item, inside[0], f"{where}[{i}]") for i, item in enumerate(value)]
    elif origin is dict and isinstance(value, dict):
        return {key: _read(item, inside[1], f"{where}.{key}") for key, item in value.items()}
    elif wanted is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    else:
        fits = wanted is Any or type(value) is wanted
    if not fits:
        raise UserError(f"{where} must be {wanted}, got {value!r}; measure it again")
    return value


def _read_fields(value: Any, wanted: type, where: str) -> Any:
    hints = get_type_hints(wanted)
    names = {field.name for field in fields(wanted)}
    if not isinstance(value, dict) or set(value) != names:
        odd = sorted(names ^ set(value)) if isinstance(value, dict) else value
        raise UserError(
            f"{where} must have exactly the fields of {wanted.__name__}, differs in {odd}; measure it again"
        )
    return wanted(**{name: _read(value[name], hints[name], f"{where}.{name}") for name in sorted(names)})


def _check_row(row: Row, where: str) -> None:
    """Numbers that contradict each other were not measured."""
    right = row.correctness.passed == within(row.correctness.error, row.correctness.bound)
    right &= (row.status == "measured") == row.correctness.passed
    right &= bool(row.variants) == (row.status == "measured")
    named = {v.name: v for v in row.variants}
    for v in row.variants:
        right &= (v.status == "measured") == (v.median is not None) == bool(v.runs)
        if v.median is not None and v.q1 is not None and v.q3 is not None:
            right &= min(v.runs) <= v.q1 <= v.median <= v.q3 <= max(v.runs)
    for ratio in row.ratios:
        right &= math.isclose(ratio.median, median(of_rounds(named[ratio.ours], named[ratio.other])), rel_tol=1e-3)
    ties = {(ratio.ours, ratio.other) for ratio in row.ratios if ratio.q1 <= 1 <= ratio.q3}
    for v in row.verdicts:
        reached = v.value <= v.limit if v.direction == "at most" else v.value >= v.limit
        right &= v.met == (reached or (v.limit == 1 and (v.ours, v.other) in ties))
    if not right:
        raise UserError(f"{where} contradicts itself; measure it again")
