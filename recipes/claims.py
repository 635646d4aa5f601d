"""The ledger: what the papers claim, and what the comparisons of this folder found.

    python -m recipes.claims [FOLDER ...]

Keeps the results of these folders of comparisons next to their TOML files, then writes docs/claims.md from claims.toml
and all kept results; a test holds the page to it. The page has the rules of the verdicts.
"""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from scipy.stats import nct
from scipy.stats import t as student

from recipes.program import run_program
from tokenmix.errors import UserError
from tokenmix.files import read_json, write_json
from tokenmix.lab.compare.results import Results, load_results
from tokenmix.lab.compare.statistics import Difference, covariance_of_means, difference, holm
from tokenmix.lab.train.metrics import read_predictions
from tokenmix.lab.train.run import evaluate
from tokenmix.testing.probe_tasks import guess_of

ROOT = Path(__file__).parents[1]
PAGE, PROBE = ROOT / "docs" / "claims.md", ROOT / "recipes" / "probe_seeds.npz"
LEDGER: dict[str, Any] = tomllib.loads((ROOT / "recipes" / "claims.toml").read_text())
CLAIMS: list[dict[str, Any]] = LEDGER["claims"]
ABOUT: dict[str, str] = LEDGER["about"]
NOTES: dict[str, str] = LEDGER["notes"]
AGREES, DISAGREES, NOT_SEEN, CANNOT_TELL, NOT_RUN = "agrees", "disagrees", "not seen", "cannot tell", "not yet run"
MIXED, SEEDS = "mixed", 10


@dataclass(frozen=True)
class Found:
    """What a row of a claim has: its verdict, the difference in the direction of the claim, its p-value and power."""

    row: Mapping[str, Any]
    verdict: str
    difference: Difference | None = None
    means: tuple[float, float] = (0.0, 0.0)
    probability: float = 1.0
    power: float = 0.0


def file_of(comparison: str) -> Path:
    """Where the result of a comparison is kept: next to its TOML file, or the program that measures it."""
    found = [file for kind in ("toml", "py") for file in (ROOT / "recipes").rglob(f"{comparison}.{kind}")]
    if len(found) != 1:
        raise UserError(f"no comparison {comparison!r} in recipes; give the name of one of its TOML files")
    return found[0].with_suffix(".json")


def keep(folder: Path) -> Path:
    """Keep of a comparison what the ledger reads; if it has several data sets, of the runs on each."""
    files = [*folder.glob("results.json")] or sorted(folder.glob("*/results.json"))
    if not files:
        raise UserError(f"{folder} has no results.json; give the --out folder of a finished `tokenmix compare`")
    found = {file.parent: load_results(file) for file in files}
    results = found[files[0].parent]
    file = file_of(Path(str(results.config["config"])).stem)
    before = {row["name"]: row for row in read_json(file)["variants"]} if file.exists() else {}
    everything = [
        (variant.name, replace(run, folder=str((part / run.folder).relative_to(folder))))
        for part, one in found.items()
        for variant in one.variants
        for run in variant.runs
        if run.score is not None
    ]
    variants: list[dict[str, Any]] = []
    for variant in results.variants:
        runs = [run for name, run in everything if name == variant.name]
        kept = [{"seed": run.seed, "folder": run.folder, "score": run.score} for run in runs]
        whole = whole_images(folder, kept, results, before.get(variant.name, {}))
        costs = {"parameters": variant.parameters, "macs": variant.macs}
        variants.append({"name": variant.name, **costs, "runs": kept, **whole})
    seconds = [run.seconds for _, run in everything if run.seconds is not None]
    # Each data set's comparison has a command of its own.
    command = results.command if len(files) == 1 else re.sub(r" --(data|out) \S+", "", results.command)
    document = {
        **{key: results.environment[key] for key in ("date", "cpu", "commit")},
        **{key: getattr(results, key) for key in ("metric", "higher", "unit", "seen")},
        "command": command,
        "baselines": {key: np.mean([one.baselines[key] for one in found.values()]) for key in results.baselines},
        "note": other_options(command),
        "minutes": f"{np.median(seconds) / 60:.1f}" if seconds else None,
        "variants": variants,
        "samplings": [
            {**asdict(sampling), "runs": [str((part / run).relative_to(folder)) for run in sampling.runs]}
            for part, one in found.items()
            if (sampling := one.sampling) is not None
        ],
    }
    write_json(file, document)
    np.savez_compressed(file.with_suffix(".npz"), **predictions_of(folder, [run.folder for _, run in everything]))
    return file


