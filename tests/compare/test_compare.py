import base64
import hashlib
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.metrics import balanced_accuracy_score

from tokenmix.errors import UserError
from tokenmix.files import one_writer
from tokenmix.lab.cli.command import parse
from tokenmix.lab.cli.listing import print_rows
from tokenmix.lab.cli.runs import Compare
from tokenmix.lab.compare import compare as comparing
from tokenmix.lab.compare import variants
from tokenmix.lab.compare.compare import compare, repeat_command
from tokenmix.lab.compare.report import choose_images
from tokenmix.lab.compare.results import load_results
from tokenmix.lab.compare.variants import plan_runs, read_run, read_sampling
from tokenmix.lab.data.indexed import IndexedDataset
from tokenmix.lab.grid import finish_cell, parallel_runs
from tokenmix.lab.tasks.classification.task import ImageClassification
from tokenmix.lab.train.checkpoint import save_weights
from tokenmix.lab.train.config import CompareConfig, TrainConfig
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.load import own_sources
from tokenmix.lab.train.metrics import Metric, read_predictions
from tokenmix.lab.train.run import evaluate
from tokenmix.lab.train.task import IndexedData

TINY = {"embed_dim": 16, "depth": 2, "num_heads": 2}


def small(out: Path, **changes: Any) -> CompareConfig:
    budget = {
        "data": "digits",
        "limit": 256,
        "limit_eval": 40,
        "epochs": 1,
        "batch_size": 32,
        "log_every": 2,
        "controls": False,
        "device": "cpu",
    }
    return CompareConfig().replace(
        **{**budget, "mixers": ("self", "external"), "model_kwargs": TINY, "out": out, **changes}
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compare(config=small(tmp_path_factory.mktemp("comparison") / "out", seeds=(0, 1)), quiet=True).path


def test_everything_is_there(finished: Path):
    results = load_results(finished / "results.json")
    assert [variant.name for variant in results.variants] == ["self", "external"]
    assert results.seen == 256
    for variant in results.variants:
        assert [run.seed for run in variant.runs] == [0, 1]
        assert {run.status for run in variant.runs} == {"finished"}
        assert [len(run.score_curve.values) for run in variant.runs] == [1, 1]
        assert len(variant.runs[0].loss_curve.values) >= 3
        assert sum(map(sum, variant.runs[0].confusion or [])) == 40
        assert variant.step_memory > variant.inference_memory > 0  # type: ignore[operator]
        assert variant.latency is not None
    assert {"report.html", "results.md", "results.json", "compare.json", "runs"} <= {p.name for p in finished.iterdir()}
    for variant in results.variants:
        assert variant.growth.tokens == [64, 256, 1024, 4096]
        assert min(variant.growth.seconds) > 0
        assert variant.growth.memory[0] < variant.growth.memory[-1]
    assert "attention maps" in (finished / "report.html").read_text().lower()
    assert set(results.examples[0].answers) == {"self", "external"}
    told = "Other metrics, means over the seeds"
    for page in ("report.html", "results.md"):
        text = (finished / page).read_text()
        assert all(name in text for name in (told, "balanced accuracy", "macro F1", "ECE", "recall of 9")), page


def test_a_second_comparison_in_the_same_folder_is_refused_while_the_first_runs(tmp_path: Path):
    with one_writer(tmp_path), pytest.raises(UserError, match=f"is being written by process {os.getpid()} on"):
        compare(config=small(tmp_path), quiet=True)


def test_a_refused_comparison_has_written_nothing(finished: Path):
    before = {path: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    stamps = {path: path.stat().st_mtime_ns for path in before}
    with one_writer(finished):
        during = {path.name for path in finished.iterdir()}
        # Threads may differ, so that the settings alone refuse nothing.
        with pytest.raises(UserError, match="is being written by process"):
            compare(config=small(finished, seeds=(0, 1), threads=2, log_every=7), quiet=True)
        assert {path.name for path in finished.iterdir()} == during
    assert {path: path.stat().st_mtime_ns for path in before} == stamps
    assert {path: path.read_bytes() for path in before} == before


def test_a_damaged_description_of_a_comparison_is_named(tmp_path: Path):
    (tmp_path / "compare.json").write_text('{"mixers": ["self"')
    with pytest.raises(UserError, match=r"compare\.json is damaged"):
        compare(config=small(tmp_path), quiet=True)


@pytest.mark.usefixtures("few_tokens")
def test_names_of_folders_and_classes_are_never_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "[/b]"
    colours = {"[/b]".replace("/", "|"): 0, "\x1b[31mred": 120, "[link=x]": 250}
    for name, grey in colours.items():
        for part, number in (("train", 8), ("test", 4)):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for i in range(number):
                Image.new("L", (16, 16), grey).save(tmp_path / "images" / part / name / f"{i}.png")
    changes = {"data": f"folder:{tmp_path / 'images'}", "limit": 24, "limit_eval": 12, "batch_size": 8, "seeds": (0,)}
    compare(config=small(folder, mixers=("self",), img_size=16, model_kwargs={**TINY, "patch_size": 4}, **changes))
    assert f"report: {folder / 'report.html'}" in capsys.readouterr().out
    page = (folder / "report.html").read_text()
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert "default-src 'none'; img-src data:; style-src 'sha256-" in page
    assert f"script-src 'sha256-{digest}'" in page
    print_rows([{"label": name} for name in colours])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("[|b]", "\\x1b[31mred", "[link=x]"))


OWN = """
from tokenmix.layers import Capabilities, Mixer
class Still(Mixer):
    capabilities = Capabilities(map=None, mask=False, equivariant=True, linear=True, causal=True)
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
    def forward(self, x, mask=None):
        return x
    def macs(self, num_tokens):
        return 0
"""


@pytest.mark.usefixtures("few_tokens")
def test_runs_of_old_code_and_old_data_are_not_mixed_with_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(tmp_path))
    (code := tmp_path / "own_still.py").write_text(OWN)
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(12):
            Image.new("L", (60, 60), 10 * i).save(tmp_path / "images" / name / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    changes = {"data": "folder:images", "limit": None, "limit_eval": None, "batch_size": 8}
    model = {"img_size": 16, "model_kwargs": {**TINY, "patch_size": 8}}
    call = {"seeds": (0,), "mixers": ("own_still:Still",), **changes, **model}
    out = compare(config=small(tmp_path / "out", **call), quiet=True).path
    assert capsys.readouterr() == ("", ""), "not even that photographs are scaled down"
    found = compare(config=small(out, **{**call, "seeds": (0, 1), "data": f"folder:{tmp_path}/images"}), quiet=True)
    assert [run.seed for run in found.results.variants[0].runs] == [0, 1], "the same data by another path goes on"
    (drawn,) = out.glob("runs/*-seed1/data.json")
    described = json.loads(drawn.read_text())
    drawn.write_text(json.dumps({**described, "mean": [0.123] * len(described["mean"])}))
    compare(config=small(out, **{**call, "seeds": (0, 1)}), quiet=True)  # A seed may draw other scenes.
    before = (out / "results.json").read_bytes()
    code.write_text(OWN.replace("return x", "return 2 * x"))
    with pytest.raises(UserError, match=r"the module own_still changed since .*; give another --out"):
        compare(config=small(out, **{**call, "seeds": (0, 1, 2)}), quiet=True)
    code.write_text(f"import math\n{OWN}\n# A note, and another mixer.\nclass Next(Still):\n    pass\n")
    for name in ("a", "b"):
        Image.new("L", (16, 16), 7).save(tmp_path / "images" / name / "new.png")
    for more in ({"mixers": ("self", "own_still:Still")}, {"seeds": (2, 0)}):
        with pytest.raises(UserError, match=r"the data changed since .* differ\); give another --out"):
            compare(config=small(out, **{**call, **more}), quiet=True)
    assert (out / "results.json").read_bytes() == before


@pytest.mark.usefixtures("few_tokens")
def test_a_finished_run_is_not_described_by_changed_options(tmp_path: Path):
    call = {"mixers": (), "limit": 64, "variants": {"slow": {"lr": 1e-9}}}
    compare(config=small(tmp_path / "out", **call), quiet=True)
    compare(config=small(tmp_path / "out", **{**call, "seeds": (0, 1)}), quiet=True)
    changed = {**call, "variants": {"slow": {"lr": 2e-3}, "fast": {}}}
    for only in ((), ("fast*",)):
        with pytest.raises(UserError, match=r"slow-seed0 holds a run with lr=1e-09 instead of 0\.002; remove it"):
            compare(config=small(tmp_path / "out", **changed, only=only), quiet=True)


def test_runs_with_other_test_samples_are_not_paired(finished: Path, monkeypatch: pytest.MonkeyPatch):
    cells = plan_runs(small(finished), finished)
    runs = [(cell, read_run(cell, "", "accuracy", finished)) for cell in cells]
    assert read_sampling(runs, "accuracy", "images") is not None
    before = variants.read_predictions

    def drawn_again(folder: Path) -> Any:
        rows = before(folder)
        return rows if "self" in folder.name else {**rows, "label": rows["label"].roll(1)}

    monkeypatch.setattr(variants, "read_predictions", drawn_again)
    with pytest.raises(UserError, match=r"external-seed0 was tested on other samples than .*self-seed0: their labels"):
        read_sampling(runs, "accuracy", "images")


def test_code_of_the_main_program_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its definitions, not its calls."""
    own = OWN.replace("return x", "out = x\n        return out")
    (file := tmp_path / "script.py").write_text(f"{own}\nout = 1")
    spec = importlib.util.spec_from_file_location("__main__", file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(main := importlib.util.module_from_spec(spec))
    monkeypatch.setitem(sys.modules, "__main__", main)
    task: Any = SimpleNamespace(model=torch.nn.Sequential(main.Still(4)), config={})
    before = own_sources(task)
    file.write_text(f"{own}\nout = 2")
    assert own_sources(task) == before != {}, "another variable than the method's"
    main.Still.__module__ = "__mp_main__"
    assert own_sources(task) == before, "the same in a process of its own"
    file.write_text(f"{own.replace('out = x', 'out = 2 * x')}\nout = 1")
    after = own_sources(task)
    assert after.keys() == before.keys()
    assert after != before


LATE = """
from tokenmix.layers import Capabilities, Mixer

class Late(Mixer):
    capabilities = Capabilities(map=None)
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
    def forward(self, x, mask=None):
        if x.requires_grad and len(x) > 8:
            x.register_hook(self.fail)
        return x * 1
    def fail(self, gradient):
        raise RuntimeError("late failure")
    def macs(self, num_tokens):
        return 0
"""


@pytest.mark.usefixtures("few_tokens")
def test_a_mixer_that_fails_in_its_first_training_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_late.py").write_text(LATE)
    with pytest.raises(
        UserError, match="own_late:Late fails in a training step: RuntimeError: late failure; correct it"
    ):
        compare(config=small(tmp_path / "out", mixers=("own_late:Late",)), quiet=True)
    assert not (tmp_path / "out" / "results.json").exists()


def test_variants_differ_only_in_their_mixer(finished: Path):
    configs = [
        json.loads((finished / "runs" / f"{m}-seed1" / "config.json").read_text())["config"]
        for m in ("self", "external")
    ]
    configs = [{k: v for part in c.values() if isinstance(part, dict) for k, v in part.items()} for c in configs]
    differing = {key for key in configs[0] if configs[0][key] != configs[1][key]}
    assert differing == {"model_kwargs", "out"}
    assert {**configs[0]["model_kwargs"], "mixer": "external"} == configs[1]["model_kwargs"]


def test_the_same_command_repeats_nothing_and_a_mixer_can_be_added(finished: Path, monkeypatch: pytest.MonkeyPatch):
    files = sorted(finished.glob("runs/*/result.json"))
    before = [file.stat().st_mtime_ns for file in files]
    compare(config=small(finished, seeds=(0, 1), mixers=("self", "external", "gating")), quiet=True)
    assert [file.stat().st_mtime_ns for file in files] == before
    assert [variant.name for variant in load_results(finished / "results.json").variants] == [
        "self",
        "external",
        "gating",
    ]
    measured: list[int] = []
    real = comparing.measure_variants
    monkeypatch.setattr(comparing, "measure_variants", lambda *a: measured.append(torch.get_num_threads()) or real(*a))
    told: list[str] = []
    monkeypatch.setattr("tokenmix.lab.compare.compare.log", told.append)
    compare(config=small(finished, seeds=(0, 1), mixers=("self", "external")))
    assert any("also has gating-seed0, gating-seed1; name their mixers and seeds too" in line for line in told)
    # With the threads of runs side by side, although none is left to train.
    together = parallel_runs(config := small(finished), 4)
    assert measured == [load_results(finished / "results.json").environment["threads"]]
    assert measured == [1 if together else config.loop.threads or torch.get_num_threads()]


def test_score_and_confusion_are_of_the_weights_that_are_kept(tmp_path: Path):
    plan = plan_runs(small(tmp_path), tmp_path)[0]
    plan.folder.mkdir(parents=True)
    epochs = {
        "metrics": {"accuracy": 1.0, "confusion": [[2, 0], [0, 2]]},
        "final": {"accuracy": 0.5, "confusion": [[1, 1], [1, 1]]},
    }
    (plan.folder / "result.json").write_text(json.dumps({**epochs, "seconds": 1.0, "images_per_second": 2.0}))
    run = read_run(plan, "", "accuracy", tmp_path)
    assert (run.score, run.confusion) == (1.0, [[2, 0], [0, 2]])


def test_other_metrics_of_a_run_are_its_defined_numbers(tmp_path: Path):
    plan = plan_runs(small(tmp_path), tmp_path)[0]
    plan.folder.mkdir(parents=True)
    many, few = dict.fromkeys(map(str, range(11)), 0.5), {"cat": 0.5, "dog": None}
    metrics = {
        "accuracy": 1.0,
        "auc": None,
        "map_small": -1.0,
        "ece": 0.1,
        "confusion": [[2]],
        "recall": few,
        "iou": many,
    }
    (plan.folder / "result.json").write_text(json.dumps({"metrics": metrics, "seconds": 1.0, "images_per_second": 2.0}))
    assert read_run(plan, "", "accuracy", tmp_path).metrics == {"ece": 0.1, "recall of cat": 0.5}


def test_the_figure_of_a_report_is_that_of_eval(finished: Path):
    for variant in load_results(finished / "results.json").variants:
        for run in variant.runs:
            assert evaluate(finished / run.folder, device="cpu")["accuracy"] == run.score


def test_differences_rest_on_what_was_said_of_each_sample(finished: Path):
    results = load_results(finished / "results.json")
    assert results.sampling is not None
    assert (results.sampling.samples, results.sampling.unit) == (40, "images")
    right = []
    for folder in results.sampling.runs:
        columns = read_predictions(finished / folder)
        assert columns is not None
        right.append((columns["label"] == columns["predicted"]).double())
    np.testing.assert_allclose(results.sampling.covariance, np.cov(torch.stack(right).numpy()) / 40)
    scores = {run.folder: run.score for variant in results.variants for run in variant.runs}
    assert [r.mean().item() for r in right] == pytest.approx([scores[f] for f in results.sampling.runs])


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_other_metrics_are_resampled(finished: Path):
    """A jackknife of scikit-learn's metric."""
    config = small(finished, seeds=(0, 1))
    runs = [(cell, read_run(cell, "", "balanced_accuracy", finished)) for cell in plan_runs(config, finished)]
    sampling = read_sampling(runs, "balanced_accuracy", "images")
    assert sampling is not None
    assert sampling.samples == 40
    said = [read_predictions(cell.folder) or {} for cell, _ in runs]
    drawn = [
        [balanced_accuracy_score(one["label"][rows], one["predicted"][rows]) for one in said]
        for rows in (np.delete(np.arange(40), i) for i in range(40))
    ]
    np.testing.assert_allclose(sampling.covariance, np.cov(np.array(drawn).T) * 39**2 / 40, rtol=1e-6, atol=1e-12)
    assert read_sampling(runs, "spearman", "images") is None


def test_a_metric_that_needs_each_sample_has_no_sampling(finished: Path, monkeypatch: pytest.MonkeyPatch):
    """Such as an area under the curve of one sample of each class: undefined whichever is left out."""
    nothing = Metric(lambda rows, weights: torch.full((len(weights),), torch.nan))
    monkeypatch.setattr(ImageClassification, "make_metrics", classmethod(lambda *_: {"area": nothing}))
    config = small(finished, seeds=(0, 1))
    runs = [(cell, read_run(cell, "", "accuracy", finished)) for cell in plan_runs(config, finished)]
    assert read_sampling(runs, "area", "images") is None


def test_damaged_predictions_are_named(finished: Path, tmp_path: Path):
    (plan, *_) = plan_runs(small(finished, seeds=(0, 1)), finished)
    run = read_run(plan, "", "accuracy", finished)
    file = plan.folder / "predictions.safetensors"
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:-3] + b"xyz")
        with pytest.raises(UserError, match=r"predictions\.safetensors is damaged"):
            read_sampling([(plan, run)], "accuracy", "images")
        columns = load_file(plan.folder / "model.safetensors")
        save_weights(file, {"index": torch.arange(3), "other": torch.zeros(3)}, RunFolder(plan.folder).identity)
        with pytest.raises(UserError, match=r"predictions\.safetensors: KeyError: 'label'"):
            read_sampling([(plan, run)], "accuracy", "images")
        save_weights(file, columns, {})
        with pytest.raises(UserError, match="was not written by the run"):
            read_sampling([(plan, run)], "accuracy", "images")
    finally:
        file.write_bytes(whole)


