"""Models of transformers in text classification: trained, compared, continued and opened without their folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CamembertConfig,
    CamembertForMaskedLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    MPNetConfig,
    MPNetForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

import tokenmix
from tokenmix.errors import UserError
from tokenmix.lab import cli
from tokenmix.lab.tasks.text.question_answering import _encoded
from tokenmix.lab.tasks.text.questions import Question
from tokenmix.lab.tasks.text.task import inputs_of
from tokenmix.lab.tasks.text.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.load import load_run, load_task
from tokenmix.lab.train.run import evaluate, predict, train
from tokenmix.lab.train.sources import make_config

SMALL: dict[str, Any] = {"vocab_size": 300, "max_position_embeddings": 40}
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert": (BertConfig, BertForMaskedLM, BERT),
    "roberta": (RobertaConfig, RobertaForMaskedLM, {**BERT, "type_vocab_size": 1}),
    "distilbert": (DistilBertConfig, DistilBertForMaskedLM, {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reviews whose label is one of their words, and a folder of each kind of model."""
    root = tmp_path_factory.mktemp("theirs")
    rows = [f"On day {i} a {('bad', 'good')[i % 2]} small movie,{('neg', 'pos')[i % 2]}" for i in range(120)]
    (root / "reviews.csv").write_text("\n".join(["text,label", *rows]))
    asked = [
        {"id": str(i), "question": "which day?", "answers": [{"text": str(i), "answer_start": 7}]} for i in range(120)
    ]
    paragraphs = [{"context": row.split(",")[0], "qas": [question]} for row, question in zip(rows, asked)]
    for part in ("train", "dev"):
        (root / f"{part}-v1.1.json").write_text(json.dumps({"data": [{"title": "days", "paragraphs": paragraphs}]}))
    tokenizer = train_tokenizer([row.split(",")[0] for row in rows], vocab_size=300)
    for name, (config, model, sizes) in KINDS.items():
        torch.manual_seed(0)
        save_tokenizer(tokenizer, root / name)
        model(config(**SMALL, **sizes, pad_token_id=tokenizer.pad_token_id)).save_pretrained(root / name)
    return root