GIVEN, FOUND = ("index", "label", "masked"), ("predicted", "loss", "counts")
"""Columns of predictions that give accuracies, perplexity and mean IoU: of the test samples, and of a run."""


def predictions_of(folder: Path, runs: Iterable[str]) -> dict[str, np.ndarray]:
    """What each run said of each test sample, as RUN/COLUMN; and COLUMN alone for what the samples have in all runs."""
    columns: dict[str, np.ndarray] = {}
    for run in runs:
        rows = read_predictions(folder / run) or {}
        for name in (name for name in (*GIVEN, *FOUND) if name in rows and (name != "loss" or "label" not in rows)):
            values = rows[name].numpy()
            if name in FOUND or not np.array_equal(values, columns.setdefault(name, values)):
                columns[f"{run}/{name}"] = values
    return columns


def whole_images(
    folder: Path, runs: Sequence[Mapping[str, Any]], results: Results, before: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Scores, in one pass over each image, of segmenters that the comparison tests in windows.

    Those of the result `before` that was kept of the same runs stay, as an evaluation takes seconds a run.
    """
    if results.config.get("way") != "sliding" or not str(results.config["model"]).startswith("eanet_seg"):
        return {}
    if before.get("runs") == runs and "whole" in before:
        return {"whole": before["whole"]}
    return {"whole": [evaluate(folder / run["folder"], options={"way": "whole"})[results.metric] for run in runs]}


def other_options(command: str) -> str:
    """The options of a command that change what its comparison measures."""
    kept = re.findall(r"(?<= )--(?!config|seeds|out |jobs|threads|device)[a-z].*?(?= --[a-z]|$)", command)
    return f"with {' '.join(kept)}" if kept else ""


def probed(task: str) -> dict[str, Any] | None:
    """A task of the probe in the form of a kept result, from what each run had right in each sample."""
    with np.load(PROBE) as kept:
        right = {name: kept[name] for name in kept.files if name.startswith(f"{task}/")}
    if not right:
        return None
    asked, told = right.pop(f"{task}/asked"), read_json(PROBE.with_suffix(".json"))
    told |= {"minutes": f"{told['minutes'][task]:.1f}", "note": f"guessing {guess_of(task):.2f}"}
    return by_accuracy(told, right, asked)


def by_accuracy(told: Mapping[str, Any], right: Mapping[str, np.ndarray], asked: np.ndarray) -> dict[str, Any]:
    """A result in the form of a kept one, from how many answers each run (.../NAME-seedK) had right in each sample."""
    variants: dict[str, list[dict[str, Any]]] = {}
    means = []
    for folder, hits in right.items():
        name, _, seed = Path(folder).name.rpartition("-seed")
        score = float(hits.sum() / asked.sum())
        variants.setdefault(name, []).append({"seed": int(seed), "folder": folder, "score": score})
        means.append((hits - score * asked) / asked.mean())  # a ratio of sums, to first order
    return {
        **told,
        "metric": "accuracy",
        "higher": True,
        "variants": [{"name": name, "runs": runs} for name, runs in variants.items()],
        "samplings": [{"samples": len(asked), "runs": [*right], "covariance": covariance_of_means(np.stack(means))}],
    }


@cache
def document(comparison: str) -> dict[str, Any] | None:
    """The kept result of a comparison, of one "by accuracy" or of "probe TASK"; None if it has not been run."""
    if comparison.startswith("probe "):
        return probed(comparison.removeprefix("probe "))
    name, _, accuracy = comparison.partition(" ")
    file = file_of(name)
    if not file.exists() or not accuracy:
        return read_json(file) if file.exists() else None
    with np.load(file.with_suffix(".npz")) as kept:
        labels = kept["label"]
        answers = {key.removesuffix("/predicted"): kept[key] for key in kept.files if key.endswith("/predicted")}
    told = {**read_json(file), "baselines": {"majority": float(np.bincount(labels).max() / len(labels))}}
    return by_accuracy(told, {run: given == labels for run, given in answers.items()}, np.ones(len(labels)))


def difference_of(found: Mapping[str, Any], a: str, b: str) -> tuple[Difference, tuple[float, float]] | None:
    """How much better `a` is than `b`, of perplexities in logarithms, and their means; None if one has no runs."""
    runs = [next((v["runs"] for v in found["variants"] if v["name"] == name), []) for name in (a, b)]
    if not all(runs):
        return None
    sign, ratio = 1 if found["higher"] else -1, found.get("metric") == "perplexity"

    def values(side: Sequence[Mapping[str, Any]]) -> Any:
        scores = np.array([run["score"] for run in side])
        return sign * (np.log(scores) if ratio else scores)

    gaps = []
    for sampling in found["samplings"]:
        sides = [[run for run in every if run["folder"] in sampling["runs"]] for every in runs]
        places = [sampling["runs"].index(run["folder"]) for side in sides for run in side]
        covariance = np.array(sampling["covariance"])[np.ix_(places, places)]
        if ratio:
            scores = np.array([run["score"] for side in sides for run in side])
            covariance = covariance / np.outer(scores, scores)
        gaps.append(difference(*map(values, sides), covariance, sampling["samples"]))
    if not gaps:
        gaps = [difference(*map(values, runs))]
    first, second = (float(np.mean([run["score"] for run in every])) for every in runs)
    return mean_of(gaps), (first, second)


def mean_of(parts: Sequence[Difference]) -> Difference:
    """The mean of differences that were measured on different test samples, with as many seeds of each."""
    if len(parts) == 1:
        return parts[0]
    number = len(parts)
    seeds = [tuple(one.seed_variances or (math.nan,) * 2) for one in parts]
    return replace(
        parts[0],
        value=float(np.mean([one.value for one in parts])),
        seeds=tuple(int(k) for k in np.sum([one.seeds for one in parts], 0)),
        seed_variances=tuple(float(s) for s in np.mean(seeds, 0)),
        sample_variance=float(np.sum([one.sample_variance for one in parts])) / number**2,
        noise=float(np.sum([one.noise for one in parts])) / number**2,
        samples=int(np.sum([one.samples for one in parts])) - number + 1,
    )


def power_at(found: Difference, effect: float, level: float) -> float:
    """How often a true difference of `effect` would be found, two-sided at `level`."""
    if not found.error:
        return 1.0
    freedom = min(found.freedom, 1e6)
    edge, shift = student.ppf(1 - level / 2, freedom), effect / found.error
    # scipy has nan for the other tail where it is next to nothing.
    return float(np.nansum([nct.sf(edge, freedom, shift), nct.cdf(-edge, freedom, shift)]))


def judge(rows: Sequence[Mapping[str, Any]], documents: Mapping[str, dict[str, Any] | None]) -> list[Found]:
    """The verdicts on the rows of one claim, whose p-values are adjusted by Holm."""
    got = {
        i: one
        for i, row in enumerate(rows)
        if (d := documents[row["comparison"]]) is not None and (one := difference_of(d, row["a"], row["b"])) is not None
    }
    # From -m for "worse by less than m", from 0 for "better".
    beyond = {i: replace(gap, value=gap.value + rows[i].get("non_inferior", 0.0)) for i, (gap, _) in got.items()}
    adjusted = dict(zip(got, holm([one.probability for one in beyond.values()])))
    found = []
    for i, row in enumerate(rows):
        if i not in got:
            found.append(Found(row, NOT_RUN))
            continue
        gap, means = got[i]
        power = power_at(gap, effect := effect_of(row), 0.05 / len(got))
        if adjusted[i] < 0.05:
            verdict = AGREES if beyond[i].value > 0 else DISAGREES
        elif "effect" in row and power >= 0.5 and gap.interval()[1] < effect:
            verdict = NOT_SEEN
        else:
            verdict = CANNOT_TELL
        found.append(Found(row, verdict, gap, means, adjusted[i], power))
    return found


def effect_of(row: Mapping[str, Any]) -> float:
    """The effect at which a row's power is told: the paper's, its margin, or a small one in its comparison's unit."""
    small = 0.01 if row["comparison"].startswith("compare_") else 0.05
    return row.get("effect", row.get("non_inferior", small))


def verdict_of(found: Sequence[Found]) -> tuple[str, bool]:
    """The verdict on a claim, and whether ten seeds stand behind it."""
    seeds: dict[str, int] = {}
    for one in found:
        if one.difference is not None:
            seeds[one.verdict] = max(seeds.get(one.verdict, 0), min(one.difference.seeds))
    decided = seeds.keys() - {CANNOT_TELL}
    if len(decided) > 1 and AGREES in decided:
        return MIXED, min(seeds[one] for one in decided) >= SEEDS
    verdict = next((one for one in (DISAGREES, AGREES, NOT_SEEN, CANNOT_TELL) if one in seeds), NOT_RUN)
    return verdict, seeds.get(verdict, 0) >= SEEDS


HEAD = """# Small replications

What the papers claim, and what small networks show that train for minutes. A verdict holds *at this scale*; [how to
read it](#how-to-read-it) has the rule. *Exploratory*: fewer than ten seeds. *Mixed*: some rows agree, others do
not. The papers' figures are from a primary source [V], a secondary one [V2], or an article by or about the authors
[S]; [?]: not known to us.
"""


def rule() -> str:
    """How to read the page, and the results that have no rows."""
    lavit = read_json(file_of("compare_lavit_pairs"))
    loss = difference_of(lavit, "diagonality", "lavit")
    assert loss is not None
    low, high = loss[0].interval()
    pairs = {one["name"]: f"{scores_of(lavit, [one['name']])[one['name']]:.3f}" for one in lavit["variants"]}
    return f"""## How to read it

`python -m recipes.claims` writes this page from `recipes/claims.toml` and the kept results: the files `.json`, and
`.npz` with what each network said of each test sample, next to `recipes/*/compare_*.toml`. `python -m
recipes.run_all --budget HOURS` repeats them all. The probe has ten seeds here, and five on [the pages of the
mechanisms](mechanisms/index.md#what-each-can-do-measured).

- **A, B**: each row asks whether A is better than B, or *worse by less* than a margin. Margins are ours. Where B is
  self-attention, they are at most a quarter of what it gains over the control.
- **Control**: the same network with no mixing (`none`, `identity`), or where every token gets the mean of all
  (`mean`). Else the simplest method of the task.
- **A less B**: over seeds and test samples, with the interval at 95 %, [paired](guides/report.md#intervals). For
  perplexity, where less is better, it is the logarithm of B's less that of A's (0.05: B has 5 % more).
- **p**: the probability of such a difference from 0, or from the margin, by chance. It is adjusted by Holm for the
  rows of the claim; intervals are not.
- **Power**: how often such a row would find this effect, or would agree if A and B were equal, at 0.05 over the number
  of rows. The effect is the paper's (*paper*) if it has the same unit, else a small one.
- A row **agrees** or **disagrees** where p is below 0.05. It says **not seen** if its interval excludes the paper's
  effect and the power is at least 50 %, and else **cannot tell**.
- A claim is **mixed** if some rows agree and others disagree or have not seen it. It is *exploratory* if no row
  with its verdict has ten seeds; a mixed one, if either verdict has none.
- The probe gives each mixer one learning rate, and the steps after which self-attention's curve is flat. More steps
  may change what others can do.
- `slots`: what a slot, or a k-means cluster, tells of the class. `own-clusters` are made anew for each tile, so
  their numbers mean nothing in other tiles.
- `depth`: how far an attention map is from that of the block before (1 - CKA), first third of the blocks less last.
- `one-head-external`: multi-head external attention with all its width in one head. Its memories are wider, so it
  has nearly twice the parameters. `em`: [EM attention](mechanisms/external.md).

## Without rows

Where no mixer is ahead of the same network without attention, data cannot tell mixers apart.

- [Detection](guides/detection.md#cost-and-results), and [point clouds](guides/points.md#cost-and-results).
- LaViT on pairs (`compare_lavit_pairs`, eight seeds): {pairs["one-key"]} with one key, so that all tokens get the
  same mean. {pairs["lavit"]} with less-attention, {pairs["no-residual"]} without the residual,
  {pairs["diagonality"]} with diagonality loss ({low:.3f} to {high:.3f} more). {pairs["vanilla"]} with
  self-attention everywhere.
- LaViT in segmentation (2026-11-29, four to ten seeds, predictions not kept): mean IoU 0.555 with one key, 0.550 with
  self-attention, 0.549 with less-attention. In instance segmentation (three seeds): mask AP 0.117 with one key, 0.126
  with self-attention.
- [Solar cells](guides/data.md#cost-and-results): `identity` is as good as any mixer.
- [A text encoder that is distilled](guides/swap.md#a-text-model-of-hugging-face): one seed. Linear attention is
  ahead of `identity` there, external attention is not.

To cite a result, name the number of its claim, the comparison, and the commit of its runs, with `CITATION.cff`.
"""


ORDER = (MIXED, DISAGREES, AGREES, NOT_SEEN, CANNOT_TELL, NOT_RUN)


def page() -> str:
    """The whole page, with the papers' claims first on which something is decided."""
    judged = [
        (number, claim, judge(claim["rows"], {r["comparison"]: document(r["comparison"]) for r in claim["rows"]}))
        for number, claim in enumerate(CLAIMS, 1)
    ]
    judged.sort(key=lambda one: (ORDER.index(verdict_of(one[2])[0]), one[1].get("ours", False)))
    lines = [HEAD, "| | verdict | claim | the paper |", "|---:|---|---|---|"]
    for number, claim, found in judged:
        verdict, enough = verdict_of(found)
        weak = "" if enough or verdict in (CANNOT_TELL, NOT_RUN) else ", exploratory"
        lines.append(f"| {number} | **{verdict}**{weak} | {claim['text']} | {claim['paper']} |")
    lines += ["", "## Comparisons", "", "| claim | verdict | A | B | control | A less B | p | power | comparison |"]
    lines.append("|---:|---|---|---|---|---:|---:|---|---|")
    for number, _, found in judged:
        lines += [f"| {number} | {_line(one)} |" for one in found if one.difference is not None]
    missing = [
        f"`{one.row['comparison']}`: {one.row['a']} against {one.row['b']} (claim {number})"
        for number, _, found in judged
        for one in found
        if one.difference is None
    ]
    if missing:
        lines += ["", f"Not yet run: {'; '.join(missing)}."]
    lines += ["", "## Data and networks", "", "| comparison | what is asked, of how many tokens, by which network |"]
    lines += ["|---|---|", *(f"| `{name}` | {about} |" for name, about in ABOUT.items())]
    lines += ["", "## Run one", "", "```console", "tokenmix compare --config compare_climates --jobs 2"]
    lines += [
        "tokenmix probe external --tasks recall --full    # five seeds; recipes.probe_seeds has more",
        "```",
        "",
        "| comparison | metric | controls | runs × minutes | measured | commit | note |",
        "|---|---|---|---:|---|---|---|",
    ]
    names = dict.fromkeys(row["comparison"].removesuffix(" accuracy") for claim in CLAIMS for row in claim["rows"])
    lines += [_source(name, kept) for name in names if (kept := document(name)) is not None]
    return "\n".join([*lines, "", rule()])


CONTROLS = ("none", "identity", "mean")


def _line(found: Found) -> str:
    row, gap, kept = found.row, found.difference, document(found.row["comparison"]) or {}
    name, margin = f"`{row['comparison']}`", row.get("non_inferior")
    assert gap is not None
    low, high = gap.interval()
    digits = 2 if max(map(abs, found.means)) >= 10 else 3
    a, b = (f"{row[side]} {mean:.{digits}f}" for side, mean in zip("ab", found.means))
    told = f"{gap.value:z.3f} ({low:z.3f}\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}{high:z.3f})"
    p = "<0.001" if found.probability < 0.001 else f"{found.probability:.3f}"
    effect = f"paper {row['effect']:g}" if "effect" in row else "equal" if margin else ""
    if not effect and found.verdict == CANNOT_TELL:
        effect = f"{effect_of(row):g}"
    power = f"{effect}: {100 * found.power:.0f}\N{NO-BREAK SPACE}%" if effect else "–"
    parts = len(kept.get("samplings", ()))
    seeds = f"{min(gap.seeds)} seeds" if parts < 2 else f"{min(gap.seeds) // parts} seeds on each of {parts} parts"
    asked = f"{name}, worse by less than {margin:g}" if margin else name
    return f"**{found.verdict}** | {a} | {b} | {control_of(kept, row)} | {told} | {p} | {power} | {asked}, {seeds}"


def control_of(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """The row's control, else the best network without attention, else the simplest method, with its mean score."""
    scores = scores_of(found, (row["control"],) if "control" in row else CONTROLS) or found["baselines"]
    best = max(scores, key=scores.__getitem__)
    return f"{best} {_digits(scores[best])}"


def _digits(score: float) -> str:
    return f"{score:,.{0 if score >= 100 else 3}f}"


def scores_of(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Mean scores of those of the variants that were run."""
    variants = [one for one in found["variants"] if one["runs"] and one["name"] in names]
    return {one["name"]: float(np.mean([run["score"] for run in one["runs"]])) for one in variants}


def _source(name: str, found: Mapping[str, Any]) -> str:
    when = f"{found['date'][:10]}, {found['cpu']}"
    simple = {**scores_of(found, CONTROLS), **(found.get("baselines") or {})}.items()
    control = ", ".join(f"{name} {_digits(score)}" for name, score in simple)
    note = "; ".join(filter(None, [_fewer_seeds(name, found), found["note"], tie_of(found), NOTES.get(name)]))
    runs = sum(len(variant["runs"]) for variant in found["variants"])
    times = f"{runs} × {found['minutes']}" if found.get("minutes") else "–"
    commit = f"`{found['commit'][:8]}`"
    return f"| {' | '.join((f'`{name}`', found['metric'], control or '–', times, when, commit, note))} |"


def tie_of(found: Mapping[str, Any]) -> str:
    """Whether self-attention is no better than the same network without mixing, and whether anything is."""
    names = [one["name"] for one in found["variants"]]
    control = next((name for name in ("identity", "none") if name in names), None)
    if control is None or "self" not in names:
        return ""
    helped = [
        name
        for name in names
        if name != control and (one := difference_of(found, name, control)) and one[0].real and one[0].value > 0
    ]
    if "self" in helped:
        return ""
    return f"{control} ties with self-attention" + ": no evidence on mixing" * (not helped)


def _fewer_seeds(name: str, found: Mapping[str, Any]) -> str:
    """The option that gives a comparison the seeds that were measured, where its file has others."""
    if not name.startswith("compare_"):
        return ""
    seeds = sorted({run["seed"] for variant in found["variants"] for run in variant["runs"]})
    asked = tomllib.loads(file_of(name).with_suffix(".toml").read_text())["seeds"]
    return "" if seeds == asked else f"with --seeds {','.join(map(str, seeds))}"


@dataclass(frozen=True)
class Args:
    """Keep the results of finished comparisons, then write docs/claims.md."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folders of comparisons, each with a results.json."""


def main(args: Args) -> None:
    """Write the kept results of `args.folders` and the page."""
    for folder in args.folders:
        print(f"{keep(folder).relative_to(ROOT)} written")
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(ROOT)} written")


if __name__ == "__main__":
    run_program(main, Args)
