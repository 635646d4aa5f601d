"""The ledger is what the kept results say, and its verdicts follow the rule that it states."""

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenmix.errors import UserError
from tokenmix.lab.compare.compare import compare
from tokenmix.lab.compare.variants import plan_runs
from tokenmix.lab.registry import DATA_SETS
from tokenmix.lab.train.plan import check_config
from tokenmix.lab.train.sources import list_comparisons, load_comparison
from tokenmix.layers import MIXERS, MultiHeadExternalAttention
from tokenmix.testing.probe_tasks import TASKS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    import recipes.claims

    return recipes.claims


def test_the_page_is_made_from_the_results(claims: Any) -> None:
    assert claims.page() == claims.PAGE.read_text(), "make it again: python -m recipes.claims"


def test_every_row_is_of_a_comparison_that_has_both_sides(claims: Any) -> None:
    for claim in claims.CLAIMS:
        for row in claim["rows"]:
            if row["comparison"].startswith("probe "):
                assert row["comparison"].removeprefix("probe ") in TASKS
                assert {row["a"], row["b"]} <= {*MIXERS, *import_module("recipes.probe_seeds").OTHERS}, row
                continue
            name, _, kind = row["comparison"].partition(" ")
            assert kind in ("", "accuracy")
            if name.startswith("compare_"):
                config = load_comparison(name)
                names = {cell.folder.name.rpartition("-seed")[0] for cell in plan_runs(config, Path())}
            elif (kept := claims.document(row["comparison"])) is None:
                continue
            else:
                names = {variant["name"] for variant in kept["variants"]}
            assert {row["a"], row["b"]} <= names, row


@pytest.mark.parametrize("name", list_comparisons())
def test_a_comparison_can_be_run(name: str) -> None:
    config = load_comparison(name)
    assert config.data.data.partition(":")[0] in DATA_SETS
    for cell in plan_runs(config, Path()):
        check_config(cell.config)


def document(a: list[float], b: list[float], higher: bool = True) -> dict[str, Any]:
    """A kept result of two variants, without predictions."""
    runs = [[{"seed": i, "folder": f"{i}", "score": score} for i, score in enumerate(scores)] for scores in (a, b)]
    variants = [{"name": name, "runs": some} for name, some in zip("ab", runs)]
    return {"higher": higher, "samplings": [], "variants": variants}


def verdict(claims: Any, a: list[float], b: list[float], higher: bool = True, **row: Any) -> str:
    found = claims.judge(
        [{"comparison": "compare_c", "a": "a", "b": "b", **row}], {"compare_c": document(a, b, higher)}
    )
    return found[0].verdict


def test_verdicts(claims: Any) -> None:
    runs = [0.85, 0.86, 0.87]
    better = [x + 0.03 for x in runs]
    # The standard error is 0.00816, Student's t with 4 degrees of freedom 2.776.
    assert verdict(claims, better, runs) == "agrees"
    assert verdict(claims, runs, better) == "disagrees"
    assert verdict(claims, runs, better, higher=False) == "agrees"
    assert verdict(claims, [x + 0.02 for x in runs], runs) == "cannot tell"
    assert verdict(claims, runs, runs, effect=0.05) == "not seen"
    assert verdict(claims, [x + 0.02 for x in runs], runs, effect=0.04) == "cannot tell"
    assert verdict(claims, runs, runs, effect=0.01) == "cannot tell"
    assert verdict(claims, [], runs) == "not yet run"


def test_worse_by_less_than_a_margin(claims: Any) -> None:
    runs = [0.85, 0.86, 0.87]
    assert verdict(claims, runs, runs, non_inferior=0.03) == "agrees"
    assert verdict(claims, runs, runs, non_inferior=0.02) == "cannot tell"
    assert verdict(claims, [x + 0.03 for x in runs], runs, non_inferior=0.001) == "agrees"
    assert verdict(claims, [x - 0.04 for x in runs], runs, non_inferior=0.01) == "disagrees"
    assert verdict(claims, [x - 0.03 for x in runs], runs, non_inferior=0.01) == "cannot tell"


