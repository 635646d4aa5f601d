"""A run folder of text: its columns, its model outside of PyTorch's eager mode, and in transformers' form."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from predictions import check_predictions
from tokenmix.lab.tasks.text.tokenizer import load_tokenizer
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.export import export
from tokenmix.lab.train.load import load_run
from tokenmix.lab.train.run import predict, train
from tokenmix.lab.train.sources import make_config

SETTINGS: dict[str, Any] = {
    "model": "amlp_text_nano",
    "vocab_size": 300,
    "seq_len": 24,
    "batch_size": 16,
    "max_steps": 6,
    "model_kwargs": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32},
    "lr": 1e-2,
    "epochs": 2,
    "threads": 1,
    "device": "cpu",
    "log_every": 1,
}
ANIMALS = ["cat", "dog", "cow"]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMIX_DATA", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def classification(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("classes")
    rows = "".join(f"here is {i} and a {ANIMALS[i % 3]},{'odd' if i % 2 else 'even'}\n" for i in range(120))
    (folder / "some.csv").write_text("text,label\n" + rows)
    data = f"csv:{folder / 'some.csv'}"
    return make_config(task="text-classification", data=data, out=folder / "run", **SETTINGS)


@pytest.fixture(scope="module")
def classifier(classification: TrainConfig) -> Path:
    return train(classification, quiet=True)


@pytest.fixture(scope="module")
def answerer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    asked = []
    for i in range(60):
        context = f"one day {i} a {ANIMALS[i % 3]} came ."
        answers = [{"text": "came", "answer_start": context.index("came")}]
        asked.append({"context": context, "qas": [{"id": str(i), "question": "what ?", "answers": answers}]})
    for part in ("train", "dev"):
        (folder / f"{part}-v1.1.json").write_text(json.dumps({"data": [{"paragraphs": asked}]}))
    settings = {**SETTINGS, "doc_stride": 4, "max_steps": 2}
    return train(
        make_config(task="question-answering", data=f"squad:{folder}", out=folder / "run", **settings), quiet=True
    )


@pytest.mark.one_fast
@pytest.mark.parametrize("file_format", ["torch-export", "onnx"])
@pytest.mark.parametrize("kind", ["classifier", "answerer"])
def test_exported_models_answer_alike(request: pytest.FixtureRequest, kind: str, file_format: Any, tmp_path: Path):
    """`export` compares the answers itself, for a batch of another size with one padded text."""
    written = export(request.getfixturevalue(kind), file_format, tmp_path / "model")
    assert written.stat().st_size > 10_000


def test_columns_have_the_name_of_the_unit(classifier: Path):
    with (classifier / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    result = json.loads((classifier / "result.json").read_text())
    assert int(rows[-1]["sequences"]) == result["sequences"] == 6 * 16
    assert {"sequences_per_second"} == {name for name in (*rows[0], *result) if name.endswith("_per_second")}


class Killed(BaseException):
    """Stands for the end of the process."""


def test_a_pipeline_of_transformers_gives_our_answers(classifier: Path, tmp_path: Path):
    load_run(classifier)[0].save_pretrained(tmp_path)  # type: ignore[operator]
    load_tokenizer(classifier / "tokenizer").save_pretrained(tmp_path)
    text = "here is 7 and a dog " * 10
    ours = predict(classifier, [text])[0]
    answer = pipeline("text-classification", model=str(tmp_path), device="cpu")(text, truncation=True)[0]
    assert answer["label"] == ours["label"]
    assert answer["score"] == pytest.approx(ours["probability"], abs=1e-5)
    shutil.rmtree(tmp_path)


def test_predictions_are_kept(answerer: Path):
    check_predictions(answerer, {"exact_match", "f1"})
