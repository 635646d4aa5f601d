"""`tokenmix distill` and `tokenmix swap --rank`: from a folder to a folder, and what they refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmix.lab.cli import main
from tokenmix.lab.swapping import TextBatches, split_texts
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import make_config
from verbs import refused

transformers = pytest.importorskip("transformers", reason="transformers is optional and not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is optional and not installed")

SRC = Path(__file__).parents[2] / "src"
WORDS = [f"w{i}" for i in range(30)]
SHORT = ["--steps", "3", "--batch-size", "4", "--max-length", "16", "--threads", "1"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with a tokenizer of thirty words, and what sentence-transformers has beside it."""
    folder = tmp_path_factory.mktemp("models") / "encoder"
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=20,
    )
    transformers.BertModel(config).save_pretrained(folder)
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{word: i + 2 for i, word in enumerate(WORDS)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "modules.json").write_text("[]")
    (folder / "README.md").write_text("Scores of the original.")
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    generator = torch.Generator().manual_seed(0)
    lines = [
        " ".join(
            WORDS[i]
            for i in torch.randint(30, (int(torch.randint(1, 14, (), generator=generator)),), generator=generator)
        )
        for _ in range(300)
    ]
    file.write_text("\n".join([*lines, "", lines[0]]))
    return file


@pytest.mark.parametrize("to", [("external", "--mixer-kwargs", "num_slots=4"), ("linear",)])
def test_a_folder_becomes_a_folder(
    encoder: Path, texts: Path, tmp_path: Path, capsys: Any, to: tuple[str, ...]
) -> None:
    out = tmp_path / "new" / "converted"
    words = ["distill", str(encoder), "--to", to[0], "--layers", "1-2", "--text", str(texts), "--out", str(out)]
    assert main([*words, *SHORT, *to[1:], "--json"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["distill"]["steps"] == 3
    assert document["distill"]["after"]["rows"] == 29, "a tenth of 299 different lines"
    assert [row["name"].split(".")[2] for row in document["swap"]["rows"]] == ["1", "2"]
    assert (document["swap"]["macs_after"] < document["swap"]["macs_before"]) == (to[0] == "external")
    assert f"{out}: opened by AutoModel.from_pretrained after import tokenmix.register" in said.err
    assert sorted(path.name for path in out.iterdir()) == [
        "1_Pooling",
        "config.json",
        "distill.json",
        "model.safetensors",
        "modules.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    modes = {path.stat().st_mode & 0o777 for path in out.iterdir() if path.is_file()}
    assert modes == {0o666 & ~current_umask()}
    code = """
import sys, json, torch, tokenmix.register
from transformers import AutoModel, AutoTokenizer
model, tokenizer = AutoModel.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
print(json.dumps(model(**tokenizer("w1 w2 w3", return_tensors="pt")).last_hidden_state[0, :, 0].tolist()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        env={"PYTHONPATH": str(SRC), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    import tokenmix.register  # noqa: F401

    model = transformers.AutoModel.from_pretrained(out)
    here = model(torch.tensor([[3, 4, 5]])).last_hidden_state[0, :, 0].tolist()
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(here, abs=1e-5)
    # What was converted is a folder like any other.
    assert main([*words[:1], str(out), *words[2:5], "0", *words[6:8], "--out", str(tmp_path / "all"), *SHORT]) == 0
    kinds = [
        type(layer.attention).__name__
        for layer in transformers.AutoModel.from_pretrained(tmp_path / "all").encoder.layer
    ]
    assert len(set(kinds)) == 1


def current_umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_no_steps_replace_and_measure(encoder: Path, texts: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["distill", str(encoder), "--to", "less", "--text", str(texts), "--out", str(tmp_path / "less"), *SHORT]
    assert main([*words, "--steps", "0", "--json", "--output", "tokens", "--loss", "mse"]) == 0
    fidelity = json.loads(capsys.readouterr().out)["distill"]["before"]
    assert fidelity["cosine"] == pytest.approx(1, abs=1e-5)
    assert fidelity["rows"] > 29, "tokens"


def test_the_seed_decides_all(encoder: Path, texts: Path, tmp_path: Path, capsys: Any) -> None:
    found = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        words = ["distill", str(encoder), "--to", "em", "--text", str(texts), "--out", str(tmp_path / name), *SHORT]
        assert main([*words, "--seed", seed, "--json"]) == 0
        found.append([p["loss"] for p in json.loads(capsys.readouterr().out)["distill"]["curve"]])
    assert found[0] == found[1]
    assert found[0] != found[2]


class Lengths:
    """A tokenizer that gives lengths, to see what is in a batch."""

    def __call__(self, texts: list[str], **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"ids": torch.tensor([int(text) for text in texts])}


def test_batches_have_every_text_once_and_texts_of_like_length() -> None:
    texts = ["1" * (i % 9 + 1) for i in range(97)]
    torch.manual_seed(0)
    batches = TextBatches(Lengths(), texts, 8, 16)
    first = [batch["ids"] for batch in batches]
    assert len(first) == len(batches) == 13
    assert sorted(torch.cat(first).tolist()) == sorted(int(text) for text in texts)
    assert all(len({len(str(i)) for i in ids.tolist()}) <= 2 for ids in first)
    assert [ids.tolist() for ids in first] != [batch["ids"].tolist() for batch in batches]
    assert torch.cat([batch["ids"] for batch in batches.in_order()]).tolist() == [int(text) for text in texts]


def test_held_out_texts_are_not_learned() -> None:
    texts = [str(i) for i in range(100)]
    learned, kept = split_texts(texts, 500, seed=3)
    assert len(kept) == 10
    assert sorted(learned + kept) == sorted(texts)
    assert split_texts(texts, 4, seed=3)[1] == kept[:4]
    assert split_texts(texts, 500, seed=4)[1] != kept


def test_layers_of_a_text_model_are_ranked(encoder: Path, texts: Path, capsys: Any) -> None:
    words = ["swap", str(encoder), "--to", "external", "--rank", "--text", str(texts), "--steps", "2"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["layers"]) == 3
    assert document["frontier"][0]["fidelity"]["cosine"] == pytest.approx(1, abs=1e-5)
    assert [point["count"] for point in document["frontier"]] == [0, 1, 2, 3]
    assert main(words) == 0
    assert "the best layer first" in capsys.readouterr().out


@pytest.mark.parametrize("validation", [0, 16])
def test_layers_of_a_run_are_ranked(validation: int, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    config = {"model": "vit_nano", "model_kwargs": {"depth": 2}, "data": "digits", "limit": 96, "limit_eval": 16}
    train(make_config(**config, max_steps=2, batch_size=16, threads=1, validation=validation, out=run), quiet=True)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in run.iterdir())
    capsys.readouterr()
    assert main(["swap", str(run), "--to", "gating", "--rank", "--steps", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {layer["name"] for layer in document["layers"]} == {"blocks.0.mixer", "blocks.1.mixer"}
    assert document["frontier"][0]["fidelity"]["rows"] == (16 if validation else 32)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in run.iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--to", "extrnal"], "unknown mixer 'extrnal'; did you mean external"),
        (["--layers", "3"], "there is no layer 3; the model has layers 0 to 2"),
        (["--layers", "a"], "'a' is not a layer; give numbers from 0 as in 3-5 or 0,2,4"),
        (["--layers", "2-1"], "'2-1' is not a layer"),
        (["--steps", "-1"], "steps must be at least 0, got -1"),
        (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--threads", "0"], "threads must be at least 1"),
        (["--lr", "nan"], "lr must be a finite number, got nan"),
        (["--text", "nothing.txt"], "nothing.txt"),
        (["--text", "few.txt"], "few.txt has 1 different lines; give at least 20"),
        (["--out", "full"], "full exists and is not empty; remove it, or give another --out"),
        (["--mixer-kwargs", "slots=3"], "has no argument 'slots'"),
        (["--loss", "l2"], "cannot be 'l2'"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: list[str],
    message: str,
    encoder: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.txt").write_text("one")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    options = {"--to": "external", "--text": str(texts), "--out": "new"} | {changes[0]: changes[1]}
    words = ["distill", str(encoder), *(word for option in options.items() for word in option)]
    assert message in refused(capsys, *words)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("nowhere", "no folder nowhere; give a local one with config.json, weights and tokenizer"),
        ("empty", "empty has no config.json; give the folder of a model of Hugging Face"),
        ("broken", "broken cannot be opened by transformers"),
    ],
)
def test_a_folder_that_is_none_is_refused(
    folder: str, message: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "bert", "auto_map": {"AutoModel": "evil--x.Y"}}')
    words = ["distill", folder, "--to", "external", "--text", str(texts), "--out", "new"]
    assert message in refused(capsys, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["swap", "vit_nano", "--to", "external", "--rank"],
            "--rank needs weights and data, and vit_nano is no folder",
        ),
        (["swap", "vit_nano", "--to", "external", "--text", "x"], "--text goes with --rank"),
        (["swap", "ENCODER", "--to", "external", "--rank"], "is a model without data; give --text FILE"),
        (["swap", "ENCODER", "--to", "external", "--rank", "--steps", "0"], "steps must be at least 1"),
    ],
)
def test_what_cannot_be_ranked_is_refused(words: list[str], message: str, encoder: Path, capsys: Any) -> None:
    assert message in refused(capsys, *(str(encoder) if word == "ENCODER" else word for word in words))


def test_a_folder_of_transformers_is_swapped_and_is_no_run(encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["swap", str(encoder), "--to", "linear", "--where", "*.[01].*"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["num_tokens"] for row in document["rows"]] == [20, 20]
    assert document["macs_after"] < document["macs_before"]
    assert main([*words, "--img-size", "32"]) == 2
    assert "omit --img-size" in capsys.readouterr().err
    assert main(["eval", str(encoder)]) == 2
    assert "is a model of transformers, not a run" in capsys.readouterr().err


def test_an_image_model_of_transformers_needs_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    assert main(["swap", str(tmp_path), "--to", "external", "--json"]) == 0
    assert [row["num_tokens"] for row in json.loads(capsys.readouterr().out)["rows"]] == [17, 17]
