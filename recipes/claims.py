"""The ledger: what the papers claim, and what the runs of our recipes found.

    python -m recipes.claims

Reads the recipes' JSON and writes docs/claims.md; a test holds the page to it. The rule of the verdicts stands in the
page.
"""

import json
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from scipy.stats import t as student

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "claims.md"

Document = Mapping[str, Any]
# From the recipe's document: runs, and what else its row says; None where there are none yet.
Pick = Callable[[Document], Mapping[str, Any] | None]
Verdict = Literal["agrees", "disagrees", "not seen at this scale", "not testable here", "not yet run"]

PLATEAU, TEXT = "classification.plateau", "text.text_nano"
SEGMENTATION, DETECTION = "segmentation.segmentation_nano", "detection.detection_nano"
GENERATION, POINTS = "generation.generation_nano", "points.points_nano"
TEST_IMAGES = 10_000
# Until 2026-11-23 nothing was held out for validation.
CHOSEN = {
    SEGMENTATION: "settings chosen on the test tiles, by some thirty runs",
    TEXT: "learning rates chosen on the held-out texts",
    **dict.fromkeys((DETECTION, GENERATION, POINTS), "run when there was no validation data"),
}


@dataclass(frozen=True)
class Row:
    """A comparison of two groups of runs, or of one with a number.

    Attributes:
        what: what was measured.
        recipe: the module under recipes whose JSON has it.
        a, b: the groups; `b` may be a number.
        names: of both.
        kind: `better`, the claim is that `a` is better; `as good`, that it is not worse by `margin` or more.
        margin: what would count, for `as good`.
        lower: less is better.
        images: test images of which an accuracy is the mean; None where the figure is no such mean, or their draw is
            not known.
        extra: arguments of the command that runs it.
    """

    what: str
    recipe: str
    a: Pick
    b: Pick | float
    names: tuple[str, str]
    kind: Literal["better", "as good"] = "better"
    margin: float = 0.0
    lower: bool = False
    images: int | None = None
    extra: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, what the paper prints for it, and our comparisons."""

    text: str
    paper: str
    rows: Sequence[Row] = ()
    not_testable: str = ""


@dataclass(frozen=True)
class Found:
    """What a row's runs found. `difference` is positive where the claim points."""

    row: Row
    verdict: Verdict
    runs: tuple[Sequence[float], Sequence[float]] = ((), ())
    difference: float = 0.0
    counts_from: float = 0.0
    seen_from: float = 0.0
    budget: str = ""


def at(*path: str, **match: str) -> Pick:
    """What stands at a path; `match` chooses among the rows of a list."""

    def pick(document: Document) -> Mapping[str, Any] | None:
        value: Any = document
        for key in path:
            if isinstance(value, list):
                value = next((row for row in value if all(row.get(k) == v for k, v in match.items())), None)
            if value is None or key not in value:
                return None
            budget = {unit: value[unit] for unit in UNITS if unit in value}
            value = {**budget, **value[key]} if isinstance(value[key], dict) else value[key]
        return value

    return pick


UNITS = ("images", "sequences", "clouds")


def ablation(name: str, label: str) -> Pick:
    """A row of the plateau recipe's ablations."""
    return at("ablations", name, label)


def plateau(what: str, name: str, a: str, b: str, **more: Any) -> Row:
    """A comparison of two rows of an ablation."""
    row = Row(
        f"Fashion-MNIST, accuracy: {what}",
        PLATEAU,
        ablation(name, a),
        ablation(name, b),
        (a, b),
        images=TEST_IMAGES,
        extra="--part ablations",
    )
    return Row(**{**row.__dict__, **more})


def families(a: str, b: str, budgets: Sequence[str], **more: Any) -> tuple[Row, ...]:
    """Two mixers of the plateau recipe, at each of these budgets."""
    return tuple(
        Row(
            f"Fashion-MNIST, accuracy, {budget}",
            PLATEAU,
            at("families", budget, a),
            at("families", budget, b),
            (a, b),
            images=TEST_IMAGES,
            **more,
        )
        for budget in budgets
    )