def test_margins_are_small_beside_what_mixing_gains(claims: Any) -> None:
    for row in (
        row for claim in claims.CLAIMS for row in claim["rows"] if row["b"] == "self" and "non_inferior" in row
    ):
        found = claims.document(row["comparison"])
        gain = claims.scores_of(found, ["self"])["self"] - max(claims.scores_of(found, claims.CONTROLS).values())
        assert row["non_inferior"] <= gain / 4, row


def test_perplexities_are_compared_in_logarithms(claims: Any) -> None:
    """Also their covariance under the draw of the samples: 1 % of the score, the same in all runs of a variant."""
    a, b = [20.0, 22.0], [40.0, 44.0]
    found = {**document(a, b, higher=False), "metric": "perplexity"}
    for runs in found["variants"]:
        for run in runs["runs"]:
            run["folder"] = runs["name"] + run["folder"]
    alone, means = claims.difference_of(found, "a", "b")
    assert alone.value == pytest.approx(np.log(2))
    assert means == (21.0, 42.0)
    spread = 0.01 * np.array([[*a, 0, 0], [0, 0, *b]])
    drawn = {"samples": 9, "runs": ["a0", "a1", "b0", "b1"], "covariance": (spread.T @ spread).tolist()}
    sampled, _ = claims.difference_of({**found, "samplings": [drawn]}, "a", "b")
    assert sampled.value == pytest.approx(np.log(2))
    assert sampled.sample_variance == pytest.approx(2 * 0.01**2)


def test_the_same_runs_by_plain_accuracy(claims: Any) -> None:
    """Most drawings are of one class, of which gates answer fewer; balanced accuracy has another order."""
    balanced, plain = (claims.document(f"compare_emoji{kind}") for kind in ("", " accuracy"))
    for found, sign in ((balanced, 1), (plain, -1)):
        gap, means = claims.difference_of(found, "gating", "self")
        assert gap.value * sign > 0
        assert means[0] - means[1] == pytest.approx(gap.value)
    assert plain["metric"] == "accuracy"
    assert set(plain["baselines"]) == {"majority"}


def test_several_rows_of_a_claim_are_adjusted(claims: Any) -> None:
    runs = [0.85, 0.86, 0.87]
    row = {"comparison": "compare_c", "a": "a", "b": "b"}
    documents = {"compare_c": document([x + 0.023 for x in runs], runs)}
    assert claims.judge([row], documents)[0].verdict == "agrees"
    assert [one.verdict for one in claims.judge([row, row], documents)] == ["cannot tell"] * 2
    assert [one.verdict for one in claims.judge([row, {**row, "non_inferior": 0.001}], documents)] == [
        "cannot tell"
    ] * 2


def test_the_verdict_on_a_claim(claims: Any) -> None:
    runs = [0.85, 0.86, 0.87]
    better = {"comparison": "compare_better", "a": "a", "b": "b"}
    worse, same = {**better, "comparison": "compare_worse"}, {**better, "comparison": "compare_same"}
    many = {**better, "comparison": "compare_many"}
    documents = {
        "compare_better": document([x + 0.05 for x in runs], runs),
        "compare_worse": document([x - 0.05 for x in runs], runs),
        "compare_same": document(runs, runs),
        "compare_many": document([x + 0.05 for x in runs * 4], runs * 4),
    }

    def told(*rows: dict[str, Any]) -> tuple[str, bool]:
        return claims.verdict_of(claims.judge(rows, documents))

    assert told(better, same) == ("agrees", False)
    assert told(many, same) == ("agrees", True)
    assert told(better, worse) == ("mixed", False)
    assert told(many, {**same, "effect": 0.06}) == ("mixed", False)
    assert told(worse, {**same, "effect": 0.06}) == ("disagrees", False)
    assert told(same) == ("cannot tell", False)
    assert claims.verdict_of(claims.judge([better], {"compare_better": None})) == ("not yet run", False)


