"""Training, evaluating and predicting by run folder, on the embedded digits."""

import csv
import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits

from runs import DIGITS
from tokenmix.errors import UserError
from tokenmix.lab import cli
from tokenmix.lab.registry import get_task
from tokenmix.lab.train import checkpoint, record, trainer
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.load import load_run, make_model
from tokenmix.lab.train.plan import make_optimizer, make_plan, make_schedule, seed_everything
from tokenmix.lab.train.run import DiskError, evaluate, predict, train
from tokenmix.lab.train.sources import make_config

CONFIG = make_config(
    **DIGITS,
    epochs=2,
    batch_size=64,
    limit=200,
    limit_eval=100,
    log_every=2,
    checkpoint_every=100,
)


def config(out: Path, **changes: Any) -> TrainConfig:
    return make_config(**{**CONFIG.flat(), "out": out, **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config(tmp_path_factory.mktemp("runs") / "run"), quiet=True)


def bare_loop(settings: TrainConfig) -> dict[str, torch.Tensor]:
    """What training is, without the trainer."""
    task = get_task(settings.task)
    data = task.load_data(settings)
    plan = make_plan(settings, data.num_train)
    seed_everything(settings.loop.seed, 0, 0)
    model = task.model_from_config(settings, data.describe()).train()
    optimizer = make_optimizer(model, settings.optim)
    schedule = make_schedule(optimizer, settings.optim, plan.total_steps, settings.loop.epochs)
    for epoch in range(plan.epochs):
        for i, batch in enumerate(data.train_batches(batch_size=settings.loop.batch_size, epoch=epoch, start=0)):
            seed_everything(settings.loop.seed, epoch + 1, i)
            optimizer.zero_grad()
            F.cross_entropy(
                model(batch["image"]), batch["label"], label_smoothing=settings.options.smoothing
            ).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optim.clip_grad or 0)
            optimizer.step()
            schedule.step()
    return model.state_dict()


def test_the_trainer_does_what_a_bare_loop_does(finished):
    expected, trained = bare_loop(CONFIG), weights(finished / "checkpoints" / "last")
    for key, value in expected.items():
        assert torch.equal(trained[key], value), key


def test_accumulation_is_one_large_batch(tmp_path, finished):
    cut = train(config(tmp_path / "run", accumulate=4), quiet=True)
    for key, value in weights(finished / "checkpoints" / "last").items():
        torch.testing.assert_close(weights(cut / "checkpoints" / "last")[key], value, rtol=1e-3, atol=1e-4)


def test_a_run_folder_holds_what_later_verbs_need(finished):
    for name in ("config.json", "data.json", "metrics.csv", "model.safetensors", "result.json"):
        assert (finished / name).is_file(), name
    assert not (finished / "tensorboard").exists()
    saved = json.loads((finished / "config.json").read_text())
    assert saved["config"]["optim"]["lr"] == CONFIG.optim.lr
    assert torch.__version__.startswith(saved["environment"]["versions"]["torch"])
    result = json.loads((finished / "result.json").read_text())
    assert (result["steps"], result["images"], result["epochs"]) == (6, 384, 2)
    assert np.sum(result["metrics"]["confusion"]) == 100
    for scores in (result["metrics"], result["final"]):
        assert np.trace(scores["confusion"]) == pytest.approx(100 * scores["accuracy"])
    assert result["seconds"] > 0
    assert result["peak_memory"]["process"] > 50e6
    model, _, data = load_run(finished)
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    assert result["macs"] == model.macs()  # type: ignore[operator]
    assert data["classes"] == [str(i) for i in range(10)]


def test_metrics_csv(finished):
    read = rows(finished)
    assert [(row["step"], row["epoch"], row["images"]) for row in read] == [
        ("2", "1", "128"),
        ("3", "1", "192"),
        ("4", "2", "256"),
        ("6", "2", "384"),
    ]
    assert all(float(row["train_loss"]) > 0 and float(row["seconds"]) > 0 for row in read)
    assert [bool(row["val_accuracy"]) for row in read] == [False, True, False, True]
    assert {"val_loss", "val_top5"} <= set(read[0])
    # Nothing that a spreadsheet would take for a formula: names begin with a letter, all else is a number.
    assert all(name[0].isalpha() for name in read[0])
    assert all(float(cell) <= float("inf") for row in read for cell in row.values() if cell)


