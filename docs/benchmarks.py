"""The tables and the chart in docs/guides/cost.md from the results in `dev/benchmarks`: `python docs/benchmarks.py`."""

import json
import re
import statistics
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))


from suite.results import Ratio, Results, read_results  # noqa: E402

PAGE, CHART = ROOT / "docs" / "guides" / "cost.md", ROOT / "docs" / "images" / "benchmarks.png"
NAMES = {
    "zen2": "AMD Zen 2",
    "zen3": "AMD Zen 3",
    "zen4": "AMD Zen 4",
    "zen5": "AMD Zen 5",
    "icelake": "Intel Ice Lake",
    "amx": "Intel with AMX",
}
COLOURS = ("#2b5fb3", "#d9731a", "#2f8f5b", "#8a5ab5", "#777777")
TABLES = re.compile(r"(<!-- (table|loops|large|start) -->\n).*?(<!-- end -->)", re.DOTALL)
PARTS = {"read": "decode and augment alone", "jobs": "side by side"}
Machine = dict[tuple[str, str], tuple[Ratio, float, float]]
"""(case, other package) -> ratio, our seconds, the other's."""


def machines() -> list[tuple[str, list[Results]]]:
    """The five latest folders of `dev/benchmarks` with the allocator's defaults, the latest first."""
    folders = [folder for folder in (ROOT / "dev" / "benchmarks").glob("*") if not folder.name.endswith("-kept")]
    found = [(f.name, [read_results(file) for file in sorted(f.glob("results/*.json"))]) for f in folders]
    return sorted(((n, r) for n, r in found if r), key=lambda item: max(_date(r) for r in item[1]), reverse=True)[:5]


def _date(results: Results) -> str:
    return results.environment["date"]


def against_packages(results: list[Results]) -> Machine:
    """Every comparison with another package that was measured on one machine."""
    rows: Machine = {}
    for result in results:
        for row in result.rows:
            times = {v.name: v for v in row.variants if v.status == "measured" and v.median is not None}
            for ratio in row.ratios:
                ours, other = times[ratio.ours], times[ratio.other]
                if other.role == "peer" and row.quantity == "seconds":
                    name = f"less-attention {row.name}" if row.group == "less" else row.name
                    rows[name, ratio.other] = (ratio, ours.median or 0.0, other.median or 0.0)
    return rows


def table() -> str:
    """Times on the latest machine, ratios on all; then what was measured where."""
    found = [(name, results, against_packages(results)) for name, results in machines()]
    titles = [NAMES.get(name, name) for name, *_ in found]
    lines = [f"| case | other package | {' | '.join(titles)} | tokenmix, ms |"]
    lines += ["|---|---" + "|---:" * len(found) + "|---:|"]
    for key, (_, ours, _) in found[0][2].items():
        ratios = [_cell(rows[key][0], spread=rows is found[0][2]) if key in rows else "–" for *_, rows in found]
        lines += [f"| {' | '.join([*key, *ratios, f'{1e3 * ours:.1f}'])} |"]
    lines += ["", "| machine | processor | commit, date |", "|---|---|---|"]
    for title, (_, results, _) in zip(titles, found, strict=True):
        last = max(results, key=_date)
        e = last.environment
        lines += [f"| {title} | {e['cpu']}, {last.threads} threads | `{e['commit'][:8]}`, {_date(last)[:10]} |"]
    versions = {f"torch {r.environment['versions']['torch']}": r.peers for _, results, _ in found for r in results}
    lines += ["", *(f"{torch}; {', '.join(map(' '.join, peers.items()))}." for torch, peers in versions.items())]
    return "\n".join(lines)


def _cell(ratio: Ratio, spread: bool) -> str:
    """The median, with quartiles if asked; bold where tokenmix is slower in more than three quarters of the rounds."""
    median = f"**{ratio.median:.2f}**" if ratio.q1 > 1 else f"{ratio.median:.2f}"
    return f"{median} ({ratio.q1:.2f}–{ratio.q3:.2f})" if spread else median


def latest(name: str) -> dict[str, Any]:
    """What the machine found that wrote a file of this name last."""
    files = (ROOT / "dev" / "benchmarks").glob(f"*/{name}.json")
    found = {file.parent.name: json.loads(file.read_text()) for file in files}
    machine, results = max(found.items(), key=lambda item: item[1]["environment"]["date"])
    return {"machine": NAMES.get(machine, machine), **results}


