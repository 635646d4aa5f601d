"""The report of a distillation, for programs, the terminal and notebooks."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import nn

from tokenmix.distillation.fidelity import Fidelity


@dataclass(frozen=True)
class CurvePoint:
    """Where training stood: the mean loss since the point before, and the held-out fidelity if there are samples."""

    step: int
    loss: float
    held_out: Fidelity | None


@dataclass(frozen=True, kw_only=True)
class DistillReport:
    """A student that learned from a teacher.

    Attributes:
        student: the model that was given, trained in place.
        curve: points over the steps.
        before, after: held-out fidelity; None without held-out samples.
        steps: that were taken.
        trained: numbers that were learned.
        seconds: of training, without the evaluations.
        cpu_seconds: of this process in that time, over all cores.
        interrupted: Ctrl-C ended it; the student is what was reached.
    """

    student: nn.Module
    curve: tuple[CurvePoint, ...]
    before: Fidelity | None
    after: Fidelity | None
    steps: int
    trained: int
    seconds: float
    cpu_seconds: float
    interrupted: bool

    def to_json(self) -> dict[str, Any]:
        """All but the student, as plain values."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "student"}
        held = {name: value and asdict(value) for name in ("before", "after") for value in (values[name],)}
        return {**values, **held, "curve": [asdict(point) for point in self.curve]}

    def rows(self) -> list[list[str]]:
        """Cells of the table: a header, then one row for each point of the curve."""
        shown = ["cosine", "mse", "agreement"] if self.before else []
        shown += ["neighbours"] if self.before and self.before.neighbours is not None else []
        table = [["step", "loss", *shown]]
        points = [] if self.before is None else [("0", "", self.before)]
        points += [(f"{point.step}", f"{point.loss:.4f}", point.held_out) for point in self.curve]
        for step, loss, held in points:
            table.append([step, loss, *(f"{getattr(held, name):.4f}" for name in shown)])
        return table

    def _ending(self) -> str:
        ended = "interrupted after" if self.interrupted else "after"
        return f"{ended} {self.steps} steps, {self.seconds:.0f} s ({self.cpu_seconds / 60:.1f} CPU minutes)"

    def _about(self) -> str:
        on = "" if self.before is None else f"; columns from cosine on: {self.before.rows:,} held-out rows"
        return f"{self._ending()}; {self.trained:,} numbers trained{on}"

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
        return "\n".join([*lines, self._about()])

    def _repr_html_(self) -> str:
        rows = ("".join(f"<td>{cell}</td>" for cell in row) for row in self.rows())
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table><p>{self._about()}</p>"