def test_seconds_leave_evaluation_out(tmp_path, monkeypatch):
    """Each evaluation takes 1,000 s and the drawing after a validation 1,000 more, by a clock that jumps."""
    kind, jumped = get_task("image-classification"), [0.0]
    started, draw = kind.on_validation_epoch_start, kind.draw

    def slow(step: Callable[..., None]) -> Callable[..., None]:
        def taken(*args: Any) -> None:
            jumped[0] += 1000
            step(*args)

        return taken

    monkeypatch.setattr(kind, "on_validation_epoch_start", slow(started))
    monkeypatch.setattr(kind, "draw", slow(draw))
    monkeypatch.setattr(record, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + jumped[0]))
    folder = train(config(tmp_path / "run"), quiet=True)
    result = json.loads((folder / "result.json").read_text())
    tests = 1 + (result["best_epoch"] < 2)
    assert jumped[0] == 4000 + 1000 * tests
    assert 2000 + 1000 * tests < result["eval_seconds"] < 3000 + 1000 * tests
    assert 0 < result["seconds"] < 1000
    assert result["images_per_second"] == pytest.approx(result["images"] / result["seconds"], rel=0.05)
    assert [float(row["seconds"]) < 1000 for row in rows(folder)] == [True] * 4
    assert all(float(row["images_per_second"]) > 64 / 1000 for row in rows(folder))


def test_the_loss_of_a_row_is_the_mean_since_the_row_before(tmp_path):
    each, both = (train(config(tmp_path / str(n), epochs=1, log_every=n), quiet=True) for n in (1, 2))
    losses = [float(row["train_loss"]) for row in rows(each)]
    assert [float(row["train_loss"]) for row in rows(both)] == pytest.approx([np.mean(losses[:2]), losses[2]])


def test_learns_to_read_digits(tmp_path):
    """Chance is 0.1."""
    folder = train(config(tmp_path / "run", epochs=6, lr=5e-3, limit=1000, batch_size=32, augment="none"), quiet=True)
    assert json.loads((folder / "result.json").read_text())["metrics"]["accuracy"] > 0.6


def test_evaluate_repeats_the_runs_own_evaluation(finished, tmp_path):
    elsewhere = tmp_path / "moved"
    elsewhere.mkdir()
    for name in ("config.json", "data.json", "model.safetensors"):
        (elsewhere / name).write_bytes((finished / name).read_bytes())
    result = evaluate(elsewhere, device="cpu")
    assert result["samples"] == 100
    expected = json.loads((finished / "result.json").read_text())["metrics"]
    assert result["confusion"] == expected.pop("confusion")
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, abs=1e-6), name


def digit_files(folder: Path, count: int) -> list[Path]:
    digits = load_digits()
    files = [folder / f"{i}.png" for i in range(count)]
    for file, image in zip(files, digits.images):
        Image.fromarray((image * 255 / 16).astype(np.uint8)).save(file)
    return files


def test_predict_tells_label_and_probabilities(finished, tmp_path):
    files = digit_files(tmp_path, 3)
    answers = predict(finished, files)
    assert [answer["file"] for answer in answers] == [str(file) for file in files]
    for answer in answers:
        assert len(answer["top"]) == 5
        assert answer["label"] == max(answer["top"], key=answer["top"].__getitem__)
        assert answer["top"][answer["label"]] == answer["probability"] <= 1
    json.dumps(answers)


def test_predict_refuses_what_it_cannot_read(finished, tmp_path):
    (tmp_path / "empty.png").touch()
    with pytest.raises(UserError, match=r"empty\.png"):
        predict(finished, [tmp_path / "empty.png"])
    with pytest.raises(UserError, match="no files"):
        predict(finished, [])


def test_max_steps_ends_in_mid_epoch_with_an_evaluation(tmp_path):
    folder = train(config(tmp_path / "run", epochs=5, max_steps=4), quiet=True)
    assert [(row["step"], bool(row["val_accuracy"])) for row in rows(folder)] == [
        ("2", False),
        ("3", True),
        ("4", True),
    ]
    assert json.loads((folder / "result.json").read_text())["steps"] == 4


