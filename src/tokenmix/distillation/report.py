"""The report of a distillation."""

from dataclasses import dataclass

from torch import nn

from tokenmix.distillation.fidelity import Fidelity
from tokenmix.swap.report import TableReport


@dataclass(frozen=True)
class CurvePoint:
    """Where training stood: the mean loss since the point before, and the held-out fidelity if there are samples."""

    step: int
    loss: float
    held_out: Fidelity | None


@dataclass(frozen=True, kw_only=True)
class DistillReport(TableReport):
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

    def rows(self) -> list[list[str]]:
        """A header, then one row for each point of the curve."""
        shown = ["cosine", "mse", "agreement"] if self.before else []
        shown += ["neighbours"] if self.before and self.before.neighbours is not None else []
        table = [["step", "loss", *shown]]
        points = [] if self.before is None else [("0", "", self.before)]
        points += [(f"{point.step}", f"{point.loss:.4f}", point.held_out) for point in self.curve]
        for step, loss, held in points:
            table.append([step, loss, *(f"{getattr(held, name):.4f}" for name in shown)])
        return table

    def _about(self) -> str:
        ended = "interrupted after" if self.interrupted else "after"
        on = "" if self.before is None else f"; columns from cosine on: {self.before.rows:,} held-out rows"
        times = f"{self.seconds:.0f} s ({self.cpu_seconds / 60:.1f} CPU minutes)"
        return f"{ended} {self.steps} steps, {times}; {self.trained:,} numbers trained{on}"
