"""A comparison as one HTML file that needs nothing else: no network, no other file."""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from tokenmix.compare.columns import Column, cells, columns
from tokenmix.compare.map_figures import ExampleMaps, maps_section
from tokenmix.compare.notes import budget_sentence, finding_sentence, notes
from tokenmix.compare.report_figures import confusion_section, cost_section, learning_section
from tokenmix.compare.results import Results, Twin
from tokenmix.train.files import replace_file

__all__ = ["write_report"]


def write_report(results: Results, file: Path, examples: Sequence[ExampleMaps] = ()) -> Path:
    """Write report.html.

    Args:
        results: what was found.
        file: the file to write.
        examples: maps of test images; their answers stand in `results.examples`.
    """
    sections = [_head(results), _table(results), learning_section(results), cost_section(results)]
    sections += [confusion_section(results), maps_section(results, examples), _environment(results)]
    style, script = (files("tokenmix.compare").joinpath(f"report.{kind}").read_text() for kind in ("css", "js"))
    title = escape(_title(results))
    script = f"\n{script}"
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        # Nothing is loaded and no script runs but the page's own, whatever stands in the data.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        f"style-src 'unsafe-inline'; script-src 'sha256-{allowed}'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>\n<style>\n{style}</style></head>\n<body>\n"
        + "\n".join(filter(None, sections))
        + f"\n<script>{script}</script>\n</body></html>\n"
    )
    replace_file(file, page.encode())
    return file


def _title(results: Results) -> str:
    number = len(results.twins)
    return f"{number} token mixer{'s' if number > 1 else ''} on {results.data.get('name', results.config['data'])}"


def _head(results: Results) -> str:
    environment = results.environment
    machine = (
        environment["gpus"][0] if results.device.startswith("cuda") and environment["gpus"] else environment["cpu"]
    )
    day = environment["date"][:10]
    return (
        f"<header><h1>{escape(_title(results))}</h1>"
        f'<p class="soft">{day} · {escape(machine)} · tokenmix {escape(environment["versions"]["tokenmix"])}</p>'
        f'<p class="lead">{escape(finding_sentence(results))}</p><p>{escape(budget_sentence(results))}</p></header>'
    )


def _table(results: Results) -> str:
    heads = "".join(_table_head(column) for column in columns(results))
    rows = "".join(_table_row(results, twin) for twin in results.twins)
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes(results))
    return (
        '<section><h2>Results</h2><p class="soft">★ marks the best of a column; × is the ratio to self-attention. '
        "A click on a heading sorts.</p>"
        f'<div class="card scroll"><table><thead><tr><th>mixer</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        f'<ul class="notes soft">{listed}</ul></section>'
    )


def _table_head(column: Column) -> str:
    return f'<th data-sort scope="col" title="{escape(column.about)}">{escape(column.heading)}</th>'


def _table_row(results: Results, twin: Twin) -> str:
    name = f"<b>{escape(twin.mixer)}</b>"
    if twin.message:
        name += f'<small class="failed">{escape(twin.message)}</small>'
    shown = []
    for cell in cells(results, twin):
        small = f"<small>{cell.ratio}</small>" if cell.ratio else ""
        value = "" if cell.value is None else f' data-value="{cell.value:.6g}"'
        shown.append(f"<td{value}{' class=best' if cell.best else ''}>{escape(cell.text)}{small}</td>")
    return f'<tr><td title="{escape(twin.about)}">{name}</td>{"".join(shown)}</tr>'


def _environment(results: Results) -> str:
    found = results.environment
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    commit = found["commit"] or "installed package"
    rows = {
        "date": found["date"],
        "device": results.device,
        "processor": f"{found['cpu']}; cores: {found['cores']}, threads: {found['threads']}",
        "GPU": ", ".join(found["gpus"]) or "none",
        "system": f"{found['platform']}, Python {found['python']}",
        "versions": versions,
        "commit": f"{commit}{' with uncommitted changes' if found['changed'] else ''}",
        "data": results.data.get("source", results.config["data"]),
    }
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in rows.items())
    return (
        f"<section><h2>Repeat it</h2><pre>{escape(results.command)}</pre>"
        f'<div class="card"><dl>{listed}</dl></div></section>'
        "<footer>All numbers of this page, and the curves, stand in results.json beside it.</footer>"
    )
