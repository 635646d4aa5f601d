"""Runs on photographs and shards, gradient checkpointing, and settings that only large runs have."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from runs import Killed, last_weights, rows, stopped_at
from tokenmix.errors import UserError
from tokenmix.lab.tasks.classes import CONFUSION_CLASSES
from tokenmix.lab.tasks.classification.task import ImageClassification
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distributed import PeerFailure, process_group
from tokenmix.lab.train.plan import make_optimizer, make_schedule
from tokenmix.lab.train.run import evaluate, predict, train
from tokenmix.lab.train.sources import make_config
from tokenmix.models import create_model

CONFIG = make_config(
    model="vit_nano",
    model_kwargs={"depth": 1, "drop_rate": 0.1},
    epochs=2,
    batch_size=8,
    img_size=16,
    threads=1,
    device="cpu",
    log_every=2,
    checkpoint_every=1,
)


def encoded(label: int, number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (30 + number, 40), (200 * label, 10 * number % 256, 90)).save(file, "jpeg")
    return file.getvalue()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three shards of ten for training and one for testing, in two classes."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(4):
        with tarfile.open(folder / f"part-{shard}.tar", "w") as tar:
            for n in range(10):
                for name, data in ((f"{n}.jpg", encoded(n % 2, n)), (f"{n}.cls", str(n % 2).encode())):
                    info = tarfile.TarInfo(f"{shard}-{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return f"wds:{folder}/part-{{0..2}}.tar,{folder}/part-3.tar"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMIX_DATA", str(tmp_path / "cache"))


def config(out: Path, **changes: Any) -> TrainConfig:
    return CONFIG.replace(out=out, **changes)


def test_a_run_on_shards_is_taken_up_in_mid_epoch(shards: str, tmp_path: Path):
    settings = {"data": shards, "augment": "rand-m9-mstd0.5-inc1", "reprob": 0.5, "workers": 1}
    whole = train(config(tmp_path / "whole", **settings), quiet=True)
    with stopped_at(6), pytest.raises(Killed):
        train(config(tmp_path / "run", **settings), quiet=True)
    run = train(make_config(resume=tmp_path / "run", workers=0), quiet=True)
    assert all(torch.equal(value, last_weights(run)[key]) for key, value in last_weights(whole).items())
    assert rows(run) == rows(whole)


def test_later_verbs_see_photographs_as_the_run_did(shards: str, tmp_path: Path):
    run = train(config(tmp_path / "run", data=shards, crop_pct=0.5), quiet=True)
    assert json.loads((run / "data.json").read_text())["crop_pct"] == 0.5
    assert json.loads((run / "config.json").read_text())["config"]["data"]["data"] == shards
    result = json.loads((run / "result.json").read_text())["metrics"]
    assert evaluate(run, device="cpu")["loss"] == pytest.approx(result["loss"], abs=1e-6)
    # Half of it is another class: only the centre may be seen.
    image = Image.new("RGB", (60, 40), (200, 40, 90))
    image.paste((0, 40, 90), (15, 10, 45, 30))
    image.save(tmp_path / "framed.png")
    image.crop((15, 10, 45, 30)).save(tmp_path / "centre.png")
    framed, centre = predict(run, [tmp_path / "framed.png", tmp_path / "centre.png"])
    # Resampling takes a little of what lies around.
    assert framed["top"] == pytest.approx(centre["top"], abs=0.01)
    data = json.loads((run / "data.json").read_text())
    (run / "data.json").write_text(json.dumps({**data, "crop_pct": 1.0}))
    assert predict(run, [tmp_path / "framed.png"])[0]["top"] != pytest.approx(centre["top"], abs=0.05)


@pytest.mark.one_fast
@pytest.mark.parametrize("model", ["vit_nano", "lavit_nano", "eamlp_nano"])
def test_gradient_checkpointing_changes_nothing(tmp_path: Path, model: str):
    settings = {"data": "digits", "img_size": 32, "model": model, "model_kwargs": {"drop_path_rate": 0.3}}
    settings |= {"limit": 32, "limit_eval": 16, "epochs": 1}
    plain = train(config(tmp_path / "plain", **settings), quiet=True)
    again = train(config(tmp_path / "again", grad_checkpointing=True, **settings), quiet=True)
    for key, value in last_weights(plain).items():
        torch.testing.assert_close(last_weights(again)[key], value, atol=1e-6, rtol=0)


def test_gradient_checkpointing_keeps_less():
    held = []
    for enable in (False, True):
        model = create_model("vit_nano", depth=6, img_size=32)
        model.set_grad_checkpointing(enable)  # type: ignore[operator]
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            model(torch.randn(4, 3, 32, 32))
        held.append(sum(kept))
    assert held[1] < held[0] / 3


class Stubborn(torch.nn.Linear):
    """As some of timm's."""

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        assert not enable, "gradient checkpointing not supported"


