"""Results as Markdown, wins and losses alike: one line for each comparison."""

import shlex
from collections.abc import Iterable, Sequence
from statistics import median

from suite.groups import GROUPS
from suite.results import Measured, Quantity, Ratio, Results, Row, Verdict, of_rounds

__all__ = ["lines_of", "page"]

HEAD = ("case", "ours", "against", "ours took", "the other took", "ours / other", "target", "met")


def page(results: Sequence[Results], title: str, kept: Sequence[Results] = ()) -> str:
    """A whole page: what was measured where, then a table for each group.

    `kept` are the same cases with the allocator's memory kept; a first table then has both states side by side.
    """
    order = list(GROUPS)
    results = sorted(results, key=lambda r: (order.index(r.group) if r.group in order else len(order), r.dtype))
    parts = [f"# {title}", "", _summary(results), ""]
    if kept:
        parts += ["## Memory returned to the system, and kept by the allocator", "", *_both_states(results, kept), ""]
    for result in results:
        about = GROUPS.get(result.group, "")
        parts += [f"## {result.group}, {result.dtype}: {about}", "", _where(result), ""]
        parts += _table(line for row in result.rows for line in lines_of(row))
        notes = dict.fromkeys(f"- {row.name}: {row.note}" for row in result.rows if row.note)
        parts += ["", *notes, ""] if notes else [""]
    return "\n".join(parts).rstrip() + "\n"


def _both_states(results: Sequence[Results], kept: Sequence[Results]) -> list[str]:
    """A line for each comparison that both have: ours / other in either state, and the target."""
    other = {(r.group, r.dtype, row.name, x.ours, x.other): x for r in kept for row in r.rows for x in row.ratios}
    lines = ["| case | ours | against | returned | kept | target |", "| --- | --- | --- | ---: | ---: | --- |"]
    for r in results:
        for row in r.rows:
            targets = {(v.ours, v.other): _target(v, row) for v in row.verdicts}
            for x in row.ratios:
                if (found := other.get((r.group, r.dtype, row.name, x.ours, x.other))) is None:
                    continue
                ratios = (f"**{y.median:.2f}** ({y.q1:.2f} to {y.q3:.2f})" for y in (x, found))
                target = targets.get((x.ours, x.other), "")
                lines.append("| " + " | ".join((f"{r.group}, {row.name}", x.ours, x.other, *ratios, target)) + " |")
    return lines


def _summary(results: Sequence[Results]) -> str:
    verdicts = [(r, row, v) for r in results for row in r.rows for v in row.verdicts]
    met = sum(v.met for _, _, v in verdicts)
    rows = [row for r in results for row in r.rows]
    failed = [f"{row.group}: {row.name}" for row in rows if row.status == "failed"]
    failed += [f"{row.group}: {row.name}, {v.name}" for row in rows for v in row.variants if v.status == "failed"]
    told = f"{met} of {len(verdicts)} targets met." if verdicts else "No targets."
    missed = [
        f"- not met: {row.group}, {row.name}: {_target(v, row)}, is {_value(v, row)}{_bound(v, row)}"
        for _, row, v in verdicts
        if not v.met
    ]
    lines = [
        "Made by `benchmarks/run.py` from the JSON files next to it; how to read it: `docs/guides/cost.md`.",
        "",
        told,
        *(["", *missed] if missed else []),
        *[f"\nCheck FAILED, so nothing was timed: {name}." for name in failed],
    ]
    return "\n".join(lines)


def _where(r: Results) -> str:
    e = r.environment
    machine = ", ".join(e["gpus"]) if r.device == "cuda" and e["gpus"] else f"{e['cpu']}, {e['cpu_capability']}"
    peers = ", ".join(f"{name} {version}" for name, version in r.peers.items())
    commit = (e["commit"] or "no checkout")[:9] + (" with changes" if e["changed"] else "")
    return (
        f"{machine}; {r.threads} threads; torch {e['versions']['torch']}, {peers}; commit {commit}; {e['date']}; "
        f"`{shlex.join(shlex.split(r.command))}`"
    )


