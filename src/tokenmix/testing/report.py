"""The outcome of the properties on one layer, for people and for programs."""

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from torch import Tensor

from tokenmix.errors import one_line, unknown_name
from tokenmix.files import to_json
from tokenmix.testing.harness import Advice, Build, NotApplicable, PropertyFailure
from tokenmix.testing.properties import PROPERTIES

Status = Literal["pass", "FAIL", "advice", "skipped"]
COLOURS = {"pass": "green", "FAIL": "bold red", "advice": "yellow", "skipped": "dim"}


@dataclass(frozen=True)
class Verdict:
    """The outcome of one property: what was asked for, what was seen, and a failure's cause, usual or seen."""

    property: str
    status: Status
    about: str
    detail: str
    cause: str

    def explanation(self) -> str:
        """One line for people."""
        if self.status in ("FAIL", "advice"):
            usual = self.cause == PROPERTIES[self.property].cause
            return f"{self.detail}. {'Usual cause' if usual else 'Cause'}: {self.cause}."
        return self.detail if self.status == "skipped" else self.about


@dataclass(frozen=True)
class Report:
    """All verdicts on one layer.

    Attributes:
        target: what was asked for.
        layer: how the layer was built.
        input: shape of the example.
        verdicts: one for each property.
        notes: how the layer was called, and what it lacks to be used elsewhere.
    """

    target: str
    layer: str
    input: tuple[int, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> list[str]:
        """Names of the properties that do not hold."""
        return [v.property for v in self.verdicts if v.status == "FAIL"]

    @property
    def advised(self) -> list[str]:
        """Names of the properties that a right layer may lack, and this one does."""
        return [v.property for v in self.verdicts if v.status == "advice"]

    @property
    def passed(self) -> list[str]:
        """Names of the properties that hold."""
        return [v.property for v in self.verdicts if v.status == "pass"]

    @property
    def skipped(self) -> list[str]:
        """Names of the properties about which the layer offers nothing."""
        return [v.property for v in self.verdicts if v.status == "skipped"]

    def to_json(self) -> str:
        """The report for programs."""
        return to_json(asdict(self) | {"failed": self.failed, "advised": self.advised})

    def print(self) -> None:
        """The report for people: a table on stdout."""
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console()
        title = escape(f"{self.target}: {self.layer} on input {self.input}")
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("property", no_wrap=True)
        table.add_column("")
        table.add_column("what was seen", overflow="fold")
        for verdict in self.verdicts:
            colour = COLOURS[verdict.status]
            table.add_row(verdict.property, f"[{colour}]{verdict.status}[/]", escape(verdict.explanation()))
        console.print(table)
        counts = f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"
        console.print(f"{counts}{': ' + ', '.join(self.failed) if self.failed else ''}", highlight=False)
        if self.advised:
            console.print(f"advice, which does not count as a failure: {', '.join(self.advised)}", highlight=False)
        for note in self.notes:
            console.print(escape(note), highlight=False)


def examine(build: Build, x: Tensor, only: Collection[str] | None = None) -> Iterator[Verdict]:
    """Run properties, all or those named, on the layers that `build` makes; an error of the layer's is a failure."""
    for unknown in sorted(set(only or ()) - set(PROPERTIES)):
        raise unknown_name("property", unknown, PROPERTIES)
    for name, row in PROPERTIES.items():
        if only is not None and name not in only:
            continue
        status: Status = "pass"
        detail, cause = "", row.cause
        try:
            row.check(build, x)
        except NotApplicable as reason:
            status, detail = "skipped", str(reason)
        except PropertyFailure as failure:
            status = "advice" if isinstance(failure, Advice) else "FAIL"
            detail, cause = str(failure), failure.cause or row.cause
        except Exception as error:
            status, detail = "FAIL", one_line(error)
        yield Verdict(name, status, row.about, detail.rstrip("."), cause)