def test_averaged_weights_are_evaluated_and_saved(tmp_path):
    folder = train(config(tmp_path / "run", ema=0.9, epochs=1), quiet=True)
    own, averaged = weights(folder / "checkpoints" / "last"), weights(folder)
    assert any(not torch.equal(own[key], averaged[key]) for key in own)
    expected = json.loads((folder / "result.json").read_text())["metrics"]["loss"]
    assert evaluate(folder, device="cpu")["loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_half_precision(tmp_path, precision):
    folder = train(config(tmp_path / "run", precision=precision, epochs=1), quiet=True)
    assert 0 < float(rows(folder)[-1]["train_loss"]) < 4
    assert predict(folder, digit_files(tmp_path, 1))


def test_start_from_another_runs_weights(finished, tmp_path):
    folder = train(config(tmp_path / "run", init_from=finished, lr=1e-12, min_lr=0.0, epochs=1), quiet=True)
    for key, value in weights(finished).items():
        torch.testing.assert_close(weights(folder)[key], value, atol=1e-6, rtol=0)
    with pytest.raises(UserError, match=r"is for another model .*missing: blocks\.1"):
        train(config(tmp_path / "other", init_from=finished, model_kwargs={"depth": 2}), quiet=True)
    assert not (tmp_path / "other").exists(), "a run that could not start leaves nothing"


def test_the_seed_alone_decides(tmp_path, finished):
    torch.manual_seed(12345)
    again, other = (train(config(tmp_path / str(seed), seed=seed), quiet=True) for seed in (0, 1))
    assert all(torch.equal(value, weights(again)[key]) for key, value in weights(finished).items())
    assert any(not torch.equal(value, weights(other)[key]) for key, value in weights(finished).items())


def test_loader_processes_change_nothing(tmp_path, finished):
    folder = train(config(tmp_path / "run", workers=2), quiet=True)
    assert all(torch.equal(value, weights(folder)[key]) for key, value in weights(finished).items())


def test_a_model_that_gives_nan_is_not_blamed_on_the_learning_rate(tmp_path, monkeypatch):
    task = get_task("image-classification")
    loss = task.loss
    monkeypatch.setattr(task, "loss", lambda self, batch: (loss(self, batch)[0] * float("nan"), {}))
    with pytest.raises(UserError, match="nan at step 1, before any update: look at the data and the model"):
        train(config(tmp_path / "run", epochs=1), quiet=True)


def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    loss, calls = get_task("image-classification").loss, [0]

    def broken(self, batch):
        calls[0] += 1
        value, logs = loss(self, batch)
        return (value * float("nan") if calls[0] == 6 else value), logs

    monkeypatch.setattr(get_task("image-classification"), "loss", broken)
    with pytest.raises(UserError) as caught:
        train(config(tmp_path / "run", epochs=9, log_every=5, checkpoint_every=5), quiet=True)
    said = str(caught.value)
    assert said.startswith("the loss is nan at step 6 (learning rate 0.00")
    assert "lower --lr" in said
    assert f"the checkpoint of step 5 is kept, continue with: tokenmix train --resume {tmp_path / 'run'}" in said
    assert all(value.isfinite().all() for value in weights(tmp_path / "run" / "checkpoints" / "last").values())


def test_a_huge_learning_rate_is_told(tmp_path, capsys):
    arguments = ["train", "--data", "digits", "--model-kwargs", "depth=1", "--limit", "200", "--limit-eval", "100"]
    arguments += ["--batch-size", "32", "--lr", "1e9", "--clip-grad", "None", "--opt", "sgd", "--device", "cpu"]
    assert cli.main([*arguments, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "lower --lr" in said
    assert "tokenmix: the" in said


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, monkeypatch):
    write, calls = checkpoint.write_bytes, [0]

    def full(path: Path, data: bytes) -> None:
        calls[0] += 1
        if calls[0] > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data)

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_bytes", full)
        with pytest.raises(
            DiskError, match=r"No space left on device: .*free space.*checkpoint of step 2 is kept"
        ) as e:
            train(config(folder, checkpoint_every=2), quiet=True)
    assert isinstance(e.value, UserError)
    train(make_config(resume=folder), quiet=True)
    assert json.loads((folder / "result.json").read_text())["steps"] == 6


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DiskError, match=r"Permission denied: .*--out"):
        train(config(tmp_path / "run"))


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="exists already"):
        train(config(tmp_path / "file"))
    with pytest.raises(DiskError, match="Not a directory"):
        train(config(tmp_path / "file" / "run"))


