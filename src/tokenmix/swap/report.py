"""Reports as plain values and as tables, for programs, terminals and notebooks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass

from torch import nn

from tokenmix.files import to_html, to_text


class Report:
    """Base of reports on a changed or trained model; subclasses are dataclasses."""

    def to_json(self) -> dict[str, object]:
        """All fields except the model, as plain values."""
        found = _plain(self)
        assert isinstance(found, dict)
        return found


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        return {name: _plain(part) for name, part in parts.items() if not isinstance(part, nn.Module)}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


class TableReport(Report, ABC):
    """A report with a table and a sentence below."""

    @abstractmethod
    def rows(self) -> list[list[str]]:
        """Cells of the table, header first."""

    @abstractmethod
    def _about(self) -> str: ...

    def __str__(self) -> str:
        return f"{to_text(self.rows())}\n{self._about()}"

    def _repr_html_(self) -> str:
        return to_html(self.rows(), self._about())


@dataclass(frozen=True, kw_only=True)
class ChangeReport(Report):
    """A model with other mixers, and the effect of the change."""

    model: nn.Module  # the given model, changed in place
    mixer: str  # the new mixer
    skipped: tuple["SkippedAttention", ...]  # matched places that could not change
    parameters_before: int  # of the whole model, as the numbers below
    parameters_after: int
    # Multiply-adds on the example (default: one sample); None if the model could not run.
    macs_before: int | None
    macs_after: int | None


@dataclass(frozen=True, kw_only=True)
class SwapRow:
    """One replaced attention; multiply-adds are for the example, None if the number of tokens is unknown.

    Attributes:
        name: of the module in the model.
        before: class of the old attention.
        after: the mixer.
        num_tokens: number of tokens N.
        kept: projections whose weights were kept.
        why: reason for this selection.
        dropped: names of dropped parts that added positions to the scores.
    """

    name: str
    before: str
    after: str
    num_tokens: int | None
    parameters_before: int
    parameters_after: int
    macs_before: int | None
    macs_after: int | None
    kept: tuple[str, ...]
    why: str
    dropped: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the mixer has all weights and positions of the attention, and no others."""
        return len(self.kept) == 4 and self.parameters_before == self.parameters_after and not self.dropped


@dataclass(frozen=True)
class SkippedAttention:
    """An attention that matched but was not replaced."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SwapReport(ChangeReport):
    """A model with replaced attention.

    Attributes:
        rows: one per replaced attention.
        notes: further remarks.
    """

    rows: tuple[SwapRow, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        differing = len({row.kept for row in self.rows}) > 1
        table = [("module", "N", "params", "", "MACs", "", *(["kept"] if differing else []))]
        for row in self.rows:
            tokens = "?" if row.num_tokens is None else f"{row.num_tokens:,}"
            table.append((row.name, tokens, *cost_cells(row), *([_kept(row)] if differing else [])))
        table.append(("whole model", "", *cost_cells(self), *([""] if differing else [])))
        kinds = ", ".join(dict.fromkeys(row.before for row in self.rows))
        reasons = dict.fromkeys(
            f"kept {_kept(row)}; {row.why}" if row.why else f"kept {_kept(row)}" for row in self.rows
        )
        if dropped := tuple(dict.fromkeys(name for row in self.rows for name in row.dropped)):
            reasons[f"positions dropped: {', '.join(dropped)}"] = None
        left = [f"left as it was: {s.name} ({s.kind}): {s.reason}" for s in self.skipped]
        return "\n".join([f"{kinds} -> {self.mixer}", "", *aligned(table), "", *reasons, *left, *self.notes])


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with a header; columns 1 to 5 are numbers, aligned right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = enumerate(zip(row, widths, strict=True))
        line = "  ".join(text.rjust(width) if 1 <= i <= 5 else text.ljust(width) for i, (text, width) in cells)
        lines.append(line.rstrip())
    return [lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]]


def _kept(row: SwapRow) -> str:
    return ", ".join(row.kept) or "nothing"


def cost_cells(of: "SwapRow | ChangeReport") -> tuple[str, str, str, str]:
    """Parameters and multiply-adds before and after, with changes in percent, of a row or a report."""
    parameters = _change(of.parameters_before, of.parameters_after)
    return (*parameters, *_change(of.macs_before, of.macs_after))


def _change(before: int | None, after: int | None) -> tuple[str, str]:
    if before is None or after is None:
        return "?", ""
    percent = f"{100 * (after - before) / before:+.0f} %" if before else ""
    return f"{_scaled(before)} -> {_scaled(after)}", percent


def _scaled(number: float) -> str:
    for unit in ("", " k", " M"):
        if number < 1000:
            return f"{number:.0f}{unit}" if unit == "" or number >= 100 else f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.4g} G"