class Strict(torch.nn.Linear):
    """As a user may write it, without a default."""

    def set_grad_checkpointing(self, enable: bool) -> None:
        assert not enable, "gradient checkpointing not supported"


@pytest.mark.parametrize("kind", [torch.nn.Linear, Stubborn, Strict])
def test_a_model_without_gradient_checkpointing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[torch.nn.Linear]
):
    monkeypatch.setattr(ImageClassification, "build_model", lambda *args: kind(1, 1))
    with pytest.raises(UserError, match=f"{kind.__name__} has no gradient checkpointing"):
        train(config(tmp_path / "run", data="digits", grad_checkpointing=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_steps": 3, "warmup_epochs": 1.0}, "warm-up is given twice: 3 steps and 1 epochs"),
        (
            {"warmup_epochs": 1.5, "cooldown_epochs": 1.0},
            r"of 1\.5 and 1 epochs are longer than the 2 of training; raise --epochs",
        ),
        ({"cooldown_epochs": -1.0}, r"cooldown_epochs must be at least 0, got -1\.0"),
        ({"reprob": 1.5}, r"reprob must be in \[0, 1\], got 1\.5"),
        ({"color_jitter": 0.4, "augment": "none"}, r"color_jitter=0\.4 only works with augment=light"),
        ({"crop_pct": 0.9}, r"crop_pct=0\.9 is for imagefolder and wds"),
        ({"opt": "sgd", "opt_eps": 1e-6}, "'sgd' has no epsilon; leave opt_eps=1e-06 out"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message) as caught:
        train(config(tmp_path / "run", data="digits", limit=8, **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_warm_up_and_cool_down_in_epochs():
    settings = make_config(epochs=10, warmup_epochs=2, cooldown_epochs=1, lr=1e-3, min_lr=1e-5)
    schedule = make_schedule(
        torch.optim.SGD([torch.zeros(1)], lr=1e-3), settings.optim, total_steps=100, epochs=settings.loop.epochs
    )
    factor = schedule.lr_lambdas[0]
    assert factor(20) == pytest.approx(1)
    assert max(range(100), key=factor) == 20
    assert [factor(step) for step in range(90, 100)] == pytest.approx([0.01] * 10)
    assert factor(89) > 0.0101


def test_the_optimisers_epsilon():
    model = create_model("vit_nano", img_size=8)
    assert make_optimizer(model, make_config(opt_eps=1e-6).optim).defaults["eps"] == 1e-6
    assert make_optimizer(model, make_config().optim).defaults["eps"] == 1e-8


def test_too_few_shards_are_told_before_anything_is_written(shards: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tokenmix.lab.train.launch.DistributedInfo.data_parallel", lambda self, shared: (0, 5))
    with pytest.raises(UserError, match=r"3 shards cannot be distributed over 5 processes.* --devices 3 or fewer$"):
        train(CONFIG.replace(data=shards, batch_size=2, out=tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()


def test_more_processes_than_gpus_are_one_line_of_the_first(monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="this machine has 1 CUDA device; give --devices 1"), process_group("auto"):
        pass
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(PeerFailure), process_group("cuda"):
        pass


def test_no_confusion_matrix_of_a_thousand_classes():
    def metrics(classes: int) -> set[str]:
        data = {"classes": [str(i) for i in range(classes)]}
        return {str(name) for name in ImageClassification(torch.nn.Linear(1, classes), make_config(), data).metrics}

    assert metrics(CONFUSION_CLASSES) - metrics(CONFUSION_CLASSES + 1) == {"confusion", "recall"}
