"""Models on the Hugging Face hub: a run as a folder with a card, uploaded, and loaded by timm and transformers."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from fake_hub import TOKEN, fake_hub
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import tokenmix.text  # noqa: F401
from tokenmix import create_model
from tokenmix.errors import UserError
from tokenmix.lab.cli import main
from tokenmix.lab.data.images import read_image
from tokenmix.lab.train.export import export_to_hub
from tokenmix.lab.train.load import load_run
from tokenmix.lab.train.run import evaluate, train
from tokenmix.lab.train.sources import make_config
from tokenmix.lab.train.task import size_note

SRC = Path(__file__).parents[2] / "src"
TINY: dict[str, Any] = {"threads": 1, "device": "cpu", "max_steps": 4, "batch_size": 16, "epochs": 2, "log_every": 1}
TEXT = {
    **TINY,
    "model": "amlp_text_nano",
    "vocab_size": 300,
    "seq_len": 24,
    "model_kwargs": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32},
}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise in colours with a class each, as files of another size and shape than the model's."""
    folder, rng = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 4)):
        for index, name in enumerate(("blue", "green", "red")):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 100, (40, 52, 3), dtype=np.uint8)
                pixels[..., 2 - index] += 120
                Image.fromarray(pixels).save(folder / part / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def run(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model differs from its preset, and whose data from timm's defaults."""
    settings = {"data": f"imagefolder:{photographs}", "model": "gmlp_nano", "img_size": 32, "crop_pct": 0.875}
    out = tmp_path_factory.mktemp("runs") / "gmlp"
    return train(make_config(**TINY, **settings, model_kwargs={"depth": 2}, out=out), quiet=True)


@pytest.fixture(scope="module")
def folder(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(export_to_hub(run, tmp_path_factory.mktemp("hub") / "gmlp"))


@pytest.fixture
def hub() -> Iterator[tuple[str, dict[str, dict[str, bytes]]]]:
    with fake_hub() as (address, repositories):
        yield address, repositories


def elsewhere(code: str, address: str, home: Path, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: huggingface_hub reads address and token once, when it is imported."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": address,
        "HF_HOME": str(home),
        "PYTHONPATH": str(SRC),
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def code_of(card: Path) -> str:
    """The Python of a model card."""
    return re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)[0]


def test_the_folder_has_weights_config_and_card_and_nothing_else(folder: Path, run: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"] == "gmlp_nano"
    assert config["label_names"] == ["blue", "green", "red"]
    assert config["model_args"]["depth"] == 2
    ours, theirs = load_file(run / "model.safetensors"), load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_card_states_what_was_measured_and_by_what(folder: Path, run: Path) -> None:
    card, result = ModelCard.load(folder / "README.md"), json.loads((run / "result.json").read_text())
    data = card.data.to_dict()
    assert (data["library_name"], data["pipeline_tag"]) == ("timm", "image-classification")
    stated = {r.metric_type: r.metric_value for r in card.data.eval_results or []}
    again = evaluate(run, device="cpu")
    assert stated["accuracy"] == result["metrics"]["accuracy"] == again["accuracy"]
    assert f"The input is {size_note(again)}." in card.text
    assert (again["img_size"], again["num_tokens"]) == (result["img_size"], result["num_tokens"])
    assert stated["loss"] == pytest.approx(again["loss"], rel=1e-5)
    assert f"| accuracy | {again['accuracy']:.4g} |" in card.text
    assert "48 images" in card.text
    assert "on 12 test images" in card.text
    epoch = f"after epoch {result['best_epoch']}, "
    held = json.loads((run / "data.json").read_text()).get("validation", 0)
    assert epoch + (f"the best by accuracy on {held} images held out" if held else "the last:") in card.text
    assert Path(sys.argv[0]).name in card.text, "the command that made the run"
    assert result["environment"]["versions"]["torch"] in card.text


def test_timm_prepares_images_as_the_run_did(folder: Path, run: Path, tmp_path: Path) -> None:
    file, data = tmp_path / "slope.png", json.loads((run / "data.json").read_text())
    slope = np.stack(np.meshgrid(np.arange(90), np.arange(70)), -1) * 2
    Image.fromarray(np.concatenate([slope, slope[..., :1] * 0 + 40], -1).astype(np.uint8)).save(file)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    found = timm.data.create_transform(**timm.data.resolve_model_data_config(model))(Image.open(file))
    mean, std = (torch.tensor(data[key]).view(3, 1, 1) for key in ("mean", "std"))
    expected = (read_image(file, 3, (32, 32), crop_pct=0.875) / 255 - mean) / std
    # timm rounds sizes and places to whole pixels: here half a pixel of 90 / 36, two levels each.
    torch.testing.assert_close(found, expected, rtol=0, atol=4 / 255 / float(std.min()))


def test_one_channel(tmp_path: Path) -> None:
    settings = {"data": "digits", "model": "vit_nano", "limit": 64, "limit_eval": 32, "model_kwargs": {"depth": 1}}
    grey = train(make_config(**TINY, **settings, out=tmp_path / "run"), quiet=True)
    loaded = create_model(f"local-dir:{export_to_hub(grey)}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(loaded)
    assert config["input_size"][0] == len(config["mean"]) == 1
    x = torch.randn(2, *config["input_size"])
    assert torch.equal(loaded(x), load_run(grey)[0].eval()(x))


@pytest.mark.slow
def test_uploaded_by_the_command_and_loaded_by_the_code_of_the_card(run: Path, hub: Any, tmp_path: Path) -> None:
    address, repositories = hub
    out = tmp_path / "out"
    words = ["export", str(run), "--format", "hub", "--out", str(out), "--push", "me/gmlp"]
    done = elsewhere(f"from tokenmix.lab.cli import main; raise SystemExit(main({words}))", address, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{address}/me/gmlp"
    assert repositories == {"me/gmlp": {p.name: p.read_bytes() for p in out.iterdir()}}
    code = "from PIL import Image\nimage = Image.new('RGB', (60, 40), 'red')\n" + code_of(out / "README.md")
    loaded = elsewhere(code + "\nprint(classes, *logits[0].tolist())", address, tmp_path / "other")
    assert loaded.returncode == 0, loaded.stderr
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    expected = model(transform(Image.new("RGB", (60, 40), "red"))[None])[0].tolist()
    assert loaded.stdout.startswith("['blue', 'green', 'red'] ")
    assert [float(x) for x in loaded.stdout.split()[3:]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("token", "said"), [("hf_wrong", "401"), (TOKEN, "unreachable")], ids=["token", "network"])
def test_an_upload_that_fails_is_one_line_and_the_folder_is_kept(
    run: Path, hub: Any, tmp_path: Path, token: str, said: str
) -> None:
    address = "http://127.0.0.1:9" if said == "unreachable" else hub[0]
    words = ["export", str(run), "--format", "hub", "--out", str(tmp_path / "out"), "--push", "me/gmlp"]
    code = f"from tokenmix.lab.cli import main; raise SystemExit(main({words}))"
    done = elsewhere(code, address, tmp_path / "home", token)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert f"{tmp_path / 'out'} was written but could not be uploaded to me/gmlp" in line
    assert ("401" if said == "401" else "Connect") in line
    assert (tmp_path / "out" / "README.md").is_file()


@pytest.mark.slow
def test_timms_own_upload_takes_our_models(hub: Any, tmp_path: Path) -> None:
    code = """
import timm, torch, tokenmix, tokenmix.register
torch.manual_seed(0)
saved = timm.create_model("eamlp_nano", num_classes=4, img_size=48).eval()
timm.models.push_to_hf_hub(saved, "me/eamlp", safe_serialization=True)
x = torch.randn(2, 3, 48, 48)
for create in (timm.create_model, tokenmix.create_model):
    assert torch.equal(create("hf-hub:me/eamlp", pretrained=True).eval()(x), saved(x))
# What timm saved of its own is loaded into ours.
theirs = timm.create_model("gmlp_s16_224", num_classes=5).eval()
timm.models.push_to_hf_hub(theirs, "me/theirs", safe_serialization=True)
x = torch.randn(1, 3, 224, 224)
assert torch.equal(tokenmix.create_model("hf-hub:me/theirs", pretrained=True).eval()(x), theirs(x))
overlay = {"hf_hub_id": "me/theirs", "num_classes": 5}
ours = tokenmix.create_model("gmlp_small", num_classes=5, pretrained=True, pretrained_cfg_overlay=overlay).eval()
assert torch.allclose(ours(x), theirs(x), atol=1e-5)
"""
    done = elsewhere(code, hub[0], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def text_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("text")
    (folder / "log.txt").write_text("".join(f"on day {i} the ship sailed {i * 7} miles\n" for i in range(400)))
    rows = "".join(f"here is number {i},{'odd' if i % 2 else 'even'}\n" for i in range(120))
    (folder / "some.csv").write_text("text,label\n" + rows)
    asked = []
    for i in range(60):
        context = f"one day {i} a cow came ."
        answers = [{"text": "came", "answer_start": context.index("came")}]
        asked.append({"context": context, "qas": [{"id": str(i), "question": "what ?", "answers": answers}]})
    for part in ("train", "dev"):
        (folder / f"{part}-v1.1.json").write_text(json.dumps({"data": [{"paragraphs": asked}]}))
    sets = {
        "masked-lm": f"text:{folder / 'log.txt'}",
        "text-classification": f"csv:{folder / 'some.csv'}",
        "question-answering": f"squad:{folder}",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMIX_DATA", str(folder / "cache"))
        more = {"question-answering": {"doc_stride": 4}}
        return {
            task: train(make_config(task, data=data, out=folder / task, **TEXT, **more.get(task, {})), quiet=True)
            for task, data in sets.items()
        }


@pytest.mark.one_fast
@pytest.mark.parametrize("task", ["masked-lm", "text-classification", "question-answering"])
def test_a_folder_in_transformers_form(text_runs: dict[str, Path], tmp_path: Path, task: str) -> None:
    folder = Path(export_to_hub(text_runs[task], tmp_path / "out"))
    model = {
        "masked-lm": AutoModelForMaskedLM,
        "text-classification": AutoModelForSequenceClassification,
        "question-answering": AutoModelForQuestionAnswering,
    }[task].from_pretrained(folder)
    words = AutoTokenizer.from_pretrained(folder)("on day 7 the ship", return_tensors="pt")
    own = load_run(text_runs[task])[0]
    weights = model.state_dict()
    assert weights.keys() == own.state_dict().keys()
    assert all(torch.equal(value, weights[name]) for name, value in own.state_dict().items())
    # Where in memory a weight begins decides how some CPUs round its products.
    with torch.no_grad():
        torch.testing.assert_close(own(**words).to_tuple(), model(**words).to_tuple(), rtol=1e-5, atol=1e-6)
    assert model.config.predict == "all"
    if task == "text-classification":
        assert model.config.id2label == {0: "even", 1: "odd"}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["masked-lm", "text-classification", "question-answering"])
def test_text_uploaded_and_loaded_by_the_code_of_the_card(
    text_runs: dict[str, Path], hub: Any, tmp_path: Path, task: str
) -> None:
    address, repositories = hub
    words = ["export", str(text_runs[task]), "--format", "hub", "--out", str(tmp_path / "out"), "--push", "me/text"]
    done = elsewhere(f"from tokenmix.lab.cli import main; raise SystemExit(main({words}))", address, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= repositories["me/text"].keys()
    card = ModelCard.load(tmp_path / "out" / "README.md")
    stated = {r.metric_type: r.metric_value for r in card.data.eval_results or []}
    measured = json.loads((text_runs[task] / "result.json").read_text())["metrics"]
    assert stated
    assert all(measured[key] == value for key, value in stated.items())
    code = code_of(tmp_path / "out" / "README.md") + "\nprint(outputs[0].shape[0], model.config.predict)"
    loaded = elsewhere(code, address, tmp_path / "other")
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == ["1", "all"]


@pytest.mark.slow
def test_text_models_upload_and_load_themselves(hub: Any, tmp_path: Path) -> None:
    code = """
import torch, tokenmix.text
from tokenmix.text import GMLPConfig, GMLPForMaskedLM
from transformers import AutoModelForMaskedLM
model = GMLPForMaskedLM(GMLPConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, intermediate_size=12)).eval()
model.push_to_hub("me/gmlp")
ids = torch.arange(1, 9)[None]
for kind in (AutoModelForMaskedLM, GMLPForMaskedLM):
    assert torch.equal(kind.from_pretrained("me/gmlp")(ids).logits, model(ids).logits)
"""
    done = elsewhere(code, hub[0], tmp_path)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_exported_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert main(["export", *words]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    (mine := tmp_path / "mine.txt").write_text("mine")
    assert "mine.txt exists and is no .pt2 file" in said(str(run), "--format", "torch-export", "--out", str(mine))
    assert mine.read_text() == "mine"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert "is not empty; remove it" in said(str(run), "--format", "hub", "--out", str(tmp_path / "full"))
    assert (tmp_path / "full" / "mine").exists()
    assert "--push me/x goes with --format hub" in said(str(run), "--push", "me/x")


def test_names_of_a_downloaded_run_are_no_markup_in_a_card(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, copied := tmp_path / "run")
    result = json.loads((copied / "result.json").read_text())
    name = "digits`\n\n<script>bad()</script>\n[click](javascript:x)"
    (copied / "result.json").write_text(json.dumps({**result, "data": name}))
    setup = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**setup, "command": ["tokenmix", "train", name]}))
    card = (Path(export_to_hub(copied)) / "README.md").read_text()
    assert "<script>" not in card
    assert "[click]" not in card
    assert "`digits script bad() /script click (javascript:x)`" in card


def test_a_task_that_no_library_of_the_hub_loads(tmp_path: Path) -> None:
    settings = {"model": "eagan_nano", "model_kwargs": {"width": 8, "latent_dim": 8}, "img_size": 32, "limit": 64}
    common = {key: TINY[key] for key in ("threads", "device", "epochs", "max_steps", "batch_size")}
    config = make_config("image-generation", data="digits", limit_eval=32, out=tmp_path / "run", **common, **settings)
    with pytest.raises(UserError, match=r"hf upload OWNER/NAME .*--exclude 'checkpoints/\*'"):
        export_to_hub(train(config, quiet=True))


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit on file sizes")
def test_a_disk_that_refuses_is_one_line_and_nothing_is_left(run: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*hub"):
            export_to_hub(run, tmp_path / "hub")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())
