import base64
import hashlib
import html.parser
import io
import json
import re
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from tokenmix.errors import UserError
from tokenmix.lab.compare.charts import (
    Axis,
    Series,
    bars,
    cost_charts,
    learning_curves,
    line_chart,
    place_labels,
    scatter_chart,
    ticks,
)
from tokenmix.lab.compare.notes import budget_sentence, failed_runs, finding_sentence, notes, uncertainty
from tokenmix.lab.compare.report import ComparisonResult, ExampleMaps, ShownExample, color_bars, write_report
from tokenmix.lab.compare.results import (
    Curve,
    Example,
    Results,
    Run,
    Sampling,
    Variant,
    cells,
    columns,
    load_results,
    metric_name,
    metrics_of,
    table_of,
)
from tokenmix.lab.inspect import Tile
from tokenmix.lab.train.config import CompareConfig
from tokenmix.profiling.machine import Timing

EXAMPLE = Example(7, "shoe", {"self": ("shoe", 0.9), "external": ("<shirt>", 0.6)})
CURVE = Curve([100.0, 200.0], [1.0, 2.0], [0.5, 0.75])


def run(seed: int, score: float) -> Run:
    confusion = [[8, 2], [1, 9]]
    return Run(seed, f"runs/x-seed{seed}", "finished", "", score, 2.0, 100.0, CURVE, CURVE, confusion)


