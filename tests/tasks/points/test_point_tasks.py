"""The tasks on point clouds: learned, resumed bit for bit, evaluated, answered, exported, and refused in one line."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from predictions import check_predictions
from tokenmix.errors import UserError
from tokenmix.lab import cli
from tokenmix.lab.compare.baselines import fit_baselines
from tokenmix.lab.compare.compare import compare
from tokenmix.lab.tasks.points.clouds import scale_axes
from tokenmix.lab.tasks.points.files import read_points
from tokenmix.lab.tasks.points.task import PointClassification, PointSegmentation, cloud_iou
from tokenmix.lab.train import run as runs
from tokenmix.lab.train import trainer
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.export import export
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.sources import make_config

TINY = {
    "dim": 16,
    "depth": 1,
    "drop_rate": 0.0,
    "stem_dim": 8,
    "stage_dims": (8, 16),
    "num_neighbours": 4,
    "fuse_dim": 32,
    "head_dims": (16, 16),
}
SHARED = {"epochs": 2, "batch_size": 6, "threads": 1, "device": "cpu", "log_every": 2, "lr": 1e-2}


def shape(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A ball, or a rod, of 40 to 60 points; the upper half is another part."""
    points = rng.normal(size=(int(rng.integers(40, 60)), 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    points *= (1, 1, 1) if kind == "ball" else (0.1, 0.1, 1)
    return points, (points[:, 2] > 0).astype(np.int64) + (0 if kind == "ball" else 1)


def written(root: Path, train: int, test: int) -> Path:
    """A folder of balls and rods with parts, as many of each for training and for testing."""
    rng = np.random.default_rng(0)
    for side, count in (("train", train), ("test", test)):
        for kind in ("ball", "rod"):
            (root / side / kind).mkdir(parents=True)
            for i in range(count):
                points, parts = shape(kind, rng)
                np.savez(root / side / kind / f"{i}.npz", points=points, parts=parts)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("clouds"), 18, 10)


def config(folder: Path, task: str, out: Path, **changes) -> TrainConfig:
    parts = task == "point-segmentation"
    model = {**TINY, "centres": "all"} if parts else {**TINY, "centres": (12, 6)}
    given = {
        "task": task,
        "model": "pct_part_nano" if parts else "pct_cls_nano",
        "data": f"clouds:{folder}",
        "model_kwargs": model,
        "num_points": 48,
        "out": out,
    }
    return make_config(**{**SHARED, **given, **changes})


@pytest.fixture(scope="module", params=["point-classification", "point-segmentation"])
def run(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / request.param
    return runs.train(config(folder, request.param, out, epochs=12), quiet=True)


def result(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


def parts_are_learnt(run: Path) -> bool:
    return result(run)["task"] == "point-segmentation"


def test_learns(run: Path) -> None:
    metrics = result(run)["metrics"]
    if parts_are_learnt(run):
        assert metrics["instance_miou"] > 0.6
        assert set(metrics) >= {"category_miou", "part_miou", "accuracy", "loss"}
    else:
        # Chance is 0.5. One cloud of the twenty more or less is the rounding of a CPU.
        assert metrics["accuracy"] >= 0.8
        assert metrics["balanced_accuracy"] == pytest.approx(metrics["accuracy"])
    assert result(run)["macs"] > 0


@pytest.mark.parametrize("choice", ["first", "random", "farthest"])
def test_evaluation_takes_its_points_as_it_is_asked_to_and_so_do_answers(folder: Path, choice: str) -> None:
    def tested(seed: int) -> Tensor:
        asked = config(folder, "point-classification", folder / "none", num_points=16, choice=choice, seed=seed)
        return next(iter(PointClassification.load_data(asked).test_batches(batch_size=20)))["points"]

    rows = tested(0)
    assert torch.equal(rows, tested(1)), "the same points for every seed"
    data = {"num_points": 16, "features": "xyz"}
    task = SimpleNamespace(data=data, options=SimpleNamespace(choice=choice), model=torch.nn.Linear(1, 1))
    cloud, answered, chosen = PointClassification.read(task, folder / "test" / "rod" / "0.npz")  # type: ignore[arg-type]
    assert any(torch.equal(answered[0], row) for row in rows) == (choice != "random")
    assert any(torch.equal(cloud.points[:16], row) for row in rows) == (choice == "first")
    assert torch.equal(answered[0], cloud.points[chosen])


def test_evaluating_again_gives_the_same(run: Path) -> None:
    again = runs.evaluate(run, device="cpu")
    headline = "instance_miou" if parts_are_learnt(run) else "accuracy"
    assert again[headline] == pytest.approx(result(run)["metrics"][headline])


def test_answers_files(run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "test" / "rod" / "0.npz"
    if not parts_are_learnt(run):
        assert cli.main(["predict", str(run), str(file), "--json"]) == 0
        (answer,) = json.loads(capsys.readouterr().out)
        assert answer["label"] == "rod"
        assert sum(answer["top"].values()) == pytest.approx(1, abs=1e-4)
        return
    given = f"rod={file}"
    assert cli.main(["predict", str(run), given, "--out", str(tmp_path), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert (answer["category"], answer["category_from"]) == ("rod", "given")
    # A rod has the parts 1 and 2 alone.
    assert set(answer["parts"]) <= {"part 1", "part 2"}
    assert sum(answer["parts"].values()) == pytest.approx(1, abs=1e-3)
    torch.testing.assert_close(read_points(answer["cloud"]).points, read_points(file, centred=True).points)
    assert Path(answer["picture"]).read_bytes().startswith(b"\x89PNG")
    guessed = runs.predict(run, [file])[0]
    assert guessed["category_from"] == "guess"
    with pytest.raises(UserError, match="unknown category 'rods'"):
        runs.predict(run, [f"rods={file}"])


@pytest.mark.parametrize("parts", [{}, {"rod": [99], "ball": [0]}])
def test_parts_that_do_not_fit_are_damage(run: Path, tmp_path: Path, parts: dict[str, list[int]]) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    described = json.loads((copy / "data.json").read_text())
    (copy / "data.json").write_text(json.dumps({**described, "parts": parts}))
    if parts_are_learnt(run):
        with pytest.raises(UserError, match=r"data\.json is damaged: .* does not have its parts"):
            load_task(copy)


def test_larger_files_are_answered_point_by_point(run: Path, tmp_path: Path) -> None:
    points, _ = shape("ball", np.random.default_rng(5))
    many = np.concatenate([points] * 5) + np.random.default_rng(6).normal(scale=0.01, size=(5 * len(points), 3))
    np.savez(tmp_path / "large.npz", points=many)
    (answer,) = runs.predict(run, [tmp_path / "large.npz"])
    assert answer["points"] == len(many)
    assert runs.predict(run, [tmp_path / "large.npz"]) == [answer]


@pytest.mark.slow
def test_is_exported(run: Path, tmp_path: Path) -> None:
    assert export(run, "torch-export", tmp_path / "model").is_file()


@pytest.mark.slow
def test_the_naive_form_is_exported_to_onnx(folder: Path, tmp_path: Path) -> None:
    kept = ("dim", "depth", "drop_rate", "fuse_dim", "head_dims")
    naive = {"embedding": "naive", **{name: TINY[name] for name in kept}}
    run = runs.train(config(folder, "point-classification", tmp_path / "run", model_kwargs=naive, epochs=1), quiet=True)
    assert export(run, "onnx", tmp_path / "model.onnx").is_file()


@pytest.mark.parametrize("task", ["point-classification", "point-segmentation"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    folder: Path, tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = config(folder, task, tmp_path / "whole", checkpoint_every=1)
    runs.train(plan, quiet=True)
    original, calls = trainer.TrainingLoop.start_batch, [0]

    def stopping(self, *args, **kwargs):
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(trainer.TrainingLoop, "start_batch", stopping)
    with pytest.raises(BaseException):  # noqa: B017  (what Lightning makes of it is its own affair)
        runs.train(plan.replace(out=tmp_path / "cut"), quiet=True)
    monkeypatch.undo()
    runs.train(make_config(resume=tmp_path / "cut"), quiet=True)
    one, two = (safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert result(tmp_path / "whole")["final"] == result(tmp_path / "cut")["final"]


def test_part_iou_is_that_of_shapenet() -> None:
    allowed = torch.tensor([[True, True, False, False], [False, False, True, True]])
    part = torch.tensor([[0, 0, 1, 1], [2, 2, 2, -100], [0, 1, -100, -100]])
    answer = torch.tensor([[0, 1, 1, 1], [2, 2, 2, 0], [1, 1, 0, 0]])
    label = torch.tensor([0, 1, 0])
    found = cloud_iou(answer, part, label, allowed)
    # Cloud 1: 1/2 and 2/3. Cloud 2: 1, and part 3, neither there nor answered, 1. Cloud 3: 0 and 1/2.
    clouds = [(1 / 2 + 2 / 3) / 2, 1.0, 1 / 4]
    assert found.tolist() == pytest.approx(clouds)
    rows = {"index": torch.arange(3), "label": label, "iou": found}
    metrics = PointSegmentation.make_metrics(make_config(), {"classes": ["a", "b", "c"], "part_names": ["x"] * 4})
    values = {name: metrics[name](rows) for name in ("instance_miou", "iou_by_category", "category_miou")}
    assert values["instance_miou"] == pytest.approx(sum(clouds) / 3)
    assert values["iou_by_category"] == pytest.approx([(clouds[0] + clouds[2]) / 2, 1, math.nan], nan_ok=True)
    assert values["category_miou"] == pytest.approx(((clouds[0] + clouds[2]) / 2 + 1) / 2)


def test_a_run_measures_points_of_all_clouds_together(run: Path) -> None:
    if not parts_are_learnt(run):
        return
    task = runs.load_task(run)
    # Whatever is asked, the first category's points are answered part 0 and the second's part 2.
    answers = torch.tensor([[9.0, 0, 0], [0.0, 0, 9]])
    task.model.forward = lambda points, label, mask=None: answers[label].unsqueeze(1).expand(-1, points.shape[1], -1)
    part = torch.tensor([[0, 0, 1, 1], [2, 2, 1, -100]])
    batch = {"points": torch.randn(2, 4, 3), "mask": part >= 0, "label": torch.tensor([0, 1]), "part": part}
    rows = task.evaluate({**batch, "index": torch.arange(2)})
    found = {name: metric(rows) for name, metric in task.metrics.items()}
    assert found["accuracy"] == pytest.approx(4 / 7)
    assert found["iou_by_part"] == pytest.approx([2 / 4, 0, 2 / 3])
    assert found["part_miou"] == pytest.approx((2 / 4 + 0 + 2 / 3) / 3)
    assert found["instance_miou"] == pytest.approx((1 / 4 + 1 / 3) / 2)


def test_balanced_accuracy_counts_classes_that_occur() -> None:
    rows = {"label": torch.tensor([0, 0, 0, 1, 1]), "predicted": torch.tensor([0, 0, 0, 1, 3])}
    metric = PointClassification.make_metrics(make_config(), {"classes": list("abcd")})["balanced_accuracy"]
    assert metric(rows) == pytest.approx((1 + 1 / 2) / 2)


def test_votes_are_means_of_stretched_clouds() -> None:
    seen: list[Tensor] = []

    def answer(points: Tensor) -> Tensor:
        seen.append(points)
        return points.sum(1)

    points = torch.randn(2, 5, 3)
    task: Any = SimpleNamespace(options=SimpleNamespace(votes=3, vote_scale=1.25))
    scores = PointClassification.vote(task, answer, points)
    assert len(seen) == 3
    assert torch.equal(seen[0], points)
    expected = torch.stack([cloud.sum(1).softmax(-1) for cloud in seen]).mean(0)
    torch.testing.assert_close(scores.exp(), expected)
    factors = seen[1] / points
    assert ((factors > 1 / 1.25) & (factors < 1.25)).all()
    torch.testing.assert_close(factors, factors[:1, :1].expand_as(factors))


def test_normals_stay_at_right_angles_to_what_is_stretched() -> None:
    factors = torch.tensor([2.0, 0.5, 1.0])
    along, normal = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0, -1.0, 0.0])
    both = scale_axes(torch.cat([along, normal])[None, None], factors)[0, 0]
    assert both[:3] @ both[3:] == pytest.approx(0, abs=1e-6)
    assert both[3:].norm() == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "pct_part_nano"}, "pct_part_nano is a model of point-segmentation"),
        ({"model": "vit_nano"}, "vit_nano is a model of image-classification"),
        ({"mixup": 0.2}, "has no option mixup, which is one of image-classification"),
        ({"augment": "rand-m9"}, "give one of none, light"),
        ({"batch_size": 1}, "BatchNorm needs more than one value .*; no checkpoint was written"),
        ({"votes": 0}, "votes must be at least 1, got 0"),
        ({"points": 3}, "unknown option of point-classification 'points'; did you mean num_points"),
        ({"features": "xyz+normals"}, "without normals"),
        ({"model_kwargs": {"in_chans": 4}}, "in_chans=4 is set elsewhere"),
        ({"data": "clouds"}, "clouds needs a path: give --data clouds:PATH"),
        ({"smoothing": 1.0}, r"smoothing must be in \[0, 1\), got 1.0"),
    ],
)
def test_mistakes_are_told(folder: Path, tmp_path: Path, changes: dict, said: str) -> None:
    with pytest.raises(UserError, match=said) as told:
        runs.train(config(folder, "point-classification", tmp_path / "run", **changes), quiet=True)
    assert "\n" not in str(told.value)


def test_bad_clouds_are_told(run: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "nan.npz", points=np.array([[0, 0, np.nan], [1, 1, 1]]))
    with pytest.raises(UserError, match="point 1 of 2 is not finite"):
        runs.predict(run, [tmp_path / "nan.npz"])
    np.savez(tmp_path / "one.npz", points=np.zeros((1, 3)))
    assert runs.predict(run, [tmp_path / "one.npz"])[0]["points"] == 1


def test_parts_outside_the_category_are_told(run: Path) -> None:
    if not parts_are_learnt(run):
        return
    task = runs.load_task(run)
    batch = {
        "points": torch.randn(2, 5, 3),
        "mask": torch.ones(2, 5, dtype=torch.bool),
        "label": torch.tensor([0, 1]),
        "part": torch.tensor([[0, 1, 1, 0, 0], [1, 2, 0, 1, -100]]),
        "index": torch.tensor([7, 8]),
    }
    with pytest.raises(UserError, match="cloud 8 is a 'rod' and has a point of part 0"):
        task.evaluate(batch)


@pytest.mark.parametrize(("task", "mixer"), [("point-classification", "external"), ("point-segmentation", "gating")])
def test_mixers_are_swapped_in(folder: Path, tmp_path: Path, task: str, mixer: str) -> None:
    """Gates learn over the tokens, whose number a pass over the run's clouds shows."""
    run = runs.train(config(folder, task, tmp_path / "run", swap=mixer, max_steps=1, epochs=1), quiet=True)
    weights = safetensors.torch.load_file(run / "model.safetensors")
    learned = "memory.key_memory" if mixer == "external" else "gating.weight"
    assert any(name.startswith("trunk.blocks.0.") and learned in name for name in weights), list(weights)
    assert json.loads((run / "result.json").read_text())["steps"] == 1


def test_the_most_frequent_part_is_scored_as_a_model(run: Path) -> None:
    task = load_task(run)
    if not isinstance(task, PointSegmentation):
        pytest.skip("of parts")
    data = PointSegmentation.load_data(task.config, like=task.data)
    often = torch.zeros(2, 3)
    for batch in data.train_batches(batch_size=6, epoch=0, start=0):
        for label, parts in zip(batch["label"], batch["part"]):
            often[label] += torch.stack([(parts == part).sum() for part in range(3)])
    scores = []
    for batch in data.test_batches(batch_size=7):
        for label, true in zip(batch["label"].tolist(), batch["part"]):
            own = task.data["parts"][task.data["classes"][label]]
            answer, seen = max(own, key=lambda part: often[label, part]), true[true >= 0]
            ious = []
            for part in own:
                both = int(((seen == part) & (part == answer)).sum())
                either = int(((seen == part) | torch.full_like(seen, part == answer, dtype=torch.bool)).sum())
                ious.append(both / either if either else 1.0)
            scores.append(sum(ious) / len(ious))
    assert fit_baselines(task, data)["majority"] == pytest.approx(sum(scores) / len(scores))


def test_the_nearest_mean_learns_from_clouds_as_they_are(run: Path) -> None:
    task = load_task(run)
    if not isinstance(task, PointClassification):
        pytest.skip("of classes")
    assert task.config.options.augment == "light"
    data = [
        PointClassification.load_data(task.config.replace(augment=one), like=task.data) for one in ("light", "none")
    ]
    light, none = (fit_baselines(task, one)["nearest mean"] for one in data)
    assert light == none
    light, none = (torch.cat([some for some, _ in task.plain_samples(one, "train")]).sort(0).values for one in data)
    assert torch.equal(light, none)


def test_predictions_are_kept(run: Path) -> None:
    classes = {"accuracy", "balanced_accuracy", "macro_f1", "ece", "loss", "auc", "f1"}
    parts = {"instance_miou", "category_miou", "part_miou", "accuracy", "loss"}
    check_predictions(run, parts if parts_are_learnt(run) else classes)


def test_a_comparison_on_one_cloud_at_a_time_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="BatchNorm needs more than one value"):
        compare(
            task="point-classification",
            data=f"clouds:{folder}",
            model="pct_cls_nano",
            model_kwargs={**TINY, "centres": (12, 6)},
            mixers=["self"],
            num_points=48,
            batch_size=1,
            epochs=1,
            device="cpu",
            jobs=1,
            out=tmp_path,
            quiet=True,
        )