def test_another_comparisons_folder_is_left_alone(finished: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"lr 0\.002 instead of 0\.1, epochs 1 instead of 2"):
        compare(config=small(finished, epochs=2, lr=0.1), quiet=True)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="does not contain a comparison"):
        compare(config=small(tmp_path), quiet=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixers": ("self", "externl")}, "unknown mixer 'externl'; did you mean external"),
        ({"mixers": ()}, "at least"),
        ({"model_kwargs": {"dept": 3}}, "dept"),
        ({"batch_size": 1000, "accumulate": 1000}, "fewer than the 1000 parts of a step"),
        ({"model": "mixer_nan"}, "mixer_nano"),
        ({"tune": "auto", "mixers": (), "variants": {"slow": {"lr": 1e-3}}}, "learning rate, and slow has one"),
    ],
)
def test_mistakes_are_told_before_any_training(tmp_path: Path, changes: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        compare(config=small(tmp_path / "out", **changes), quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, BaseException], list[TrainConfig]]:
    """Makes the trainer fail for one mixer; returns the configs that it is called with."""
    import tokenmix.lab.train.run as trainer

    real, seen = trainer.train, []

    def install(mixer: str, error: BaseException) -> list[TrainConfig]:
        def train(config: TrainConfig, *, quiet: bool = False) -> Path:
            seen.append(config)
            if f"{mixer}-seed" in str(config.loop.resume or config.loop.out):
                raise error
            return real(config, quiet=quiet)

        monkeypatch.setattr(trainer, "train", train)
        return seen

    return install


