"""A comparison as one HTML file that needs nothing else: no network, no other file.

The page is the template report.html, which escapes what it is given; charts come as SVG.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tokenmix.files import replace_file
from tokenmix.lab.compare.charts import marker
from tokenmix.lab.compare.columns import baseline_rows, cells, columns
from tokenmix.lab.compare.map_figures import ExampleMaps, ShownExample, example_figure
from tokenmix.lab.compare.notes import budget_sentence, finding_sentence, notes
from tokenmix.lab.compare.report_figures import bars, confusions, cost_charts, growth_charts, learning_curves
from tokenmix.lab.compare.results import Results
from tokenmix.lab.data.lookup import short_name
from tokenmix.testing.probe import ProbeReport
from tokenmix.testing.probe_tasks import TASKS

# The probe of all mixers. A checkout has it; an installed wheel does not.
PROBE = Path(__file__).parents[4] / "dev" / "probe.json"


def write_report(results: Results, file: Path, examples: Sequence[ExampleMaps | ShownExample] = ()) -> Path:
    """Write report.html.

    The page's policy allows its own style, script and embedded images only, so that a name in it can start nothing.

    Args:
        results: what was found.
        file: the file to write.
        examples: maps of test images, whose predictions are in `results.examples`; or samples as the task shows them.
    """
    machine = results.environment
    return write_page(
        file,
        "report.html",
        script=_part("js"),
        title=_title(results),
        environment=machine,
        machine=machine["gpus"][0] if results.device.startswith("cuda") and machine["gpus"] else machine["cpu"],
        finding=finding_sentence(results),
        budget=budget_sentence(results),
        notes=notes(results),
        results=results,
        variants=results.variants,
        columns=columns(results),
        cells=partial(cells, results),
        probed=_probed(results),
        abilities={name: task.ability for name, task in TASKS.items()},
        several=len(results.config["seeds"]) > 1,
        marker=marker,
        curves=learning_curves(results),
        scatters=cost_charts(results),
        growth=growth_charts(results),
        bars=partial(bars, results),
        confusions=confusions(results),
        examples=[example_figure(results, maps) for maps in examples if isinstance(maps, ExampleMaps)],
        shown=[example for example in examples if isinstance(example, ShownExample)],
        baselines=baseline_rows(results),
        command=results.command,
        repeat=_repeat(results),
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
    pages = Environment(
        loader=PackageLoader("tokenmix.lab.compare", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    pages.filters["digest"] = _digest
    replace_file(file, pages.get_template(template).render(style=_part("css"), **values).encode())
    return file


def _part(kind: str) -> str:
    return files("tokenmix.lab.compare").joinpath(f"report.{kind}").read_text()


def _digest(text: str) -> str:
    """As a Content-Security-Policy names what is inline."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _title(results: Results) -> str:
    number = len(results.variants)
    what = f"{number} variant{'s' if number > 1 else ''} of {results.config['model']}"
    return f"{what} on {results.data.get('name', short_name(results.config['data']))}"


def _repeat(results: Results) -> dict[str, str]:
    """What one needs to know to do it again."""
    found = results.environment
    commit = found["commit"] or "installed package"
    return {
        "date": found["date"],
        "device": results.device,
        "processor": f"{found['cpu']}; cores: {found['cores']}, threads: {found['threads']}",
        "GPU": ", ".join(found["gpus"]) or "none",
        "system": f"{found['platform']}, Python {found['python']}",
        "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "commit": f"{commit}{' with uncommitted changes' if found['changed'] else ''}",
        "data": results.data.get("source", results.config["data"]),
    }