def on_emoji(a: str, b: str, **more: Any) -> Row:
    """Two mixers of the plateau recipe on emoji."""
    picks = (at("emoji", "equal images", name) for name in (a, b))
    return Row("emoji, accuracy, equal images", PLATEAU, *picks, (a, b), images=752, extra="--part emoji", **more)


def slope(name: str) -> Pick:
    """Points of accuracy for ten times the parameters, over the three sizes, of each seed."""

    def pick(document: Document) -> Mapping[str, Any] | None:
        sizes = [row for label, row in document.get("ablations", {}).get("sizes", {}).items() if label.startswith(name)]
        if len(sizes) < 3:
            return None
        xs = [math.log10(row["parameters"]) for row in sizes]
        centred = [x - mean(xs) for x in xs]
        slopes = [
            sum(x * y for x, y in zip(centred, ys)) / sum(x * x for x in centred)
            for ys in zip(*(row["runs"] for row in sizes), strict=True)
        ]
        return {"runs": slopes, "images": sizes[0]["images"]}

    return pick


def blocks(name: str, label: str, number: str, part: slice) -> Pick:
    """The mean over some blocks of a number of their maps, of each seed."""

    def pick(document: Document) -> Mapping[str, Any] | None:
        row = ablation(name, label)(document)
        if row is None:
            return None
        kept = [[one[number] for one in maps[part] if one[number] is not None] for maps in row["maps"]]
        return {"runs": [mean(values) for values in kept], "images": row["images"]}

    return pick


def toeplitz(document: Document) -> Mapping[str, Any] | None:
    """The mean over the blocks of the share of a free gate's variance that lies on its diagonals."""
    free = document["free_gate"]
    return {"runs": [mean(shares) for shares in free["end"]], "sequences": free["sequences"]}


def gates(better: str, worse: str) -> Row:
    """Two gates of gMLP on text."""
    return Row("held-out text, perplexity", TEXT, at("gates", better), at("gates", worse), (better, worse), lower=True)


def tuned(data: str) -> Row:
    """aMLP against gMLP, fine-tuned."""
    return Row(f"{data}, accuracy", TEXT, at("tuned", data, "aMLP"), at("tuned", data, "gMLP"), ("aMLP", "gMLP"))


def climates(a: str, b: str, **more: Any) -> Row:
    """Two heads of the segmentation recipe."""
    heads = tuple(
        (lambda document, head=head: at("looks", "windows of 300", "miou")(_row(document["heads"], head=head)))
        for head in (a, b)
    )
    return Row("Blue Marble's climates, mean IoU", SEGMENTATION, *heads, (a, b), **more)


def _row(rows: Sequence[Document], **match: str) -> Document:
    return next((row for row in rows if all(row.get(key) == value for key, value in match.items())), {})


def of_rows(metric: Sequence[str], **match: str) -> Pick:
    """A metric of the matching row of a document that has a list of them."""
    return lambda document: at(*metric)(_row(document["rows"], **match))