@pytest.mark.usefixtures("few_tokens")
@pytest.mark.parametrize("error", [UserError("the loss is nan at step 3"), ZeroDivisionError("a bug")])
def test_one_variants_failure_does_not_cost_the_others(tmp_path: Path, failing: Callable, error: Exception):
    failing("self", error)
    out = compare(config=small(tmp_path / "out"), quiet=True).path
    broken, sound = load_results(out / "results.json").variants
    assert str(error) in broken.message
    assert broken.score is None
    assert sound.score is not None
    assert str(error) in (out / "report.html").read_text()
    assert (out / "runs/self-seed0/error.txt").exists() == isinstance(error, ZeroDivisionError)
    assert Compare(small(out)).run() == 1
    failing("gating", error)
    assert Compare(small(out)).run() == 0


def test_when_all_fail_the_first_reason_is_told(tmp_path: Path, failing: Callable):
    failing("self", UserError("the loss is nan at step 3"))
    with pytest.raises(UserError, match="no run finished; the first error: the loss is nan"):
        compare(config=small(tmp_path / "out", mixers=("self",)), quiet=True)


@pytest.mark.usefixtures("few_tokens")
def test_after_an_interruption_the_same_command_goes_on(tmp_path: Path, failing: Callable):
    failing("external", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt, match="1 of 2 runs are finished"):
        compare(config=small(tmp_path / "out"), quiet=True)
    half_done = tmp_path / "out/runs/external-seed0"
    (half_done / "checkpoints/last").mkdir(parents=True)
    config = (tmp_path / "out/runs/self-seed0/config.json").read_text()
    (half_done / "config.json").write_text(config.replace('"mixer": "self"', '"mixer": "external"'))
    seen = failing("external", UserError("stopped here"))
    seen.clear()
    compare(config=small(tmp_path / "out"), quiet=True)
    assert [config.loop.resume for config in seen] == [half_done]


