"""The tables and the figure of what each mixer can do: `python docs/probe.py [--measure] [--full]`.

`dev/probe.json` holds the numbers. --measure makes it anew, in 40 to 200 seconds of a core for each mixer.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from tokenmix.environment import environment
from tokenmix.files import to_json
from tokenmix.layers import MIXERS, ExternalAttention
from tokenmix.testing.probe import BASELINES, ProbeReport, probe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "dev" / "probe.json"
FORMS = ("sigmoid", "l2", "entmax15")
TABLE = re.compile(r"^\| mixer \| recall .*\n(?:\|.*\n)+", re.MULTILINE)


def measure(full: bool) -> ProbeReport:
    """All mixers of the table, and external attention with its other normalisations."""
    forms = [_form(name) for name in FORMS]
    return probe([*MIXERS, *forms], full=full, progress=lambda line: print(line, file=sys.stderr, flush=True))


def _form(name: str) -> type[ExternalAttention]:
    def __init__(self: ExternalAttention, dim: int) -> None:
        ExternalAttention.__init__(self, dim, normalization=name)  # type: ignore[arg-type]

    return type(f"external-{name}", (ExternalAttention,), {"__init__": __init__})


def table(report: ProbeReport, mixers: list[str], tasks: list[str]) -> str:
    """Rows of mixers between the two levels."""

    def row(label: str, cells: list[str]) -> str:
        return f"| {' | '.join([label, *cells])} |\n"

    def cell(task: str, mixer: str) -> str:
        score = report.score(task, mixer)
        if score is None:
            return "–"
        if score.half_width is None:
            return f"*{score.mean:.2f}*"
        width = f"{score.half_width:.2f}"
        return f"{score.mean:.2f}" + (f" ± {width}" if float(width) else "")

    guesses = {score.task: f"{score.guess:.2f}" for score in report.scores}
    text = row("mixer", [task.replace("x2", "×2") for task in tasks]) + "|---" + "|---:" * len(tasks) + "|\n"
    for mixer in mixers:
        label = f"`external`, `{mixer.removeprefix('external-')}`" if mixer[9:] in FORMS else f"`{mixer}`"
        text += row(label, [cell(task, mixer) for task in tasks])
    return text + row("guessing", [guesses[task] for task in tasks])


def page(text: str, report: ProbeReport, every: bool) -> str:
    """The page with its tables written anew, for the mixers that they name; `every` for all of the table."""

    def anew(found: re.Match[str]) -> str:
        rows = ["-".join(re.findall("`([^`]+)`", line.split("|")[1])) for line in found[0].splitlines()[2:]]
        longer = [task for task in report.tasks if task.endswith("x2")]
        tasks = [task for task in report.tasks if task not in longer]
        if every:
            others = [name for name in MIXERS if name not in BASELINES]
            return table(report, [*BASELINES, *others], [*tasks, *longer])
        return table(report, [name for name in rows if name], tasks)

    return TABLE.sub(anew, text)


def pages(report: ProbeReport) -> dict[Path, str]:
    """What each page of a mechanism has to be."""
    found = sorted((ROOT / "docs" / "mechanisms").glob("*.md"))
    return {path: page(path.read_text(), report, path.stem == "index") for path in found}


if __name__ == "__main__":
    from stamps import digest, stamp

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="train all mixers again")
    parser.add_argument("--full", action="store_true", help="with --measure: five seeds")
    given = parser.parse_args()
    if given.measure:
        told = json.loads(measure(given.full).to_json())
        where = {name: environment()[name] for name in ("date", "cpu", "commit")}
        RESULTS.write_text(to_json({"environment": where, **told}))
    report = ProbeReport.from_json(RESULTS.read_text())
    for path, text in pages(report).items():
        path.write_text(text)
    shown = ProbeReport(
        tuple(score for score in report.scores if score.mixer in MIXERS),
        {name: structure for name, structure in report.structures.items() if name in MIXERS},
        report.seconds,
        report.seeds,
    )
    shown.plot().savefig(ROOT / "docs" / "images" / "probe.png", dpi=64)
    stamp("probe.png", digest(json.loads(RESULTS.read_text())))