BUDGETS = ("equal images", "equal multiply-adds", "equal time")
CLAIMS = (
    Claim(
        "Double normalisation is needed in external attention",
        "EANet: 77.1 mIoU with it, about 75.7 with a softmax over the slots, PASCAL VOC val, table 1 [M]; the author "
        "in issue 11: 0.1 to 0.3 points in some runs [V]",
        (
            climates("external, double, S 64", "external, softmax, S 64"),
            plateau("against softmax over the slots", "normalisation", "double", "softmax over slots"),
            plateau("against none", "normalisation", "double", "none"),
            plateau(
                "against more Sinkhorn steps",
                "normalisation",
                "double",
                "three Sinkhorn steps",
                kind="as good",
                margin=0.005,
            ),
        ),
    ),
    Claim(
        "64 memory slots are enough",
        "EANet: S = 64 throughout [V]; the figures of its sweep are not known to us [?]",
        (
            *(
                climates("external, double, S 64", f"external, double, S {slots}", kind="as good", margin=0.01)
                for slots in (8, 32, 256)
            ),
            *(plateau("", "slots", "S 64", f"S {slots}", kind="as good", margin=0.005) for slots in (8, 32, 256)),
        ),
    ),
    Claim(
        "Several heads are what external attention gains by",
        "EANet, ImageNet at the size of T2T-ViT-7: 63.2 with one head [S], 68.9 as EAMLP-7 with 16 [M]",
        (
            *families("multihead-external", "external", BUDGETS),
            on_emoji("multihead-external", "external"),
            plateau("4 heads or 1, the same widths", "heads", "4 heads", "1 head"),
        ),
    ),
    Claim(
        "Heads may share their memories",
        "EANet, issue 18: the author sees no problem in it [V]; no figure",
        (plateau("", "memories", "shared by heads", "one for each head", kind="as good", margin=0.005),),
    ),
    Claim(
        "BatchNorm instead of LayerNorm helps EAMLP",
        "EANet: 70.0 instead of 68.9, EAMLP-7 [M], +1.1 [S]; larger models diverge [S]",
        (plateau("multi-head external attention", "norm", "BatchNorm", "LayerNorm"),),
    ),
    Claim(
        "Double normalisation helps self-attention too",
        "EANet: 76.6 instead of 76.2 mIoU, PASCAL VOC val, table 1 [M]",
        (plateau("", "normalisation", "self, double", "self, softmax"),),
    ),
    Claim(
        "Gates: split is best, then multiplicative, additive, linear",
        "gMLP, table 3, perplexity: 4.35 [V2], 4.53, 4.97, 5.14 [M]",
        (
            gates("split", "multiplicative"),
            gates("multiplicative", "additive"),
            gates("additive", "linear"),
            *(
                plateau("gates of gMLP's branch", "gate", *pair)
                for pair in (("split", "multiplicative"), ("multiplicative", "additive"), ("additive", "linear"))
            ),
        ),
    ),
    Claim(
        "The gate has to start near the identity",
        "gMLP: W near zero, b = 1, without a number [V2]",
        (plateau("gMLP's branch", "gate's start", "near identity", "as a linear layer"),),
    ),
    Claim(
        "The gate becomes Toeplitz by itself",
        "gMLP: seen on masked language modelling, so imposed there [V2]; no figure",
        (
            Row(
                "held-out text: variance of a free gate on its diagonals",
                TEXT,
                toeplitz,
                2 / 65,
                ("share after training", "share by chance"),
            ),
        ),
    ),
    Claim(
        "Tiny attention repairs tasks on two sentences",
        "gMLP, base sizes: MNLI 85.9 instead of 83.7, SQuAD 2.0 80.9 instead of 70.1, SST-2 93.4 and 94.2 [V2]",
        (
            tuned("wordnet-pairs"),
            Row(
                "held-out text, perplexity",
                TEXT,
                at("families", "aMLP"),
                at("families", "gMLP"),
                ("aMLP", "gMLP"),
                lower=True,
            ),
        ),
    ),
    Claim(
        "gMLP matches self-attention at equal parameters, and scales like it",
        "gMLP, perplexity of 36 layers 4.35, of BERT 4.37 [M]; ImageNet: gMLP-S 79.6, DeiT-S 79.8 [V2]",
        (
            Row(
                "held-out text, perplexity, 1.16 M parameters",
                TEXT,
                at("families", "gMLP"),
                at("families", "self-attention, relative"),
                ("gMLP", "self-attention, relative positions"),
                kind="as good",
                margin=2.0,
                lower=True,
            ),
            *(
                plateau(
                    f"width {width}",
                    "sizes",
                    f"gMLP, width {width}",
                    f"self, width {width}",
                    kind="as good",
                    margin=0.01,
                )
                for width in (24, 48, 96)
            ),
            on_emoji("gating", "self", kind="as good", margin=0.01),
            Row(
                "Fashion-MNIST, accuracy for ten times the parameters",
                PLATEAU,
                slope("gMLP"),
                slope("self"),
                ("slope of gMLP", "slope of self-attention"),
                kind="as good",
                margin=0.01,
                extra="--part ablations",
            ),
        ),
    ),
    Claim(
        "Attention saturates with depth",
        "LaViT: maps of deep layers resemble those before them [S]; no figure",
        (
            Row(
                "Fashion-MNIST, 8 blocks: distance of a map to that of the block before",
                PLATEAU,
                blocks("depth", "self, 8 blocks", "distance", slice(1, 4)),
                blocks("depth", "self, 8 blocks", "distance", slice(4, 8)),
                ("blocks 2 to 4", "blocks 5 to 8"),
                extra="--part ablations",
            ),
        ),
    ),
    Claim(
        "Less-attention keeps accuracy with fewer multiply-adds",
        "LaViT-S 82.6 with 3.3 GFLOPs, LaViT-B 83.1 with 6.1, ImageNet [V2]",
        (
            *families("less", "self", ("equal images",), kind="as good", margin=0.005),
            *families("less", "self", ("equal multiply-adds",)),
            on_emoji("less", "self", kind="as good", margin=0.005),
        ),
    ),
    Claim(
        "The attention residual and the diagonality loss help",
        "LaViT: an ablation, whose figures are not known to us [?]",
        (
            plateau("lavit_nano", "attention residual", "with", "without"),
            plateau("the loss with weight 0.1", "less-attention's loss", "with", "without"),
        ),
    ),
    Claim(
        "External attention helps segmentation",
        "EANet, PASCAL VOC val, ResNet-50: 77.1 instead of 75.7 mIoU [M]",
        (
            climates("external, double, S 64", "none"),
            climates("external, double, S 64", "self", kind="as good", margin=0.01),
        ),
    ),
    Claim(
        "External attention helps detection",
        "EANet, COCO: Faster R-CNN 38.6 instead of 37.4, Mask R-CNN 39.0 instead of 38.2 box AP [M]",
        tuple(
            Row(
                f"{job}, AP",
                DETECTION,
                of_rows(("map",), job=job, mixer="external"),
                of_rows(("map",), job=job, mixer="none"),
                ("external", "none"),
            )
            for job in ("trees", "composed")
        ),
    ),
    Claim(
        "External attention helps generation",
        "EANet, Fréchet distance: CIFAR-10 14.105 instead of SAGAN's 14.498, Tiny-ImageNet 48.374 instead of 51.414 "
        "[M]",
        tuple(
            Row(
                f"{data}, Fréchet distance of features",
                GENERATION,
                of_rows(("feature_fd",), data=data, attention="external"),
                of_rows(("feature_fd",), data=data, attention=other),
                ("external", other),
                lower=True,
            )
            for data in ("fashion-mnist", "emoji")
            for other in ("none", "sagan")
        ),
    ),
    Claim(
        "External attention helps point clouds",
        "EANet: ModelNet40 93.4 instead of PCT's 93.2, ShapeNet-part 86.5 instead of 86.4 [M]",
        tuple(
            Row(
                f"LDraw's bricks, {metric}",
                POINTS,
                of_rows(("metrics", metric), task=task, mixer="external"),
                of_rows(("metrics", metric), task=task, mixer="offset"),
                ("external", "offset attention"),
            )
            for task, metric in (("point-classification", "accuracy"), ("point-segmentation", "part_miou"))
        ),
    ),
    Claim(
        "The map of simplified attention, softmax(F F^T), is close to the identity",
        "the EANet author's article [S]; no figure",
        (
            Row(
                "Fashion-MNIST, 16 tokens: share of a row on the token itself",
                PLATEAU,
                blocks("simplified", "simplified", "diagonality", slice(0, 4)),
                0.5,
                ("share", "half"),
                extra="--part ablations",
            ),
        ),
    ),
    Claim(
        "Published accuracies at full size",
        "ImageNet, COCO, PASCAL VOC, C4: see [the models](models/index.md)",
        not_testable="neither the data sets nor the hundreds of GPU hours are here; recipes/ has the papers' recipes",
    ),
)