def _table(lines: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", "---", "---", "---:", "---:", "---:", "---", "---"]
    return ["| " + " | ".join(cells) + " |" for cells in (HEAD, rule, *lines)]


def lines_of(row: Row) -> list[tuple[str, ...]]:
    """A row's lines under `HEAD`."""
    name = f"{row.name} ({', '.join(f'{k} {v}' for k, v in row.shapes.items())})"
    if row.status == "failed":
        c = row.correctness
        error = "not finite, of another shape, or a reference of zeros" if c.error is None else f"{c.error:.2g}"
        return [(name, "FAILED", c.against, f"error: {error}", f"bound {c.bound:g}", "", "", "")]
    measured = {v.name: v for v in row.variants if v.status == "measured"}
    lines = [_compared(name, row, ratio, measured) for ratio in row.ratios]
    compared = {side for ratio in row.ratios for side in (ratio.ours, ratio.other)}
    lines += [_alone(name, row, v) for v in measured.values() if v.name not in compared]
    lines += [
        (name, "FAILED" if v.status == "failed" else "", v.name, "", v.why, "", "", "")
        for v in row.variants
        if v.status != "measured"
    ]
    return lines


def _compared(name: str, row: Row, ratio: Ratio, measured: dict[str, Measured]) -> tuple[str, ...]:
    verdict = next((v for v in row.verdicts if (v.ours, v.other) == (ratio.ours, ratio.other)), None)
    ours, other = (_spread(measured[side], row.quantity) for side in (ratio.ours, ratio.other))
    value = f"**{ratio.median:.2f}** ({ratio.q1:.2f} to {ratio.q3:.2f})"
    target, met = _verdict(verdict, row)
    if verdict is not None and _misses(verdict):
        ends = sorted((ratio.q1, ratio.q3) if verdict.direction == "at most" else (1 / ratio.q3, 1 / ratio.q1))
        met += ", within the spread" if ends[0] <= verdict.limit <= ends[1] else ""
    return (name, ratio.ours, ratio.other, ours, other, value, target, met)


def _alone(name: str, row: Row, variant: Measured) -> tuple[str, ...]:
    verdict = next((v for v in row.verdicts if v.ours == variant.name and v.other is None), None)
    return (name, variant.name, "", _spread(variant, row.quantity), "", "", *_verdict(verdict, row))


def _verdict(verdict: Verdict | None, row: Row) -> tuple[str, str]:
    if verdict is None:
        return "", ""
    if _misses(verdict):
        return _target(verdict, row), f"{'yes' if verdict.met else '**no**'}: {_value(verdict, row)}"
    return _target(verdict, row), "yes"


def _misses(v: Verdict) -> bool:
    """Whether the median does not reach the limit, in a tie either."""
    return v.value > v.limit if v.direction == "at most" else v.value < v.limit


def _target(v: Verdict, row: Row) -> str:
    if v.other is None:
        return f"{v.direction} {_amount(v.limit, row.quantity)}"
    if v.direction == "at least":
        return f"at least {v.limit:.3g} × as fast as {v.other}"
    return f"at most {v.limit:.3g} × {v.other}"


def _value(v: Verdict, row: Row) -> str:
    return f"{v.value:.4g} ×" if v.other is not None else _amount(v.value, row.quantity)


def _bound(v: Verdict, row: Row) -> str:
    """How many times as fast the row's floor is as the other, for a target of the form "at least"; "" without one."""
    floors = [m for m in row.variants if m.role == "floor" and m.runs]
    if v.direction != "at least" or v.other is None or not floors:
        return ""
    other = next(m for m in row.variants if m.name == v.other)
    return f"; the floor alone would be {min(median(of_rounds(other, floor)) for floor in floors):.4g} ×"


def _spread(v: Measured, quantity: Quantity) -> str:
    assert v.median is not None
    assert v.q1 is not None
    assert v.q3 is not None
    if len(v.runs) == 1:
        return _amount(v.median, quantity)
    unit = _amount(v.median, quantity)
    return f"{unit} ({_amount(v.q1, quantity).split()[0]} to {_amount(v.q3, quantity).split()[0]})"


def _amount(value: float, quantity: Quantity) -> str:
    if quantity == "seconds":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value * 1e3:.0f} ms"
    if quantity == "bytes":
        return f"{value / 1e6:.4g} MB"
    return f"{value:.3f}" if quantity == "exponent" else f"{value:.0f} tokens"