def variant(mixer: str, macs: int, runs: list[Run], crossover: str | None = None) -> Variant:
    runs = [replace(run, folder=f"runs/{mixer}-seed{run.seed}") for run in runs]
    timing = Timing.of([0.01 * macs, 0.02 * macs, 0.03 * macs])
    return Variant(mixer, f"about {mixer}", 1000, macs, macs // 2, crossover, timing, timing, 4096, 1024, runs)


@pytest.fixture
def results() -> Results:
    failed = Run(0, "runs/less-seed0", "failed", "the loss is nan at step 3", loss_curve=CURVE)
    return Results(
        command="tokenmix compare --mixers self,external,less --seeds 0,1",
        metric="accuracy",
        higher=True,
        reference="self",
        unit="images",
        config={**CompareConfig().replace(seeds=(0, 1)).flat(), "seeds": [0, 1]},
        data={"name": "shirts & <shoes>", "source": "made here", "train": 80},
        classes=["<shirt>", "shoe"],
        skeleton={"num_tokens": 49, "dim": 64, "depth": 4},
        train=80,
        test=20,
        seen=200,
        step_batch=10,
        device="cpu",
        environment={
            "date": "2026-01-02T03:04:05",
            "cpu": "a processor",
            "cores": 2,
            "threads": 1,
            "gpus": [],
            "platform": "x",
            "python": "3.11",
            "versions": {"tokenmix": "0"},
            "commit": None,
            "changed": None,
        },
        variants=[
            variant("self", 20, [run(0, 0.80), run(1, 0.84)]),
            variant("external", 10, [run(0, 0.85), run(1, 0.91)], "from N = 385"),
            variant("less", 30, [failed], "never"),
        ],
        examples=[EXAMPLE],
    )


def sharper(results: Results, number: int) -> Results:
    """The same means, which hardly differ over the seeds, on this many test images."""
    near = [
        replace(t, runs=[replace(r, score=(t.score or 0) + 0.001 * r.seed) if t.score else r for r in t.runs])
        for t in results.variants
    ]
    folders = [r.folder for t in near for r in t.runs if r.score is not None]
    # Half of what decides an image is common to all runs of a mixer.
    alike = np.kron(np.eye(len(folders) // 2), np.full((2, 2), 0.5)) + 0.5 * np.eye(len(folders))
    return replace(
        results, variants=near, sampling=Sampling(number, "images", folders, (0.2 * alike / number).tolist())
    )


@pytest.fixture
def maps() -> list[ExampleMaps]:
    values = torch.linspace(0, 1, 16).view(4, 4)
    tiles = [
        Tile("head 0", values, mark=(1, 2)),
        Tile("gate", values - 0.5, signed=True),
        Tile("flat", torch.ones(4, 4)),
    ]
    matrix = [Tile("whole", values - 0.5, signed=True, on_image=False)]
    return [
        ExampleMaps(EXAMPLE, torch.zeros(1, 8, 8, dtype=torch.uint8), {"self": [tiles, tiles], "external": [matrix]})
    ]


def test_results_come_back_from_the_file(results: Results, tmp_path: Path):
    results = sharper(results, 100)
    results.save(tmp_path / "results.json")
    again = load_results(tmp_path / "results.json")
    assert json.dumps(asdict(again), default=str) == json.dumps(asdict(results), default=str)
    assert again.variants[1].latency == results.variants[1].latency
    assert again.difference(*again.variants[:2]) == results.difference(*results.variants[:2])


def test_results_of_another_schema_are_refused(results: Results, tmp_path: Path):
    replace(results, schema=0).save(tmp_path / "results.json")
    with pytest.raises(UserError, match="schema 0"):
        load_results(tmp_path / "results.json")


def test_networks_that_predict_the_same_have_no_critical_difference(results: Results):
    one, two = (replace(t, runs=[replace(t.runs[0], score=0.8)]) for t in results.variants[:2])
    folders = [t.runs[0].folder for t in (one, two)]
    sampling = Sampling(20, "images", folders, [[0.01, 0.01], [0.01, 0.01]])
    same = replace(results, variants=[one, two], config={**results.config, "seeds": [0]}, sampling=sampling)
    assert "self and external have the same score on each test sample, so none tells them apart." in uncertainty(same)
    assert not any("0.0000" in text for text in [finding_sentence(same), *uncertainty(same)])
    apart = replace(same, sampling=replace(sampling, covariance=[[0.01, 0.0], [0.0, 0.01]]))
    assert not any("same score" in text for text in uncertainty(apart))


def test_a_metric_that_is_not_defined_is_said(results: Results):
    one = results.variants[0]
    empty = replace(one, runs=[replace(run, score=None) for run in one.runs])
    told = failed_runs(replace(results, variants=[empty, *results.variants[1:]]))
    assert sum("accuracy is not defined for self" in text for text in told) == len(one.runs)
    assert not any("not defined" in text for text in failed_runs(results))


def test_names_break_no_table(results: Results):
    one = replace(results.variants[0], name="a\n[red]b")
    table = table_of(replace(results, variants=[one, *results.variants[1:]]))
    assert len(table.markdown().splitlines()) == 2 + len(table.rows)
    assert "| a [red]b |" in table.markdown()
    shown = io.StringIO()
    Console(file=shown, width=200).print(table.rich())
    assert "[red]b" in shown.getvalue()


def test_cells_have_mean_spread_ratio_and_the_best(results: Results):
    headings = [column.heading for column in columns(results)]
    external = dict(zip(headings, cells(results, results.variants[1])))
    assert external["accuracy"].text == "0.8800 ± 0.0424"
    assert external["accuracy"].best
    assert cells(results, results.variants[0])[0].best, "20 test images do not tell 0.82 from 0.88"
    many = sharper(results, 200_000)
    assert [cells(many, t)[0].best for t in many.variants] == [False, True, False]
    one = replace(many, config={**many.config, "seeds": [0]})
    assert not any(cells(one, t)[0].best for t in one.variants)
    assert (external["MACs"].text, external["MACs"].ratio) == ("10", "0.5×")
    assert external["train images/s"].value == pytest.approx(10 / 0.2)
    less = dict(zip(headings, cells(results, results.variants[2])))
    assert less["accuracy"].text == "–"
    assert not less["MACs"].best


def test_points_of_several_seeds_have_error_bars(results: Results):
    accuracy_over_cost = cost_charts(results)
    assert all(chart.count('<path class="bar"') == 2 for chart in accuracy_over_cost), "two variants with two runs each"
    single = [replace(variant, runs=variant.runs[:1]) for variant in results.variants]
    assert not any('class="bar"' in chart for chart in cost_charts(replace(results, variants=single)))


def test_times_come_with_their_quartiles_and_what_disturbed_them(results: Results, tmp_path: Path):
    rate = next(column for column in columns(results) if column.heading == "train images/s")
    # Seconds are 0.2, 0.4 and 0.6: the quartiles 0.3 and 0.5 are 50 % of the median apart.
    assert bars(results, rate)[0] == ("self", 0, 50.0, "25 ± 25 %")
    assert "±" not in bars(results, columns(results)[1])[0][-1]
    told = "Warning: others were at work; measure again by the same command; finished runs are kept."
    assert told not in notes(results)
    assert told in notes(replace(results, warning="others were at work; measure again"))


def test_times_whose_quartiles_overlap_are_a_tie(results: Results):
    def starred(*timings: Timing) -> list[bool]:
        timed = [replace(v, latency=timing, step=None) for v, timing in zip(results.variants, timings, strict=True)]
        tied = replace(results, variants=timed)
        column = next(i for i, column in enumerate(columns(tied)) if column.heading == "forward ms")
        return [cells(tied, variant)[column].best for variant in tied.variants]

    first, near, slow = Timing(1.0, 0.9, 1.1, ()), Timing(1.2, 1.1, 1.3, ()), Timing(1.3, 1.2, 1.4, ())
    assert starred(first, near, slow) == [True, True, False]
    assert starred(near, slow, slow) == [True, True, True]


def test_markdown_table_is_a_table(results: Results):
    lines = table_of(results).markdown().splitlines()
    assert {line.count("|") for line in lines} == {len(columns(results)) + 2}
    assert "**0.8800 ± 0.0424**" in lines[3]


def test_sentences_say_what_was_equal_what_failed_and_where_costs_cross(results: Results):
    assert "the same 80 images, 200 counting repeats," in budget_sentence(results)
    odd = replace(results, train=75, seen=210)
    assert "75 images, 210 counting repeats without incomplete batches, in" in budget_sentence(odd)
    assert "the same 40 images in the same order" in budget_sentence(replace(results, seen=40)), "half a pass"
    assert "(0, 1)" in budget_sentence(results)
    other = replace(results, config={**results.config, "pretrained": True, "class_weights": "balanced"})
    assert "Each was trained, starting from its published weights, on" in budget_sentence(other)
    assert budget_sentence(other).count(", classes of equal weight in the loss. ") == 1
    assert "(embedding width 64, 4 blocks, 49 tokens)" in budget_sentence(results)
    rows = {variant.name: {"model": f"{variant.name}_nano"} for variant in results.variants}
    told = budget_sentence(replace(results, config={**results.config, "variants": rows}))
    assert told.startswith("A variant's network differs from the others in the options of its row (")
    assert ", unless its row has others. " in told
    told = budget_sentence(replace(results, config={**results.config, "variants": {"self": {"lr": 0.01}}}))
    assert told.startswith("Every variant is ")
    sizes = {**results.skeleton, "img_size": [28, 28], "patch_size": 4, "num_tokens": 49}
    expected = "(images of 28 x 28 px, patches of 4 px, 49 tokens, embedding width 64, 4 blocks)"
    assert expected in budget_sentence(replace(results, skeleton=sizes))
    assert finding_sentence(results) == (
        "No clear best accuracy: chance can explain the differences between external 0.8800, self 0.8200."
    )
    many = sharper(results, 200_000)
    assert finding_sentence(many).startswith(
        "Best accuracy: external, 0.8805, at 0.5× the multiply-adds of self-attention, which reached 0.8205. The "
        "accuracy of external is 0.0600 higher than that of self (95 % interval 0.0"
    )
    assert finding_sentence(many).endswith("; 2 seeds, 200,000 test images): the mixers differ.")
    listed = "\n".join(notes(results))
    assert "less failed, seed 0: the loss is nan at step 3" in listed
    assert "external 0.5×, fewer from N = 385; less 1.5×, fewer at no N" in listed
    critical = results.difference(results.variants[1], results.variants[0]).critical
    assert f"as mixers: the critical difference in accuracy (95 %) is {critical:.4f}; a smaller" in listed
    assert "more seeds of each would show whether external is 0.0600 better than self, if seeds vary" in listed
    assert "One seed" not in listed
    assert "The accuracy, the confusion matrix and the samples shown are of the weights" in listed
    boxes = replace(results, metric="map")
    assert finding_sentence(boxes).startswith("No clear best mAP: ")
    beaten = replace(results, baselines={"logistic regression": 0.85})
    assert "No network" not in finding_sentence(beaten)
    better = replace(results, baselines={"logistic regression": 0.89})
    assert "No network is better than the baseline logistic regression, 0.8900." in finding_sentence(better)


def test_the_note_says_where_holm_leaves_a_difference_open(results: Results):
    told = "larger, but not after Holm's adjustment for the 5 comparisons with the best."
    two = sharper(results, 500)
    assert two.difference(two.variants[1], two.variants[0]).probability == pytest.approx(0.0145, abs=1e-3)
    assert not any("Holm" in note for note in uncertainty(two))
    like_self = [variant(f"other{i}", 20, results.variants[0].runs) for i in range(4)]
    six = sharper(replace(results, variants=[*results.variants[:2], *like_self]), 500)
    assert finding_sentence(six).startswith("No clear best")
    assert any(told in note for note in uncertainty(six))


def test_networks_that_predict_one_class_are_named(results: Results):
    assert not any("One class is predicted" in note for note in notes(results))
    one, two = results.variants[1].runs
    runs = [one, replace(two, confusion=[[10, 0], [10, 0]])]
    variants = [results.variants[0], replace(results.variants[1], runs=runs), results.variants[2]]
    told = "One class is predicted for every test sample by external (seed 1: <shirt>)"
    listed = replace(results, variants=variants)
    assert any(note.startswith(told) for note in notes(listed))
    assert any(note.startswith(told) for note in uncertainty(listed)), "the terminal shows these"
    runs = [one, replace(two, confusion=[[20, 0], [0, 0]])]
    right = replace(results, variants=[results.variants[0], replace(results.variants[1], runs=runs)])
    assert not any("One class is predicted" in note for note in notes(right)), "the test samples are of one class"


def test_there_is_no_best_without_a_score(results: Results, tmp_path: Path):
    variants = [replace(one, runs=[replace(run, score=None) for run in one.runs]) for one in results.variants]
    with pytest.raises(UserError, match="No variant has a score"):
        _ = ComparisonResult(tmp_path, {"": replace(results, variants=variants)}).best


def test_why_accuracy_is_balanced_and_which_epoch_is_kept(results: Results):
    counts = {"train": {"<shirt>": 1_060, "shoe": 20}}
    uneven = replace(results, metric="balanced_accuracy", data={**results.data, "counts": counts, "validation": 8})
    listed = "\n".join(notes(uneven))
    assert "(<shirt> 1,060, shoe 20). --class-weights balanced" in listed
    assert "those of the best epoch on 8 validation images." in listed
    assert "those of the last epoch, as nothing was held out" in "\n".join(notes(results))


def test_a_block_is_held_against_the_model_without_it(results: Results):
    without = replace(results.variants[0], name="none")
    blocks = replace(results, variants=[without, *results.variants[1:]], reference="none")
    folders = {run.folder for variant in blocks.variants for run in variant.runs}
    assert folders
    assert any(note.startswith("The accuracy of external is 0.0600 higher than that of none") for note in notes(blocks))


def test_a_variant_is_short_to_print(results: Results):
    assert repr(results.variants[0]) == "<self: 0.8200 ± 0.0283, 1 k parameters, 20 MACs>"


def one_seed(results: Results) -> Results:
    variants = [replace(variant, runs=variant.runs[:1]) for variant in results.variants]
    return replace(results, variants=variants, config={**results.config, "seeds": [0]})


def test_one_seed_compares_networks(results: Results):
    one = one_seed(sharper(results, 2_000))
    told = finding_sentence(one)
    assert told.startswith("Highest accuracy: external, 0.8800, at 0.5×")
    assert "which reached 0.8200. The accuracy of the network with external is" in told
    assert "1 seed, 2,000 test images): these two networks differ. One seed cannot compare the mixers." in told
    assert any("networks of one seed" in note for note in notes(one))
    blind = one_seed(results)
    assert finding_sentence(blind).endswith("; one seed does not show that it is the best.")
    assert not any("by chance" in note for note in notes(blind)), "nothing is known of chance"
    alone = replace(blind, variants=blind.variants[:1])
    assert finding_sentence(alone) == f"One variant has a score: self, accuracy {alone.variants[0].score:.4f}."


def test_where_identity_is_as_good_nothing_is_said_of_mixing(results: Results):
    def told(*scores: float) -> str:
        none = variant("identity", 5, [run(i, score) for i, score in enumerate(scores)])
        return finding_sentence(replace(results, variants=[*results.variants, none]))

    unsure = told(0.81, 0.84)
    assert "Cannot tell whether mixing helps: identity, which mixes no tokens, is 0.0050 better than" in unsure
    assert ", and only differences above 0.1" in unsure
    near = replace(results, variants=[*results.variants[:2], variant("identity", 5, [run(0, 0.83), run(1, 0.83)])])
    close = "does not test mixing: identity, which mixes no tokens, is within the critical difference of 0.0"
    assert close in finding_sentence(sharper(near, 2_000))
    assert "mixing" not in told(0.10, 0.101)
    assert "mixing" not in finding_sentence(results)
    sharp = sharper(results, 200_000)
    known = replace(sharp, variants=[replace(t, name="identity") if i else t for i, t in enumerate(sharp.variants)])
    assert "Mixing does not help on this data: identity, which mixes no tokens, is better" in finding_sentence(known)
    assert finding_sentence(one_seed(known)).endswith("with this seed, 0.0600 better than self-attention.")
    without = replace(known, variants=[replace(t, name="none") if i else t for i, t in enumerate(sharp.variants)])
    told_without = (
        "The block did not pay here: the model without it is with this seed 0.0600 better than self-attention."
    )
    assert finding_sentence(one_seed(without)).endswith(told_without)
    assert "the model without it is 0.0600 better than" in finding_sentence(without)


@pytest.mark.parametrize(
    ("renamed", "told"),
    [
        ({"self": "original"}, "better than the original model"),
        ({"self": "original", "external": "self"}, "better than the original model"),
        # Without attention the best of the others is meant; rows without mixing are not.
        ({"self": "gating"}, "worse than external"),
        ({"self": "none"}, "worse than external"),
    ],
)
def test_the_control_is_held_against_the_original_or_the_best(
    results: Results, renamed: dict[str, str], told: str
) -> None:
    rows = [replace(t, name=renamed.get(t.name, t.name)) for t in results.variants]
    none = variant("identity", 5, [run(0, 0.81), run(1, 0.89)])
    sentence = finding_sentence(replace(results, variants=[*rows, none], reference=rows[0].name))
    assert "Cannot tell whether mixing helps: identity, which mixes no tokens, is 0.0300" in sentence
    assert f"{told}, and only differences above" in sentence


def test_a_control_that_guesses_says_nothing_of_how_tokens_are_mixed(results: Results):
    guessing = [replace(run(i, 0.1), confusion=[[10, 0], [10, 0]]) for i in range(2)]
    told = finding_sentence(replace(results, variants=[*results.variants, variant("identity", 5, guessing)]))
    assert "Without mixing (identity) one class is predicted for every sample, as by guessing: self-attention" in told


def test_less_is_better_of_a_perplexity(results: Results):
    many = replace(sharper(results, 200_000), metric="perplexity", higher=False)
    assert [variant.name for variant in many.leaders()] == ["self"]
    found = many.difference(many.variants[0], many.variants[1])
    assert found.value == pytest.approx(0.06)
    assert "The perplexity of self is 0.0600 lower than that of external" in finding_sentence(many)


def test_samples_that_are_too_few_are_not_settled_by_seeds(results: Results):
    few = sharper(results, 20)
    assert any(note.startswith("More seeds cannot settle whether external") for note in notes(few))


class Page(html.parser.HTMLParser):
    """Collects what a page refers to, and checks that its tags are balanced."""

    EMPTY = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.EMPTY:
            self.open.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("href", "src", "xlink:href", "srcset", "data")]
        self.ids += [value or "" for key, value in attrs if key == "id"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open = self.open[:-1]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_but_itself(results: Results, maps: list[ExampleMaps], tmp_path: Path):
    text = write_report(results, tmp_path / "report.html", maps).read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links
    assert all(link.startswith("data:image/png;base64,") or link[1:] in page.ids for link in page.links)
    assert not re.search(r"https?://|@import|url\(", text)
    assert not re.search(r"(?<!loss is )\bnan\b", page.text.split("<style>")[0].lower())


def test_scales_of_maps_go_from_low_to_high():
    bars = color_bars()
    for bar, first, last in ((bars["inferno"], 0, 252), (bars["coolwarm"], 58, 179)):
        pixels = np.array(Image.open(io.BytesIO(base64.b64decode(bar.partition(",")[2]))))
        # Red of the first and of the last colour: from black to yellow, from blue to red.
        assert (pixels[0, 0, 0], pixels[0, -1, 0]) == (first, last)
    values = torch.tensor([[-0.5, 0.25]])
    assert (Tile("", values).range, Tile("", values, signed=True).range) == ((-0.5, 0.25), (-0.5, 0.5))


def test_samples_have_a_legend_of_their_classes(results: Results, tmp_path: Path):
    image = Image.new("RGB", (8, 8))
    samples = [
        ShownExample(i, image, image, {"self": image}, legend)
        for i, legend in enumerate(({"<sea>": "#0000ff"}, {"<sea>": "#0000ff", "ice": "#ffffff"}, {}))
    ]
    page = write_report(results, tmp_path / "report.html", samples).read_text()
    listed = re.search(r'<ul class="legend classes">(.*?)</ul>', page, re.DOTALL)
    assert listed is not None
    assert re.findall(r'fill="(#\w+)"/></svg>([^/]*)</li>', listed[1]) == [
        ("#0000ff", "&lt;sea&gt;"),
        ("#ffffff", "ice"),
    ]
    plain = write_report(results, tmp_path / "plain.html", [ShownExample(0, "a text", "yes", {"self": "no"}, {})])
    assert "legend classes" not in plain.read_text().split("</style>")[1]


def test_the_page_allows_its_own_style_script_and_pictures_only(
    results: Results, maps: list[ExampleMaps], tmp_path: Path
):
    text = write_report(results, tmp_path / "report.html", maps).read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    assert text.index(policy[0]) < text.index("<style>") < text.index("<script>")
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    for kind in ("style", "script"):
        inline = re.findall(rf"<{kind}[^>]*>(.*?)</{kind}>", text, re.DOTALL)
        assert len(inline) == 1
        digest = base64.b64encode(hashlib.sha256(inline[0].encode()).digest()).decode()
        assert rules.pop(f"{kind}-src") == f"'sha256-{digest}'"
    assert rules == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    # What a policy without unsafe-inline would not run.
    assert not re.search(r"<[^>]+\s(style|on\w+)=", text)


def test_the_page_tells_all_and_escapes_names(results: Results, maps: list[ExampleMaps], tmp_path: Path):
    text = write_report(results, tmp_path / "report.html", maps).read_text(encoding="utf-8")
    assert "<shoes>" not in text
    assert "<shirt>" not in text
    page = Page()
    page.feed(text)
    for expected in (
        "0.8800 ± 0.0424",
        "the loss is nan at step 3",
        "3 variants of mixer_nano on shirts & <shoes>",
        results.command,
    ):
        assert expected in page.text
    assert "test image 7" in page.text
    assert "<shirt>, 60%" in page.text


def test_a_comparison_without_validation_shows_the_curves_of_the_loss_alone(results: Results):
    rows = [replace(v, runs=[replace(r, score_curve=Curve()) for r in v.runs]) for v in results.variants]
    charts = learning_curves(replace(results, variants=rows))
    assert len(charts) == 2
    assert not any("No curve" in chart for chart in charts)


def test_the_page_stands_without_maps_confusions_and_scores(results: Results, tmp_path: Path):
    bare = replace(results, variants=[results.variants[2]], examples=[])
    text = write_report(bare, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "No variant finished." in text
    assert "there is no point to draw" in text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0.5, 0.5, [0.5]), (0, 9000, [0, 2000, 4000, 6000, 8000])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]):
    assert ticks(low, high) == expected


def test_lines_lie_where_their_values_are():
    text = line_chart([Series("a", 0, [0, 10], [1.0, 3.0])], Axis("x", str), Axis("y", str))
    (first, last) = re.search(r'points="([^"]+)"', text)[1].split()  # type: ignore[index]
    (x0, y0), (x1, y1) = (tuple(map(float, place.split(","))) for place in (first, last))
    assert x0 < x1
    assert y0 > y1


def test_an_axis_does_not_turn_noise_into_a_gap():
    def gap(least: float) -> float:
        points = [Series(name, i, [2.0 + i], [0.5 + 0.01 * i]) for i, name in enumerate(("a", "b"))]
        chart = scatter_chart(points, Axis("cost", str), Axis("score", str), {}, least)
        low, high = (float(y) for y in re.findall(r'class="m" transform="translate\([^,]+,([^)]+)\)', chart))
        return abs(low - high)

    assert gap(0.2) < gap(0.0) / 8


def test_the_axis_of_a_share_stays_between_0_and_1():
    for score in (0.03, 0.98):
        points = [Series("a", 0, [2.0], [score])]
        chart = scatter_chart(points, Axis("cost", str), Axis("score", str), {}, 0.5)
        marks = [float(mark) for mark in re.findall(r'text-anchor="end">([^<]+)</text>', chart)]
        assert len(marks) > 2
        assert min(marks) >= 0
        assert max(marks) <= 1


def test_labels_of_points_do_not_cover_each_other_or_other_points():
    places = [(200.0, 100.0), (210.0, 102.0), (205.0, 110.0), (430.0, 100.0), (60.0, 230.0)]
    names = ["self", "external", "gating", "multihead-external", "less"]
    labels = place_labels(places, names)
    boxes = [(a, b - 9, a + 7 * len(name), b + 3) for (a, b), name in zip(labels, names)]
    dots = [(a - 4, b - 4, a + 4, b + 4) for a, b in places]
    for (l, t, r, b), (l2, t2, r2, b2) in combinations([*boxes, *dots], 2):
        if not {(l, t, r, b), (l2, t2, r2, b2)} <= set(dots):
            assert r <= l2 or r2 <= l or b <= t2 or b2 <= t
    assert all(l >= 50 and r <= 440 for l, _, r, _ in boxes)


def test_a_baseline_is_a_line_or_an_arrow_to_where_it_lies():
    points = [Series("a", 0, [2.0], [0.5])]
    chart = scatter_chart(
        points, Axis("cost", str), Axis("score", str), {"near": 0.51, "above": 0.97, "below": 0.1}, 0.1
    )
    assert chart.count('class="level"') == 1
    assert ">near 0.51<" in chart
    (above,) = re.findall(r' y="([^"]+)" text-anchor="end">above 0.97 ↑<', chart)
    (below,) = re.findall(r' y="([^"]+)" text-anchor="end">below 0.1 ↓<', chart)
    assert float(above) < float(below)


def test_each_variant_is_compared_with_the_reference(results: Results, tmp_path: Path):
    many = sharper(results, 2_000)
    (row,) = many.difference_table()
    found = many.difference(many.variants[1], many.variants[0])
    assert (row["variant"], row["reference"], row["difference"]) == ("external", "self", found.value)
    assert (row["low"], row["high"], row["p"]) == (*found.interval(), found.probability)
    many.save(tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text())["differences"] == [row]
    assert "Advantage in accuracy over self" in write_report(many, tmp_path / "report.html").read_text()
    blind = replace(one_seed(results), sampling=None)
    assert blind.difference_table() == []


def test_other_metrics_are_means_over_seeds_in_a_table_of_their_own(results: Results):
    first = results.variants[0]
    runs = [
        replace(run, metrics={"recall of map_f1": 0.25, "macro_f1": 0.5 + 0.1 * i}) for i, run in enumerate(first.runs)
    ]
    table = metrics_of(replace(results, variants=[replace(first, runs=runs[:2]), *results.variants[1:]]))
    assert table is not None
    assert [heading.text for heading in table.headings] == ["macro F1", "recall of map_f1"]
    assert [cell.text for cell in table.rows[0].cells] == ["0.5500", "0.2500"]
    assert [cell.text for cell in table.rows[1].cells] == ["–", "–"]
    assert table.title == "Other metrics, means over the seeds"


def test_results_of_an_older_version_have_no_other_metrics(results: Results, tmp_path: Path):
    results.save(tmp_path / "results.json")
    plain = json.loads((tmp_path / "results.json").read_text())
    for one in (run for variant in plain["variants"] for run in variant["runs"]):
        del one["metrics"]
    (tmp_path / "results.json").write_text(json.dumps(plain))
    older = load_results(tmp_path / "results.json")
    assert older.variants == results.variants
    assert metrics_of(older) is None
    assert "Other metrics" not in write_report(older, tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("instance_miou", "instance mIoU"),
        ("balanced_accuracy", "balanced accuracy"),
        ("class_iou of sea", "IoU of sea"),
        ("box_per_class of my_map", "box mAP of my_map"),
        ("top5", "top-5"),
    ],
)
def test_metrics_have_their_usual_names(key: str, name: str) -> None:
    assert metric_name(key) == name