@cache
def document(recipe: str) -> Document | None:
    """A recipe's JSON; None if it has not been run."""
    file = ROOT / "recipes" / Path(*recipe.split(".")).with_suffix(".json")
    return json.loads(file.read_text()) if file.exists() else None


def judge(row: Row, found: Document | None) -> Found:
    """The verdict on a row, by the rule in the page."""
    a = None if found is None else row.a(found)
    b = {"runs": [row.b]} if isinstance(row.b, float) else None if found is None else row.b(found)
    if a is None or b is None:
        return Found(row, "not yet run")
    groups = (a["runs"], b["runs"])
    sign = -1.0 if row.lower else 1.0
    difference = sign * (mean(groups[0]) - mean(groups[1]))
    error = math.sqrt(sum(variance(runs, row.images) for runs in groups))
    freedom = sum(len(runs) - 1 for runs in groups)
    decided = float(student.ppf(0.975, freedom)) * error
    power = float(student.ppf(0.8, freedom)) * error
    verdict: Verdict = "not seen at this scale"
    if row.kind == "better" and abs(difference) > decided:
        verdict = "agrees" if difference > 0 else "disagrees"
    elif row.kind == "as good" and abs(difference + row.margin) > decided:
        verdict = "agrees" if difference + row.margin > 0 else "disagrees"
    unit = next((unit for unit in UNITS if unit in a), None)
    budget = f"{a[unit]:,} {unit}" if unit else ""
    return Found(row, verdict, groups, difference, decided, decided + power, budget)


