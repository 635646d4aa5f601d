"""Comparisons on any task: what varies, what it is held against, and what a caller gets."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tokenmix
from tokenmix.errors import UserError
from tokenmix.lab.cli.command import parse
from tokenmix.lab.compare.baselines import by_sklearn, fit_baselines, frequencies, nearest_mean
from tokenmix.lab.compare.costs import skeleton_of
from tokenmix.lab.compare.report import ComparisonResult
from tokenmix.lab.compare.results import load_results
from tokenmix.lab.compare.variants import plan_variants, reference_of
from tokenmix.lab.registry import RECIPES
from tokenmix.lab.train.config import CompareConfig, comparison_config
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.sources import load_comparison, make_config
from tokenmix.trust import typed

pytestmark = pytest.mark.usefixtures("few_tokens")
ROWS = ["none", "self", "external"]


@pytest.mark.parametrize(
    ("task", "changes", "names"),
    [
        ("image-classification", {"mixers": ("self", "external")}, ["self", "external", "identity"]),
        ("image-classification", {"mixers": ("self",), "controls": False}, ["self"]),
        (
            "image-classification",
            {"model": "vit_tiny_patch16_224", "mixers": ("external",)},
            ["original", "external", "identity"],
        ),
        (
            "image-classification",
            {"model": "vit_tiny_patch16_224", "mixers": ("external",), "controls": False},
            ["original", "external"],
        ),
        (
            "image-classification",
            {"model": "resnet18", "insert_after": "layer3", "controls": True},
            [*ROWS, "identity"],
        ),
        ("image-classification", {"model": "resnet18", "insert_after": "layer3"}, ROWS),
        ("semantic-segmentation", {"mixers": ("none", "self")}, ["none", "self"]),
        ("point-classification", {}, ["self", "external", "identity"]),
        ("text-classification", {"mixers": ("external",)}, ["original", "external", "identity"]),
    ],
)
def test_a_variant_is_a_name_and_the_options_that_differ(task: str, changes: dict[str, Any], names: list[str]) -> None:
    if "insert_after" in changes:
        changes = {"mixers": ("self", "external"), "controls": False, **changes}
    config = comparison_config(task, data="digits", **changes)
    found = plan_variants(config)
    assert list(found) == names
    for name, options in found.items():
        given = {"swap": options.get("swap"), "insert": options.get("insert")}
        given["mixer"] = options.get("model_kwargs", {}).get("mixer")
        expected = None if name == "original" or ("insert_after" in changes and name == "none") else name
        assert [value for value in given.values() if value is not None] == ([] if expected is None else [expected])


def test_a_control_without_weights_is_trained_where_only_mixers_are() -> None:
    swapped = CompareConfig().replace(model="vit_tiny_patch16_224", mixers=("external",), train_only="mixers")
    trained = {name: options.get("train_only", "all") for name, options in plan_variants(swapped).items()}
    assert trained == {"original": "all", "external": "mixers", "identity": "all"}
    # An inserted block has weights around its mixer.
    inserted = plan_variants(swapped.replace(insert_after="blocks.1"))
    assert {options.get("train_only") for options in inserted.values()} == {None, "mixers"}


def test_places_that_a_model_with_an_argument_mixer_does_not_have_are_refused() -> None:
    with pytest.raises(UserError, match="mixer_nano has an argument mixer; leave it out"):
        plan_variants(CompareConfig().replace(swap_where="blocks.1*"))


def build_with(num_classes: int, mixer: str = "self") -> nn.Module:
    return nn.Linear(num_classes, num_classes)


def build_without(num_classes: int) -> nn.Module:
    return nn.Linear(num_classes, num_classes)


def test_a_function_with_an_argument_mixer_gets_the_mixer_there() -> None:
    for function, chosen in ((build_with, {"model_kwargs": {"mixer": "gating"}}), (build_without, {"swap": "gating"})):
        name = f"{__name__}:{function.__name__}"
        with typed(name):
            variants = plan_variants(CompareConfig().replace(model=name, mixers=("gating",)))
        assert variants["gating"].items() >= chosen.items()


def test_a_run_to_start_from_brings_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)
    teacher = str(RECIPES / "classification" / "swap_teacher")
    config = parse(["compare", "--init-from", teacher]).config
    assert (config.model.model, config.model.model_kwargs["depth"]) == ("vit_tiny_r_s16_p8_224", 4)
    assert parse(["compare", "--init-from", teacher, "--model", "mixer_nano"]).config.model.model == "mixer_nano"
    assert next(iter(plan_variants(load_comparison("compare_swap")))) == "original", "the file names that run"
    # Of another task nothing is taken.
    assert parse(["compare", "masked-lm", "--init-from", teacher]).config.model.model == "bert_text_nano"


def test_others_are_compared_with_self_attention_or_the_model_as_it_is() -> None:
    assert reference_of(["external", "self", "original"]) == "self"
    assert reference_of(["original", "external"]) == "original"
    assert reference_of(["external", "gating"]) == "external"
    assert reference_of(["none", "self", "identity"], inserted=True) == "none"


def test_the_task_comes_first_and_brings_its_options() -> None:
    config = parse(["compare", "masked-lm", "--mixers", "external", "--seq-len", "16", "--data", "text:x"]).config
    assert (config.task, config.model.model, config.options.seq_len) == ("masked-lm", "bert_text_nano", 16)
    assert parse(["compare"]).config == CompareConfig()
    with pytest.raises(UserError, match="image-clasification"):
        parse(["compare", "image-clasification"])


def test_what_cannot_be_compared_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"two networks that learn against each other.*tokenmix train"):
        tokenmix.compare(task="image-generation", data="digits", mixers=["self"], quiet=True)
    with pytest.raises(UserError, match="no data given; give --data"):
        tokenmix.compare(task="detection", mixers=["none"], quiet=True)


def test_frequencies_are_those_of_the_training_targets() -> None:
    predict = frequencies(None, torch.tensor([0, 2, 2, 2]), 3)
    logs = predict(None, torch.zeros(5, 4, 4, dtype=torch.long))
    assert logs.shape == (5, 3, 4, 4)
    assert logs[0, 2, 0, 0].exp().item() == pytest.approx(3 / 4, abs=1e-4)
    assert math.isfinite(logs.min().item())


def test_a_baseline_learns_from_every_training_sample(tmp_path: Path) -> None:
    rows = [f"text {i},{'pos' if i % 3 else 'neg'}" for i in range(170)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *rows]))
    config = make_config("text-classification", data=f"csv:{tmp_path}/a.csv#text,label", seq_len=8, vocab_size=300)
    data: Any = config.task_class.load_data(config)
    seen = torch.cat([batch["index"] for batch in data.batches_of("train", 128)])
    assert sorted(seen.tolist()) == list(range(data.num_train))


def test_a_file_without_a_task_is_of_the_task_that_is_typed(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('data = "trees"\nmin_size = 64\n')
    command: Any = parse(["compare", "detection", "--config", str(tmp_path / "c.toml")])
    assert (command.config.task, command.config.options.min_size) == ("detection", (64,))
    with pytest.raises(UserError, match="is for semantic-segmentation, got the task detection; leave the task out"):
        parse(["compare", "detection", "--config", "compare_climates"])


def test_a_baseline_that_cannot_be_fitted_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(data="digits", limit=1, limit_eval=20, validation=0)
    data = config.task_class.load_data(config)
    task = config.task_class(nn.Identity(), config, data.describe())
    assert list(fit_baselines(task, data)) == ["majority", "random forest"]
    assert "the baseline logistic regression is left out" in capsys.readouterr().err


@pytest.mark.parametrize("classes", [3, 30])
def test_a_forest_of_few_or_many_classes_finds_each(classes: int) -> None:
    labels = torch.arange(classes).repeat(4)
    features = torch.stack([labels.float(), -labels.float()], 1)
    found = by_sklearn("random forest", features, labels, classes)(features, labels)
    assert torch.equal(found.argmax(1), labels)


def test_a_forest_of_many_samples_and_classes_has_fewer_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("sklearn.ensemble.ExtraTreesClassifier.fit", lambda forest, *_: made.append(forest))
    for samples, classes in ((10_000, 1000), (40, 30)):
        by_sklearn("random forest", torch.zeros(samples, 1), torch.zeros(samples), classes)
    assert [forest.n_estimators for forest in made] == [5, 200]


def test_nearest_mean_finds_the_class_of_the_nearest_centre() -> None:
    features = torch.tensor([[0.0, 0.0], [0.0, 1.0], [10.0, 0.0], [10.0, 1.0]])
    predict = nearest_mean(features, torch.tensor([0, 0, 2, 2]), 3)
    answers = predict(torch.tensor([[1.0, 0.5], [9.0, 0.5]]), torch.zeros(2))
    assert answers.argmax(-1).tolist() == [0, 2]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ComparisonResult:
    folder = tmp_path_factory.mktemp("text")
    rng, words = np.random.default_rng(0), ["the", "cat", "dog", "sat", "red", "blue"]
    with (folder / "t.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for _ in range(200):
            said = list(rng.choice(words, 5))
            rows.writerow([" ".join(said), "yes" if "red" in said else "no"])
    return tokenmix.compare(
        task="text-classification",
        data=f"csv:{folder / 't.csv'}#text,label",
        mixers=["self", "external"],
        model_kwargs={"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16},
        max_steps=2,
        batch_size=16,
        device="cpu",
        jobs=0,
        out=folder / "out",
        quiet=True,
        vocab_size=300,
        seq_len=16,
    )


def test_text_is_compared_by_swaps_with_baselines_and_sentences(text: ComparisonResult) -> None:
    found = load_results(text.path / "results.json")
    assert found.variants == text.results.variants
    assert [variant.name for variant in found.variants] == ["original", "external", "identity"]
    assert found.same == ["self"], "it has the weights of the attention"
    assert found.reference == "original"
    assert list(found.baselines) == ["majority", "TF-IDF"]
    assert found.baselines["TF-IDF"] > 0.9 > found.baselines["majority"], "one word decides the label"
    task = load_task(text.path / found.variants[0].runs[0].folder)
    read, _ = next(task.plain_samples(type(task).load_data(task.config, like=task.data), "test"))
    assert {word for line in read for word in line.split()} <= {"the", "cat", "dog", "sat", "red", "blue"}
    assert all(variant.macs and variant.step_memory for variant in found.variants)
    page = (text.path / "report.html").read_text()
    assert "Test samples" in page
    assert "TF-IDF" in page


def test_a_caller_gets_tables_and_a_figure(text: ComparisonResult) -> None:
    assert text.best.name in ("original", "external", "identity")
    assert "<table>" in text._repr_html_()
    assert "TF-IDF" in str(text)
    assert len(repr(text)) < 1000
    assert text.best.name in repr(text)
    assert text.plot().axes[0].get_ylabel().startswith("test ")
    frame = pytest.importorskip("pandas") and text.to_pandas()
    assert list(frame["variant"]) == ["original", "external", "identity"]
    assert frame["macro_f1"].between(0, 1).all()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[variants.mine]\nlearning = 1", "unknown option of image-classification 'learning'"),
        ('[variants.mine]\nlr = "fast"', "lr='fast' must be a number"),
        ('[variants.mine]\nswap = "externl"', "unknown mixer 'externl'; did you mean external"),
        ("[variants.mine]\nmodel_kwargs = {depht = 3}", "mixer_nano' has no argument 'depht'"),
        ("[variants.mine]\nmodel_kwargs = 3", "model_kwargs=3 must be a table"),
        ("[variants.mine]\nmixup = 0.1\n[variants.other]\nlr = 0", "other.*lr must be a positive number"),
        ("[variants]\nmine = 3", r"it must be a table \[variants.NAME\]"),
        ('[variants.mine]\nout = "elsewhere"', "out must be equal for all variants; leave it out of this table"),
        ("[variants.mine]\nseed = 3", "seed must be equal for all variants"),
        ("[variants.mine]\nloop = {seed = 3}", "loop must be equal for all variants"),
        ('[variants.mine]\ndata = "fashion-mnist"', "data must be equal for all variants"),
        ('[variants.mine]\ntask = "masked-lm"', "task must be equal for all variants"),
        ("[variants.mine]\nmixers = 3", "has no option mixers|unknown option"),
    ],
)
def test_a_wrong_row_of_a_file_is_named_before_anything_is_written(tmp_path: Path, table: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'data = "digits"\nlimit = 64\nbatch_size = 16\nmax_steps = 1\ncontrols = false\n{table}\n')
    with pytest.raises(UserError, match=message) as raised:
        tokenmix.compare(config=file, out=tmp_path / "out", device="cpu", quiet=True)
    assert "[variants." in str(raised.value)
    assert "mine.toml" in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_a_row_and_a_mixer_have_two_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('data = "digits"\nmixers = ["self"]\n[variants.self]\nlr = 1e-2\n')
    with pytest.raises(UserError, match=r"\[variants.self\] of .*: one of the mixers has this name; give the variant"):
        tokenmix.compare(config=file, out=tmp_path / "out", quiet=True)


def test_the_width_in_a_report_is_that_of_the_tokens() -> None:
    """A gate works inside its mixer, on more channels."""
    model = tokenmix.create_model("mixer_nano", mixer="gating", embed_dim=32)
    task: Any = SimpleNamespace(model=model, data={})
    assert skeleton_of({"gating": task})["dim"] == 32