@pytest.mark.parametrize(
    ("points", "told"),
    [
        ((3, 3), "has converged: self, external. See the curves of the training loss, or give more --epochs."),
        ((4, 3), "has converged: external. See the curves of the training loss, or give more --epochs."),
        # Without validation samples more epochs would not help.
        ((0, 0), "has converged: self, external. See the curves of the training loss, or hold out samples with"),
        ((4, 4), None),
    ],
)
def test_few_validation_scores_do_not_show_whether_a_network_still_learns(
    results: Results, points: tuple[int, int], told: str | None
) -> None:
    changed = [
        replace(v, runs=[replace(run, score_curve=Curve([1.0] * n, [1.0] * n, [0.5] * n)) for run in v.runs])
        for v, n in zip(results.variants, points)
    ]
    listed = [note for note in uncertainty(replace(results, variants=[*changed, results.variants[2]])) if "Few" in note]
    assert len(listed) == (told is not None)
    assert told is None or told in listed[0]


def test_confusion_says_what_was_taken_for_what(results: Results, tmp_path: Path):
    first = replace(results.variants[0], runs=[replace(results.variants[0].runs[0], confusion=[[3, 1], [0, 4]])])
    one = replace(results, variants=[first], classes=["cat", "dog"], examples=[])
    text = write_report(one, tmp_path / "report.html").read_text()
    assert '<td class="wrong l5" title="cat taken for dog: 1 of 4">1</td>' in text
    assert '<td class="right l10" title="dog taken for dog: 4 of 4">4</td>' in text
    assert "dog taken for cat" not in text


def test_the_table_of_a_terminal_loses_no_character(results: Results):
    long = replace(results.variants[0], name="my_layers:AnAttentionWithAName" + "LongerThanATerminal" * 2)
    said = io.StringIO()
    Console(file=said, width=80).print(table_of(replace(results, variants=[long, *results.variants[1:]])).rich())
    assert "…" not in said.getvalue()
    assert "0.8200 ± 0.0283" in said.getvalue()
