"""A comparison as one HTML file that needs nothing else: no network, no other file.

The page is the template report.html, which escapes what it is given; charts come as SVG.
"""

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tokenmix.errors import needs
from tokenmix.files import replace_file
from tokenmix.lab.compare.charts import bars, confusions, cost_charts, growth_charts, learning_curves, marker
from tokenmix.lab.compare.notes import budget_sentence, finding_sentence, notes
from tokenmix.lab.compare.pictures import ExampleMaps, ShownExample, color_bars, tile_url
from tokenmix.lab.compare.results import Results, Variant
from tokenmix.lab.compare.table import columns, table_of
from tokenmix.lab.data.lookup import short_name
from tokenmix.testing.probe import ProbeReport
from tokenmix.testing.probe_tasks import TASKS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# The probe of all mixers. A checkout has it; an installed wheel does not.
PROBE = Path(__file__).parents[4] / "dev" / "probe.json"


def write_report(results: Results, file: Path, examples: Sequence[ExampleMaps | ShownExample] = ()) -> Path:
    """Write report.html.

    The page's policy allows its own style, script and embedded images only, so that a name in it can start nothing.
    `examples` are maps of test images, or samples as the task shows them.
    """
    machine, data, number = results.environment, results.data, len(results.variants)
    what = f"{number} variant{'s' if number > 1 else ''} of {results.config['model']}"
    commit = machine["commit"] or "installed package"
    maps = [example for example in examples if isinstance(example, ExampleMaps)]
    shown = [example for example in examples if isinstance(example, ShownExample)]
    return write_page(
        file,
        "report.html",
        script=_part("js"),
        title=f"{what} on {data.get('name', short_name(results.config['data']))}",
        environment=machine,
        machine=machine["gpus"][0] if results.device.startswith("cuda") and machine["gpus"] else machine["cpu"],
        finding=finding_sentence(results),
        budget=budget_sentence(results),
        notes=notes(results),
        results=results,
        variants=results.variants,
        columns=columns(results),
        table=table_of(results),
        probed=_probed(results),
        abilities={name: task.ability for name, task in TASKS.items()},
        several=len(results.config["seeds"]) > 1,
        marker=marker,
        curves=learning_curves(results),
        scatters=cost_charts(results),
        growth=growth_charts(results),
        bars=partial(bars, results),
        confusions=confusions(results),
        examples=maps,
        color_bars=color_bars(maps),
        tile_url=tile_url,
        shown=shown,
        legend={name: color for example in shown for name, color in example.legend.items()},
        repeat={
            "date": machine["date"],
            "device": results.device,
            "processor": f"{machine['cpu']}; cores: {machine['cores']}, threads: {machine['threads']}",
            "GPU": ", ".join(machine["gpus"]) or "none",
            "system": f"{machine['platform']}, Python {machine['python']}",
            "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
            "commit": f"{commit}{' with uncommitted changes' if machine['changed'] else ''}",
            "data": data.get("source", results.config["data"]),
        },
    )


def _probed(results: Results) -> ProbeReport | None:
    """The probe of those variants that are mixers of it; None if there are fewer than two, or no measured file."""
    if not PROBE.is_file():
        return None
    report = ProbeReport.from_json(PROBE.read_text())
    known = {v.name: report.structures[v.name] for v in results.variants if v.name in report.structures}
    scores = (report.score(task, name) for task in TASKS for name in known)
    found = replace(report, scores=tuple(score for score in scores if score is not None), structures=known)
    return found if len(known) > 1 else None


def write_page(file: Path, template: str, **values: Any) -> Path:
    """Write one HTML file with the style of reports from a template of this folder, which escapes the values."""
    page = _templates().get_template(template).render(style=_part("css"), **values)
    replace_file(file, page.encode())
    return file


def _templates() -> Environment:
    pages = Environment(
        loader=PackageLoader("tokenmix.lab.compare", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )

    def digest(text: str) -> str:
        """As a Content-Security-Policy names what is inline."""
        return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

    pages.filters["digest"] = digest
    return pages


def _part(kind: str) -> str:
    return files("tokenmix.lab.compare").joinpath(f"report.{kind}").read_text()


@dataclass(frozen=True, repr=False)
class ComparisonResult(os.PathLike[str]):
    """A comparison that has ended.

    Attributes:
        path: folder of report.html, results.json and results.md.
        comparisons: what was found, by the name of each comparison of a grid; outside of a grid the name is "".
    """

    path: Path
    comparisons: Mapping[str, Results]

    @property
    def results(self) -> Results:
        """What was found; in a grid by the first comparison."""
        return next(iter(self.comparisons.values()))

    @property
    def best(self) -> Variant:
        """The variant of the best score, which chance may have put first: see `results.leaders()`."""
        return self.results.leaders()[0]

    def to_pandas(self) -> "pd.DataFrame":
        """A row for each run: score, times and costs; pandas has to be installed."""
        with needs("to_pandas"):
            import pandas as pd

        return pd.DataFrame(
            {
                "comparison": name,
                "variant": variant.name,
                "seed": run.seed,
                results.metric: run.score,
                "status": run.status,
                "seconds": run.seconds,
                **{column.heading: column.value(variant) for column in columns(results)[1:]},
            }
            for name, results in self.comparisons.items()
            for variant in results.variants
            for run in variant.runs
        )

    def plot(self) -> "Figure":
        """Score over multiply-adds, with the standard deviation over seeds and lines for the baselines."""
        from matplotlib.figure import Figure

        results = self.results
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        for variant in results.variants:
            if variant.score is not None and variant.macs:
                axes.errorbar(
                    variant.macs, variant.score, yerr=variant.deviation, fmt="o", capsize=3, label=variant.name
                )
        for (name, score), style in zip(results.baselines.items(), cycle(("--", ":", "-.", "-"))):
            axes.axhline(score, color="grey", linestyle=style, linewidth=1, label=name)
        axes.set(xscale="log", xlabel="multiply-adds of one sample", ylabel=f"test {results.measure}")
        figure.legend(frameon=False, loc="outside right upper")
        return figure

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<comparison {str(self.path)!r}: {finding_sentence(self.results)}>"

    def __str__(self) -> str:
        return "\n\n".join(
            f"{f'{name}: ' if name else ''}{finding_sentence(results)}\n\n{table_of(results).markdown()}"
            for name, results in self.comparisons.items()
        )

    def _repr_html_(self) -> str:
        """The finding and the table, as a notebook shows them."""
        shown = {name: (finding_sentence(one), table_of(one)) for name, one in self.comparisons.items()}
        return _templates().get_template("notebook.html").render(shown=shown)