def variance(runs: Sequence[float], images: int | None) -> float:
    """Of the mean of runs: by their seeds, and of an accuracy by the draw of test images; of a number none."""
    if len(runs) < 2:
        return 0.0
    middle = mean(runs)
    return stdev(runs) ** 2 / len(runs) + (middle * (1 - middle) / images if images else 0.0)


def verdict_of(claim: Claim, found: Sequence[Found]) -> Verdict:
    """The verdict on a claim from those on its rows."""
    if claim.not_testable:
        return "not testable here"
    verdicts = [one.verdict for one in found if one.verdict != "not yet run"]
    if not verdicts:
        return "not yet run"
    if "disagrees" in verdicts:
        return "disagrees"
    return "agrees" if all(verdict == "agrees" for verdict in verdicts) else "not seen at this scale"


HEAD = """# The ledger of claims

What the papers claim, and what our runs found. Made by `python -m recipes.claims` from the recipes' JSON; a test holds
the page to it. All nets are small and trained for minutes on two cores: a verdict is on the claim *at this scale*. The
marks of the papers' figures: [V] read in a primary source, [V2] in a secondary one, [S] stated in an article by or
about the authors, [M] from memory only, [?] unknown.

## The rule

Two groups of runs differ in one thing and in their seeds. For the difference *d* of their means, counted in the
direction that the claim points,

    SE = √(s₁²/k₁ + s₂²/k₂ + p₁(1 − p₁)/n + p₂(1 − p₂)/n)

with *k* seeds, their sample standard deviation *s*, and, where the figure is an accuracy *p* on *n* test images, the
draw of these. Both groups see the same test images, so this overstates the error a little. With Student's *t* of
ν = k₁ + k₂ − 2 degrees of freedom:

- *A is better than B*: **agrees** if d > t₀.₉₇₅ · SE, **disagrees** if d < −t₀.₉₇₅ · SE, else **not seen at this
  scale**.
- *A is as good as B*, within a margin *m*: the same with d + m instead of d.
- **not yet run**: there is a recipe for the comparison, and nobody has run it yet. **not testable here**: and why.
- A claim **disagrees** if one of its comparisons does, **agrees** if all that were run do; else it is **not seen at
  this scale**.

"Counts from" is t₀.₉₇₅ · SE. The smallest difference that the runs could have seen is (t₀.₉₇₅ + t₀.₈) · SE: one that
is as large is found four times in five. Three seeds estimate *s* badly, and about one comparison in twenty comes out
wrong by chance; there are {count} of them.
"""