def settings(folder: Path, out: Path, kind: str = "bert", **changes: Any) -> TrainConfig:
    given: dict[str, Any] = {
        "task": "text-classification",
        "model": f"transformers:{folder / kind}",
        "data": f"csv:{folder / 'reviews.csv'}#text,label",
        "seq_len": 16,
        "max_steps": 2,
        "batch_size": 16,
        "threads": 1,
        "device": "cpu",
        "out": out,
    }
    return make_config(**{**given, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_with_the_weights_of_the_folder_and_opens_without_it(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / kind
    shutil.copytree(folder / kind, theirs)
    made = settings(tmp_path, tmp_path / "run", kind, pretrained=True, lr=1e-12, min_lr=0.0)
    run = train(made.replace(data=f"csv:{folder / 'reviews.csv'}#text,label"), quiet=True)
    expected = KINDS[kind][1].from_pretrained(theirs).base_model.state_dict()
    shutil.rmtree(theirs)
    found = load_run(run)[0].base_model.state_dict()  # type: ignore[union-attr]
    torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=0, atol=1e-6)
    assert evaluate(run)["samples"] == 8
    assert predict(run, ["a good movie"])[0]["label"] in ("neg", "pos")


def other(task: str, folder: Path, out: Path, kind: str = "bert", **changes: Any) -> TrainConfig:
    """Settings of a task without classes."""
    data = {"masked-lm": f"csv:{folder / 'reviews.csv'}#text", "question-answering": f"squad:{folder}"}
    return settings(folder, out, kind, **{"task": task, "data": data[task], "seq_len": 32, **changes})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["masked-lm", "question-answering"])
def test_tasks_without_classes_take_them(task: str, kind: str, folder: Path, tmp_path: Path) -> None:
    more = {"doc_stride": 4} if task == "question-answering" else {}
    made = other(task, folder, tmp_path / "run", kind, pretrained=True, lr=1e-12, min_lr=0.0, **more)
    run = train(made, quiet=True)
    model: Any = load_run(run)[0]
    expected = KINDS[kind][1].from_pretrained(folder / kind)
    # The head of a masked-language model is the folder's own as well.
    whole = expected.state_dict() if task == "masked-lm" else expected.base_model.state_dict()
    found = model.state_dict() if task == "masked-lm" else model.base_model.state_dict()
    torch.testing.assert_close({name: found[name] for name in whole}, whole, rtol=0, atol=1e-6)
    metrics = evaluate(run)
    if task == "masked-lm":
        assert metrics["perplexity"] > 1
        assert predict(run, ["a [MASK] movie"])[0]["filled"]
    else:
        assert 0 <= metrics["f1"] <= 1
        assert predict(run, ["which day?\tOn day 3 a bad small movie"])[0]["answer"] is not None


def test_the_loss_is_theirs(folder: Path, tmp_path: Path) -> None:
    task = load_task(train(other("masked-lm", folder, tmp_path / "run"), quiet=True))
    data = type(task).load_data(task.config, like=task.data)
    batch = next(iter(data.test_batches(batch_size=4)))
    names = ("input_ids", "attention_mask", "labels")
    theirs = task.model(**{name: batch[name] for name in names}).loss
    torch.testing.assert_close(task.loss(batch)[0], theirs)


def test_a_run_without_pretrained_has_new_weights_and_continues(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = settings(folder, out, "bert", max_steps=None, epochs=2)
    whole = load_run(train(given.replace(out=tmp_path / "whole"), quiet=True))[0].state_dict()
    theirs = BertForMaskedLM.from_pretrained(folder / "bert").state_dict()
    name = "bert.encoder.layer.0.output.dense.weight"
    assert not torch.equal(whole[name], theirs[name])
    from tokenmix.lab.train import trainer

    class Stop(trainer.StopRequest):
        steps = 0

        def ask(self) -> Any:
            Stop.steps += 1
            return lambda: Stop.steps == 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "StopRequest", Stop)
        with pytest.raises(KeyboardInterrupt):
            train(given, quiet=True)
    found = load_run(train(make_config(resume=out), quiet=True))[0].state_dict()
    torch.testing.assert_close(found, whole, rtol=0, atol=0)


def test_a_comparison_swaps_their_attention(folder: Path, tmp_path: Path) -> None:
    found = tokenmix.compare(
        task="text-classification",
        mixers=["external", "linear"],
        model=f"transformers:{folder / 'bert'}",
        pretrained=True,
        data=f"csv:{folder / 'reviews.csv'}#text,label",
        seq_len=16,
        max_steps=2,
        batch_size=16,
        threads=1,
        controls=True,
        out=tmp_path / "out",
        quiet=True,
    )
    assert [variant.name for variant in found.results.variants] == ["original", "external", "linear", "identity"]
    assert all(variant.macs for variant in found.results.variants)
    task = load_task(tmp_path / "out" / "runs" / "external-seed0")
    assert "ExternalAttention" in repr(task.model)


@pytest.mark.parametrize("task", ["masked-lm", "question-answering"])
def test_a_comparison_on_a_task_without_classes(task: str, folder: Path, tmp_path: Path) -> None:
    given = other(task, folder, tmp_path / "out")
    found = tokenmix.compare(
        task=task,
        mixers=["external"],
        model=given.model.model,
        pretrained=True,
        data=given.data.data,
        seq_len=32,
        max_steps=2,
        batch_size=16,
        threads=1,
        out=tmp_path / "out",
        quiet=True,
        **({"doc_stride": 4} if task == "question-answering" else {}),
    )
    assert [variant.name for variant in found.results.variants] == ["original", "external", "identity"]
    assert all(variant.macs and variant.score is not None for variant in found.results.variants)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 64}, "takes 40 tokens, got --seq-len 64; give --seq-len 40 or less"),
        ({"model": "transformers:nowhere"}, "nowhere has no config.json; give the folder that save_pretrained wrote"),
        ({"task": "point-classification", "data": "clouds:x"}, "point-classification has no option seq_len"),
        ({"tokenizer": None, "model_kwargs": {"hidden_size": 15}}, "cannot be built"),
    ],
)
def test_mistakes_are_one_line(changes: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        train(settings(folder, tmp_path / "run", **changes), quiet=True)
    with pytest.raises(UserError, match="takes 40 tokens, got --seq-len 64"):
        train(other("question-answering", folder, tmp_path / "run", seq_len=64), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_segment_that_a_model_lacks_is_one_line() -> None:
    model = BertForMaskedLM(BertConfig(**SMALL, **BERT))
    with pytest.raises(UserError, match="segment 7 for a model of 2 segments"):
        inputs_of({"input_ids": torch.tensor([[1]]), "token_type_ids": torch.tensor([[7]])}, model)


def test_a_model_that_a_recipe_names_is_not_opened(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'task = "text-classification"\nmodel = "transformers:{folder / "bert"}"\nseq_len = 16\n')
    words = [
        "train",
        "--config",
        str(recipe),
        "--data",
        f"csv:{folder / 'reviews.csv'}#text,label",
        "--out",
        f"{tmp_path}/run",
    ]
    assert cli.main(words) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", [{"hidden_size": 10**7}, {"model_type": "nothing"}, {"hidden_size": 100_000}])
def test_a_strangers_architecture_is_one_line(change: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    run = train(settings(folder, tmp_path / "run"), quiet=True)
    file = run / "data.json"
    data = json.loads(file.read_text())
    data["architecture"] |= change
    file.write_text(json.dumps(data))
    with pytest.raises(UserError):
        evaluate(run)


@pytest.mark.parametrize("kind", ["camembert", "mpnet", "deberta", "gpt2"])
def test_models_with_other_positions_and_forward_passes(kind: str, folder: Path, tmp_path: Path) -> None:
    """Positions that begin after the padding's, and forward passes that the meta device cannot run."""
    tokenizer, shared = load_tokenizer(folder / "bert"), {**SMALL, **BERT, "pad_token_id": 1}
    model: Any = {
        "camembert": lambda: CamembertForMaskedLM(CamembertConfig(**shared)),
        "mpnet": lambda: MPNetForMaskedLM(MPNetConfig(**shared)),
        "deberta": lambda: DebertaV2ForMaskedLM(DebertaV2Config(**shared, relative_attention=True)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=40, n_embd=16, n_layer=2, n_head=2)),
    }[kind]()
    model.config.pad_token_id = tokenizer.pad_token_id if kind == "gpt2" else 1
    save_tokenizer(tokenizer, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    given = {"model": f"transformers:{tmp_path / 'model'}", "max_steps": 1}
    after = kind in ("camembert", "mpnet")
    if after:
        with pytest.raises(UserError, match="takes 38 tokens, got --seq-len 39; give --seq-len 38 or less"):
            train(settings(folder, tmp_path / "long", **given, seq_len=39), quiet=True)
    run = train(settings(folder, tmp_path / "run", **given, seq_len=38 if after else 40), quiet=True)
    assert json.loads((run / "result.json").read_text())["macs"] > 0


def test_texts_and_questions_that_are_cut_are_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(settings(folder, tmp_path / "run", seq_len=6, max_steps=1), quiet=True)
    assert "109 of 109 texts have more than 6 tokens (--seq-len) and were cut" in capsys.readouterr().err
    predict(run, ["good", "On day 3 a good small movie"])
    assert "1 of 2 texts have more than 6 tokens (--seq-len) and were cut" in capsys.readouterr().err
    tokenizer, context = load_tokenizer(folder / "bert"), "On day 3 a good small movie"
    words = "which day " * 2
    for length in (60, 20):
        found = _encoded([Question("1", words, context, ())], tokenizer, length, 5)
        assert found.cut == (length == 20)
        assert ("1 of 1 questions have more than 6 tokens" in capsys.readouterr().err) == (length == 20)