def _where(found: dict[str, Any]) -> str:
    environment = found["environment"]
    versions = {"torch": environment["versions"]["torch"], **found["versions"]}
    where = f"{found['machine']}: {environment['cpu']}, commit `{environment['commit'][:8]}`"
    other = "" if found["quiet"] else " Other programs ran on the machine."
    return f"{where}, {environment['date'][:10]}; {', '.join(map(' '.join, versions.items()))}.{other}"


def loops() -> str:
    """Whole training loops on the machine that measured them last: rates, ratios and peak memory."""
    found = latest("end_to_end")
    lines = ["| loop | tokenmix | MiB | times as fast as |", "|---|---:|---:|---|"]
    for row in found["rows"]:
        title = row["name"] + (f", {PARTS[row['group']]}" if row["group"] in PARTS else "")
        ours = next(iter(row["sides"].values()))
        rate = statistics.median(ours["rates"])
        cells = [f"{rate:,.{0 if rate >= 100 else 1}f} {row['unit']}/s", f"{ours['memory'] / 2**20:,.0f}"]
        others = []
        for other, (median, low, high) in row["ratios"].items():
            ratio = f"**{median:.2f}**" if median < 1 else f"{median:.2f}"
            memory = row["sides"][other]["memory"] / 2**20
            others.append(f"{other}: {ratio} ({low:.2f}–{high:.2f}), {memory:,.0f} MiB")
        lines += [f"| {' | '.join([title, *cells, '<br>'.join(others)])} |"]
    return "\n".join([*lines, "", _where(found)])


def large() -> str:
    """Time, memory and growth of commands on large inputs."""
    found = latest("large_inputs")
    lines = ["| input | size | CPU s | peak MiB | growth |", "|---|---:|---:|---:|---:|"]
    for row in found["rows"]:
        size, cpu, memory = (row[name][-1] for name in ("sizes", "cpu", "memory"))
        lines += [
            f"| {row['group']}: {row['name']} | {size:,} | {cpu:,.0f} | {memory / 2**20:,.0f} | {row['growth']:.2f} |"
        ]
    return "\n".join([*lines, "", _where(found)])


def start() -> str:
    """CPU time of commands next to bare programs with the same packages."""
    found = latest("startup")
    lines = ["| command | tokenmix, CPU s | bare program, CPU s | added |", "|---|---:|---:|---:|"]
    for row in found["rows"]:
        ours, bare = (statistics.median(row[side]) for side in ("ours", "bare"))
        added = "{:z.1f} ({:z.1f} to {:z.1f})".format(*row["added"])
        lines += [f"| {row['name']} | {ours:.1f} | {bare:.1f} | {added} |"]
    return "\n".join([*lines, "", _where(found)])


def page(text: str) -> str:
    """The page with its tables written anew."""
    made = {"table": table, "loops": loops, "large": large, "start": start}
    return TABLES.sub(lambda found: f"{found[1]}\n{made[found[2]]()}\n\n{found[3]}", text)


def chart() -> Figure:
    """Ratios with quartiles: a row for each comparison, a colour for each machine; narrow for phones."""
    found = [(NAMES.get(name, name), against_packages(results)) for name, results in machines()]
    keys = list(reversed(found[0][1]))
    figure = Figure(figsize=(5, 0.4 * len(keys) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for number, (title, rows) in enumerate(found):
        here = [(y + 0.14 * ((len(found) - 1) / 2 - number), rows[key][0]) for y, key in enumerate(keys) if key in rows]
        medians = [ratio.median for _, ratio in here]
        spread = [[r.median - r.q1 for _, r in here], [r.q3 - r.median for _, r in here]]
        axes.errorbar(
            medians, [y for y, _ in here], xerr=spread, fmt="o", ms=4, lw=1, color=COLOURS[number], label=title
        )
    axes.axvline(1, color="#777777", lw=1)
    axes.set_yticks(range(len(keys)), [f"{case}\n{other}" for case, other in keys])
    axes.set_xlabel("time: tokenmix / other package")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    axes.set_ylim(-0.6, len(keys) - 0.4)
    axes.grid(axis="y", lw=0.3)
    return figure


if __name__ == "__main__":
    from stamps import digest, stamp

    PAGE.write_text(page(PAGE.read_text()))
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        chart().savefig(buffer := BytesIO(), dpi=120, facecolor="white")
    Image.open(buffer).convert("RGB").quantize(64).save(CHART, optimize=True)
    stamp("benchmarks.png", digest(table()))
