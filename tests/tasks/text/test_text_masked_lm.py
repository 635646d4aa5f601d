"""Masked-language modelling through the trainer, on a made language that a small model learns in seconds."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from predictions import check_predictions
from tokenmix.errors import UserError
from tokenmix.lab import cli
from tokenmix.lab.inspect import toeplitz_share
from tokenmix.lab.tasks.text.masked_lm import MaskedLM
from tokenmix.lab.train import trainer
from tokenmix.lab.train.checkpoint import read_weights
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.run import evaluate, predict, train
from tokenmix.lab.train.sources import make_config

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
ADJECTIVES, NOUNS, VERBS = ["old", "red", "great", "small"], ["cat", "dog", "king", "ship"], ["sees", "loves"]


def sentences(count: int) -> str:
    """The ADJECTIVE NOUN VERB the NOUN, where the verb follows from the first noun."""
    draw = random.Random(0)
    lines = []
    for _ in range(count):
        adjective, noun, other = draw.choice(ADJECTIVES), draw.choice(NOUNS), draw.choice(NOUNS)
        lines.append(f"the {adjective} {noun} {VERBS[noun in ('cat', 'dog')]} the {other} .")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMIX_DATA", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("text")
    (folder / "tiny.txt").write_text(sentences(2400))
    return make_config(
        task="masked-lm",
        model="gmlp_text_nano",
        model_kwargs=SMALL,
        data=f"text:{folder / 'tiny.txt'}",
        vocab_size=400,
        seq_len=16,
        batch_size=16,
        epochs=6,
        lr=1e-2,
        schedule="linear",
        opt_eps=1e-6,
        threads=1,
        device="cpu",
        log_every=5,
        checkpoint_every=7,
        limit_eval=60,
        validation=0,
    )


@pytest.fixture(scope="module")
def finished(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config.replace(out=tmp_path_factory.mktemp("finished") / "run"), quiet=True)


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [
            {k: v for k, v in row.items() if k not in ("seconds", "sequences_per_second")}
            for row in csv.DictReader(file)
        ]


def test_it_learns_the_language(finished: Path):
    metrics = result(finished)["metrics"]
    assert metrics["perplexity"] == pytest.approx(torch.tensor(metrics["loss"]).exp().item(), rel=1e-4)
    # A word that is drawn evenly from four has perplexity 4, and most are not drawn.
    assert metrics["perplexity"] < 6
    assert metrics["accuracy"] > 0.5
    assert result(finished)["macs"] > 0


def test_the_run_folder_is_enough(finished: Path):
    again = evaluate(finished, device="cpu")
    assert again["perplexity"] == pytest.approx(result(finished)["metrics"]["perplexity"], rel=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(finished / "tokenizer")
    assert tokenizer.mask_token == "[MASK]"
    data = json.loads((finished / "data.json").read_text())
    assert data["vocab_size"] == len(tokenizer)


def test_predict_fills_in_sentences_and_files(finished: Path, tmp_path: Path):
    (tmp_path / "some.txt").write_text("[MASK] old king sees the ship .\n\nthe red dog loves [MASK] king .\n")
    answers = predict(finished, ["the old dog loves [MASK] ship .", tmp_path / "some.txt"])
    assert len(answers) == 3
    assert all("the" in answer["top"] for answer in answers if "dog" in answer["text"])
    for answer in answers:
        assert answer["filled"].split() == answer["text"].replace("[MASK]", answer["label"]).split()
        assert max(answer["top"], key=answer["top"].get) == answer["label"]
        assert 0 < answer["probability"] == answer["top"][answer["label"]] <= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the old dog", r"command line: no \[MASK\] in 'the old dog'"),
        ("[MASK] " + "king " * 40, "tokens and the model takes 16; cut it"),
        ("nowhere.txt", r"no file nowhere\.txt"),
        (" ", "an empty text has no prediction"),
    ],
)
def test_texts_that_have_no_answer(finished: Path, text: str, message: str):
    with pytest.raises(UserError, match=message):
        predict(finished, [text])


def test_resuming_in_mid_epoch_is_bit_equal(config, tmp_path, monkeypatch):
    run, step, calls = tmp_path / "run", trainer.TrainingLoop.start_batch, [0]
    config = config.replace(epochs=2, batch_size=64)
    finished = train(config.replace(out=tmp_path / "finished"), quiet=True)

    def killed(self, *args):
        calls[0] += 1
        if calls[0] == 31:
            raise KeyError("killed")
        step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.TrainingLoop, "start_batch", killed)
        with pytest.raises(KeyError):
            train(config.replace(out=run), quiet=True)
    meta = json.loads((run / "checkpoints" / "last" / "meta.json").read_text())
    assert meta["progress"]["batch"] > 0, "killed and saved in mid-epoch"
    train(make_config(resume=run), quiet=True)
    expected, weights = read_weights(finished / "checkpoints" / "last"), read_weights(run / "checkpoints" / "last")
    assert all(torch.equal(value, weights[key]) for key, value in expected.items())
    assert rows(run) == rows(finished)


def test_gradient_checkpointing_changes_nothing(config, tmp_path):
    few = config.replace(max_steps=4, model_kwargs={**SMALL, "hidden_dropout_prob": 0.1})
    runs = [
        train(few.replace(out=tmp_path / name, grad_checkpointing=on), quiet=True)
        for name, on in (("kept", False), ("again", True))
    ]
    kept, again = (read_weights(run) for run in runs)
    assert all(torch.equal(value, again[key]) for key, value in kept.items())


def test_bf16_and_whole_words(config, tmp_path):
    run = train(
        config.replace(max_steps=4, precision="bf16-mixed", masking="whole-word", out=tmp_path / "run"),
        quiet=True,
    )
    assert result(run)["metrics"]["perplexity"] < 300


def test_another_run_is_a_start_of_another_length(config, finished, tmp_path, capsys):
    """The tokenizer comes along; shorter sequences see what they saw before."""
    shorter = config.replace(
        seq_len=12, init_from=finished, max_steps=1, lr=1e-9, min_lr=0.0, vocab_size=999, out=tmp_path / "run"
    )
    run = train(shorter, quiet=True)
    assert "starts fresh" not in capsys.readouterr().err
    tokens = [json.loads((folder / "data.json").read_text())["vocab_size"] for folder in (run, finished)]
    assert tokens[0] == tokens[1]
    tasks = [load_task(folder) for folder in (run, finished)]
    ids = tasks[0].tokenizer()("the old [MASK] loves", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        ours, theirs = (task.model(input_ids=ids).logits for task in tasks)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_tokenizer_of_another_vocabulary_is_refused(config, finished, tmp_path):
    other = train(config.replace(vocab_size=265, max_steps=1, out=tmp_path / "other"), quiet=True)
    with pytest.raises(UserError, match=r"a vocabulary of \d+ tokens and this tokenizer has 265; give its own by"):
        train(
            config.replace(init_from=finished, tokenizer=other / "tokenizer", out=tmp_path / "run"),
            quiet=True,
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gmlp_nano"}, "gmlp_nano is a model of image-classification.*gmlp_text_nano"),
        ({"mixup": 0.2}, "masked-lm has no option mixup, which is one of image-classification"),
        ({"model_kwargs": {"vocab_size": 9}}, "vocab_size=9 is set elsewhere; use --tokenizer"),
        ({"model_kwargs": {"depth": 9}}, "GMLPConfig has no field 'depth'"),
        ({"mask_prob": 1.5}, r"mask_prob must be in \(0, 1\), got 1.5"),
        ({"seq_len": 2}, "length of 2"),
        ({"tokenizer": Path("/nowhere")}, "no tokenizer folder '/nowhere'"),
    ],
)
def test_settings_that_cannot_be(config, tmp_path, changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        train(config.replace(out=tmp_path / "run", **changes), quiet=True)
    assert not (tmp_path / "run").exists()


def test_an_average_of_tied_weights_is_refused(config, tmp_path):
    with pytest.raises(UserError, match="ema would average tied parameters twice"):
        train(config.replace(out=tmp_path / "run", ema=0.9), quiet=True)


def test_export_and_inspect(finished: Path, tmp_path: Path, capsys):
    assert cli.main(["export", str(finished), "--format", "torch-export", "--out", str(tmp_path / "model.pt2")]) == 0
    assert cli.main(["inspect", str(finished), "--out", str(tmp_path / "seen")]) == 0
    told = json.loads((tmp_path / "seen" / "numbers.json").read_text())
    assert (told["text"], "file" in told) == (None, False)
    assert [row["toeplitz_share"] for row in told["blocks"]] == pytest.approx([1, 1]), "the default gate is Toeplitz"
    assert (tmp_path / "seen" / "gates.png").stat().st_size > 1000


def test_toeplitz_share_of_known_matrices():
    weights = torch.randn(19, generator=torch.Generator().manual_seed(0))
    place = torch.arange(10)
    toeplitz = weights[place[:, None] - place + 9]
    assert toeplitz_share(toeplitz) == pytest.approx(1)
    noise = torch.stack([torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) for i in range(8)])
    assert sum(map(toeplitz_share, noise)) / 8 == pytest.approx(2 / 65, abs=0.004)
    # Half of the variance of either.
    one, other = noise[0][:10, :10], toeplitz
    residual = one - torch.tensor([[one.diagonal(int(j - i)).mean() for j in place] for i in place])
    mixed = other / (other - other.mean()).norm() + residual / residual.norm()
    assert toeplitz_share(mixed) == pytest.approx(0.5, abs=1e-6)
    assert toeplitz_share(torch.ones(4, 4)) != toeplitz_share(torch.ones(4, 4)), "no variance, no share"


def test_the_loss_is_a_mean_over_places(config):
    """Not over sequences: a sequence with more masked positions weighs more."""
    data = MaskedLM.load_data(config)
    task = MaskedLM(MaskedLM.build_model(config, data.describe()), config, data.describe())
    batch = next(iter(data.test_batches(batch_size=4)))
    whole = task.loss(batch)[0]
    singles = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(4)]
    counts = torch.tensor([int((one["labels"] >= 0).sum()) for one in singles])
    expected = (torch.stack([task.loss(one)[0] for one in singles]) * counts).sum() / counts.sum()
    torch.testing.assert_close(whole, expected)


def test_predictions_are_kept(finished: Path):
    check_predictions(finished, {"perplexity", "loss", "accuracy"})