def test_a_run_that_was_killed_at_its_start_starts_anew(tmp_path: Path, failing: Callable):
    leftover = tmp_path / "runs/self-seed0"
    leftover.mkdir(parents=True)
    (leftover / ".partial-0.json").touch()
    seen = failing("self", UserError("stopped here"))
    (plan,) = plan_runs(small(tmp_path, mixers=("self",)), tmp_path)
    assert finish_cell(plan) == "stopped here"
    assert seen == [plan.config]
    assert not leftover.exists()


def test_the_command_that_repeats_it_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = small(tmp_path / "with space", seeds=(0, 3), clip_grad=None)
    again = parse(shlex.split(repeat_command(config))[1:])
    assert again.config == config
    monkeypatch.setattr("tokenmix.registry._imported", {"my mixers.py": None})
    assert repeat_command(config).startswith("tokenmix --import 'my mixers.py' compare ")


def test_images_shown_are_agreed_and_disputed_ones_of_different_classes():
    right = torch.tensor([[1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    labels = torch.tensor([0, 0, 1, 2, 3, 4])
    assert choose_images(right, labels, 3) == [0, 2, 4]
    assert len(choose_images(right, labels, 6)) == 6


class ByClass(IndexedDataset[dict[str, torch.Tensor]]):
    """100 samples, sorted by their three classes, or each of its own class."""

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return 100

    def read(self, indices: torch.Tensor, epoch: int) -> dict[str, torch.Tensor]:
        return {"index": indices, "label": indices // self.size}


@pytest.mark.parametrize(("size", "labels"), [(40, {0, 1, 2}), (1, {0, 25, 50, 75})])
def test_samples_shown_are_of_all_classes_and_spread(size: int, labels: set[int]):
    data = IndexedData(ByClass(), ByClass(size), None, config=TrainConfig(), description={}, test_batch=1)
    shown = [int(batch["label"]) for batch in data.shown_batches(4)]
    assert len(shown) == 4
    assert set(shown) == labels