def page() -> str:
    """The whole page."""
    judged = [(claim, [judge(row, document(row.recipe)) for row in claim.rows]) for claim in CLAIMS]
    lines = [HEAD.format(count=sum(len(found) for _, found in judged))]
    lines += ["| | claim | the paper | verdict | comparisons |", "|---:|---|---|---|---|"]
    for number, (claim, found) in enumerate(judged, 1):
        lines.append(
            f"| {number} | [{claim.text}](#{number}-{_anchor(claim.text)}) | {claim.paper} "
            f"| **{verdict_of(claim, found)}** | {_counted(found)} |"
        )
    for number, (claim, found) in enumerate(judged, 1):
        lines += ["", f"## {number} {claim.text}", "", f"The paper: {claim.paper}.", ""]
        lines += [f"Not testable here: {claim.not_testable}."] if claim.not_testable else _table(found)
    lines += ["", "## Where the figures are from", ""]
    for recipe in dict.fromkeys(row.recipe for claim, _ in judged for row in claim.rows):
        lines.append(_source(recipe))
    return "\n".join(lines) + "\n"


def _anchor(text: str) -> str:
    """As mkdocs makes it of a heading."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    kept = "".join(c if c.isalnum() or c in " -_" else "" for c in plain.lower())
    return "-".join(kept.split())


def _counted(found: Sequence[Found]) -> str:
    verdicts = [one.verdict for one in found]
    return ", ".join(f"{verdict}: {verdicts.count(verdict)}" for verdict in dict.fromkeys(verdicts))


def _table(found: Sequence[Found]) -> list[str]:
    return [
        "| measured | A | B | difference | counts from | smallest seen | each run saw | verdict |",
        "|---|---|---|---:|---:|---:|---:|---|",
        *(_line(one) for one in found),
    ]


def _line(found: Found) -> str:
    row = found.row
    claimed = f", claimed: A within {row.margin:g} of B" if row.kind == "as good" else ""
    what = row.what.removesuffix(": ") + claimed
    if found.verdict == "not yet run":
        return f"| {what} | {row.names[0]} | {row.names[1]} | | | | | not yet run: `{command(row)}` |"
    groups = [f"{name} {_spread(runs)}" for name, runs in zip(row.names, found.runs)]
    numbers = " | ".join(_number(value) for value in (found.difference, found.counts_from, found.seen_from))
    return f"| {what} | {groups[0]} | {groups[1]} | {numbers} | {found.budget} | **{found.verdict}** |"


def _spread(runs: Sequence[float]) -> str:
    spread = f" ± {_number(stdev(runs))}, {len(runs)} seeds" if len(runs) > 1 else ""
    return f"{_number(mean(runs))}{spread}"


def _number(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.4f}"


def command(row: Row) -> str:
    """What runs a row."""
    return " ".join(["python -m", f"recipes.{row.recipe}", *([row.extra] if row.extra else [])])


def _source(recipe: str) -> str:
    found = document(recipe)
    if found is None:
        return (
            f"- `recipes.{recipe}`: not yet run; `python -m recipes.{recipe}`, or `python -m recipes.run_all` for all."
        )
    date, cpu = found["environment"]["date"][:10], found["environment"]["cpu"]
    chosen = f"; {CHOSEN[recipe]}" if recipe in CHOSEN else ""
    return f"- `{found['command']}`, {date}, {cpu}{chosen}."


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(ROOT)} written")