def test_refused_permission_is_one_line(tmp_path, monkeypatch):
    def refused(path: Path, data: bytes) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("tokenmix.files.write_bytes", refused)
    with pytest.raises(DiskError, match=r"Permission denied: .*config\.json; change its permissions"):
        train(config(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_not_overwritten(finished):
    before = (finished / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=rf"exists already; continue it with --resume {finished}, .* --out"):
        train(config(finished))
    assert (finished / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "image-clasification"}, "unknown task 'image-clasification'; did you mean image-classification"),
        ({"model": "vit_nanoo"}, "unknown model 'vit_nanoo'; did you mean vit_nano"),
        ({"opt": "adamww"}, "unknown optimiser 'adamww'; did you mean .*adamw"),
        ({"device": "gpu"}, "device='gpu' is not valid; give one of auto, cpu, cuda, mps"),
        ({"precision": "16-mixed"}, "16-mixed needs a GPU; give --precision bf16-mixed"),
        ({"batch_size": 500, "accumulate": 500}, "200 training images are fewer than the 500 parts of a step"),
        ({"batch_size": 33, "mixup": 0.2}, "33 is odd; give an even --batch-size"),
        ({"img_size": 9}, "image size 9 x 9 is not a multiple of the patch size"),
        ({"model_kwargs": {"img_size": 32}}, "img_size=32 is set elsewhere; use --img-size"),
        ({"model_kwargs": {"deph": 1}}, "has no argument 'deph'"),
        ({"model_kwargs": {"depth": -1}}, r"depth=-1 must be a whole number in \[1, 10000\]"),
        ({"model_kwargs": {"embed_dim": 6.5}}, "embed_dim=6.5 must be a whole number"),
        ({"model_kwargs": {"drop_rate": 2}}, r"drop_rate=2 must be a number in \[0, 1\)"),
        ({"model_kwargs": {"mlp_ratio": float("inf")}}, "mlp_ratio=inf must be finite"),
        ({"model_kwargs": {"checkpoint_path": "x.pth"}}, "checkpoint_path='x.pth' cannot be given here; use --init"),
        ({"model_kwargs": {"num_heads": "x"}}, "model argument num_heads='x' must be a whole number"),
        ({"smoothing": 1.0}, r"smoothing must be in \[0, 1\), got 1.0"),
        ({"data": "folder:/does/not/exist"}, "/does/not/exist"),
    ],
)
def test_mistakes_are_told_in_one_line_and_leave_nothing(tmp_path, change, message):
    with pytest.raises(UserError, match=message) as caught:
        train(config(tmp_path / "run", **change))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_eval_and_predict_before_the_first_epoch_ended(finished, tmp_path):
    for name in ("config.json", "data.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    with pytest.raises(UserError, match=f"has not finished its first epoch; continue with: .*--resume {tmp_path}"):
        load_run(tmp_path)
    with pytest.raises(UserError, match="is not a run folder"):
        evaluate(tmp_path / "nothing")
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(UserError, match=r"data\.json is damaged"):
        load_run(tmp_path)


def test_the_bar_counts_from_one_and_shows_what_the_log_has(tmp_path, monkeypatch):
    shown = []

    class Watched(record.ProgressBar):
        def advance(self) -> None:
            super().advance()
            line = self.rich.tasks[0]
            shown.append((line.description, line.completed, line.total, line.fields["values"].split()[::2]))

    monkeypatch.setattr(trainer.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(trainer, "ProgressBar", Watched)
    train(config(tmp_path / "run", epochs=2))
    lines = [[], ["loss"], ["loss"], ["loss", "accuracy"], ["loss", "accuracy"], ["loss", "accuracy"]]
    places = [(f"epoch {epoch}/2", batch, 3) for epoch in (1, 2) for batch in (1, 2, 3)]
    assert shown == [(*place, values) for place, values in zip(places, lines)]


def test_no_bar_without_a_terminal(tmp_path, capfd):
    train(config(tmp_path / "run", epochs=1))
    sizes, epoch = capfd.readouterr().err.splitlines()
    assert sizes == "tokenmix: images of 8 x 8 px, patches of 2 px, 16 tokens"
    assert epoch.startswith("epoch 1/1  step 3/3  loss")


def test_published_weights_start_a_run_and_are_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmix.models import registry

    asked: list[str] = []

    def fetched(name: str, given: dict[str, Any]) -> torch.nn.Module:
        if given.get("pretrained"):
            asked.append(name)
        return registry.by_timm(name, **{**given, "pretrained": False})

    monkeypatch.setattr(registry, "timm_model", fetched)
    own = {"model_kwargs": {}, "limit": 64, "limit_eval": 16, "epochs": 1, "batch_size": 32}
    run = train(config(tmp_path / "run", model="test_resnet", pretrained=True, **own), quiet=True)
    assert set(asked) == {"test_resnet"}
    monkeypatch.undo()
    monkeypatch.setattr(registry, "check_source", lambda *_, **__: pytest.fail("the weights are in the run folder"))
    assert evaluate(run)["samples"] == 16
    assert load_run(run)[1].model.pretrained


def test_weights_that_cannot_be_fetched_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"the weights of test_resnet .*--init-from FILE"):
        train(config(tmp_path / "run", model="test_resnet", model_kwargs={"pretrained": True}), quiet=True)
    with pytest.raises(UserError, match="vit_nano has no pretrained weights"):
        train(config(tmp_path / "run", pretrained=True), quiet=True)
    for task, model in (("masked-lm", "gmlp_text_nano"), ("point-classification", "pct_cls_nano")):
        with pytest.raises(UserError, match=f"{model} has no pretrained weights; .*--init-from FILE, in create_model"):
            make_model(make_config(task, model=model, data="text:x", pretrained=True), {}, new=True)
    assert not (tmp_path / "run").exists()