def test_power_is_that_of_a_t_test(claims: Any) -> None:
    found = claims.difference_of(document([0.85, 0.86, 0.87], [0.85, 0.86, 0.87]), "a", "b")[0]
    assert claims.power_at(found, found.detectable, 0.05) == pytest.approx(0.8, abs=0.02)
    assert claims.power_at(found, 0.0, 0.05) == pytest.approx(0.05)
    assert claims.power_at(found, 0.0, 0.01) == pytest.approx(0.01)
    assert claims.power_at(found, 7.8 * found.error, 0.05 / 11) == pytest.approx(0.86, abs=0.01), "scipy has nan"


def test_the_page_names_the_seeds_that_were_run(claims: Any) -> None:
    runs = [{"seed": seed} for seed in (1, 0)]
    found = {"variants": [{"runs": runs}, {"runs": runs}]}
    assert claims._fewer_seeds("compare_pair_variants", found) == "with --seeds 0,1"
    assert claims._fewer_seeds("probe recall", found) == ""


def test_a_comparison_is_kept_and_read_back(claims: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "compare_toy.toml"
    file.write_text(
        'data = "digits"\nepochs = 1\nlimit = 64\nlimit_eval = 50\nseeds = [0, 1]\nbatch_size = 32\ndevice = "cpu"\n'
        'mixers = ["self"]\nmodel_kwargs = {patch_size = 4, depth = 1, embed_dim = 16, num_heads = 2}\n'
        '[variants.S-4]\nlr = 1e-3\nmodel_kwargs = {mixer = "external", mixer_kwargs = {num_slots = 4}}\n'
    )
    found = compare(config=file, out=tmp_path / "out", jobs=0, threads=1, quiet=True)
    assert [variant.name for variant in found.results.variants] == ["self", "identity", "S-4"]
    assert found.results.variants[2].learning_rate == 1e-3
    assert f"--config {file}" in found.results.command
    assert "--model-kwargs" not in found.results.command
    monkeypatch.setattr(claims, "file_of", lambda name: tmp_path / f"{name}.json")
    claims.document.cache_clear()
    assert claims.keep(tmp_path / "out") == tmp_path / "compare_toy.json"
    a, b = (found.results.variant(name) for name in ("self", "S-4"))
    kept = claims.difference_of(claims.document("compare_toy"), "self", "S-4")[0]
    assert kept == found.results.difference(a, b)
    with np.load(tmp_path / "compare_toy.npz") as columns:
        for variant in found.results.variants:
            for run in variant.runs:
                right = columns["label"] == columns[f"{run.folder}/predicted"]
                assert run.score == pytest.approx(right.mean())
        assert len(columns["index"]) == 50
        assert {name.rpartition("/")[2] for name in columns} == {"index", "label", "predicted"}
    for part in ("first", "second"):
        shutil.copytree(tmp_path / "out", tmp_path / "both" / part)
    claims.document.cache_clear()
    claims.keep(tmp_path / "both")
    both = claims.difference_of(claims.document("compare_toy"), "self", "S-4")[0]
    assert both.value == pytest.approx(kept.value)
    assert both.error == pytest.approx(kept.error / 2**0.5)
    with np.load(tmp_path / "compare_toy.npz") as columns:
        assert {f"{part}/runs/self-seed0/predicted" for part in ("first", "second")} <= {*columns}
    claims.document.cache_clear()


def test_parts_with_other_test_samples_are_averaged(claims: Any) -> None:
    """Their levels differ, which says nothing on the difference; each part has half of the weight."""
    rng, found = np.random.default_rng(0), []
    for part, level in (("x", 0.4), ("y", 0.6)):
        runs = [f"{part}/runs/{name}-seed{i}" for name in "ab" for i in range(3)]
        covariance = np.diag(rng.uniform(1e-5, 2e-5, 6)) + 1e-4
        scores = level + np.repeat([0.03, 0.0], 3) + rng.normal(0, 0.01, 6)
        found.append((runs, scores, {"samples": 9, "runs": runs, "covariance": covariance.tolist()}))
    variants = [
        {
            "name": name,
            "runs": [{"seed": i, "folder": runs[k + i], "score": s[k + i]} for runs, s, _ in found for i in range(3)],
        }
        for name, k in (("a", 0), ("b", 3))
    ]
    samplings = [one for *_, one in found]
    both, means = claims.difference_of({"higher": True, "samplings": samplings, "variants": variants}, "a", "b")
    halves = [claims.difference(s[:3], s[3:], np.array(one["covariance"]), 9) for _, s, one in found]
    assert both.value == pytest.approx(means[0] - means[1]) == pytest.approx(np.mean([h.value for h in halves]))
    assert both.error**2 == pytest.approx(sum(h.error**2 for h in halves) / 4)
    assert (both.seeds, both.samples) == ((6, 6), 17)


def test_of_predictions_a_metric_s_columns_are_kept(claims: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.arange(2)
    rows = (
        {"index": index, "counts": torch.ones(2, 3, 7), "loss": torch.ones(2)},
        {"index": index + 1, "confidence": index},
    )
    monkeypatch.setattr(claims, "read_predictions", lambda run: dict(zip("ab", rows))[run.name])
    assert {*claims.predictions_of(Path(), "ab")} == {"index", "a/counts", "a/loss", "b/index"}


def test_a_folder_without_results_is_named(claims: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no results"):
        claims.main(claims.Args((tmp_path,)))


def test_a_kept_result_says_which_options_were_changed(claims: Any) -> None:
    command = "tokenmix compare --config compare_pairs --seeds 0,1 --epochs 2 --out runs/a --threads 1 --tune none"
    assert claims.other_options(command) == "with --epochs 2 --tune none"
    assert claims.other_options("tokenmix compare --config compare_pairs --jobs 2") == ""


def test_the_probe_of_the_ledger_goes_on_where_it_stopped(
    claims: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = import_module("recipes.probe_seeds")
    asked: list[tuple[Any, int]] = []

    def train_one(target: Any, task: Any, seed: int, *, steps: int) -> dict[str, torch.Tensor]:
        if len(asked) == 12:
            raise KeyboardInterrupt
        asked.append((target, seed))
        return {task.name: torch.tensor([[1, seed % 3, 0], [2, 2, 1]])}

    monkeypatch.setattr(seeds, "RESULTS", tmp_path / "seeds.npz")
    monkeypatch.setattr(claims, "PROBE", tmp_path / "seeds.npz")
    monkeypatch.setattr(seeds, "train_one", train_one)
    rows = [{"comparison": "probe recall", "a": "self", "b": "one-head-external"}]
    monkeypatch.setattr(seeds, "CLAIMS", [{"rows": rows}])
    args = seeds.Args(runs=tmp_path / "runs")
    with pytest.raises(KeyboardInterrupt):
        seeds.main(args)
    asked.append(("", 0))
    seeds.main(args)
    assert asked.pop(12) == ("", 0)
    assert asked == [(target, seed) for seed in range(10) for target in ("identity", seeds.OneHead, "self")]
    block, x = seeds.OneHead(64), torch.randn(2, 5, 64)
    assert block.query.out_features == 4 * 64
    assert block(x).shape == x.shape
    assert block.attention_map(x).shape == (2, 1, 5, 64)
    assert block.macs(5) == MultiHeadExternalAttention(64, num_heads=4).macs(5)
    seeds.main(args)
    assert len(asked) == 30
    found = claims.probed("recall")
    assert [run["score"] for run in found["variants"][0]["runs"]] == pytest.approx([0.2, 0.4, 0.6] * 3 + [0.2])
    # Without the sample that it never has right, a score of 3/5 would be 3/4.
    (sampling,) = found["samplings"]
    right, positions = np.array([1, 2, 0]), np.array([2, 2, 1])
    without = np.array([(3 - right[i]) / (5 - positions[i]) for i in range(3)])
    jackknife = 2 / 3 * ((without - without.mean()) ** 2).sum()
    place = sampling["runs"].index("recall/self-seed2")
    assert sampling["covariance"][place, place] == pytest.approx(jackknife, rel=0.5)
    assert claims.difference_of(found, "self", "identity")[0].samples == 3
    assert claims.probed("copy") is None
