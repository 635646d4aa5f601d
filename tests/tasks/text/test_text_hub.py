"""Sets of the hub: here folders in a form that `datasets` reads, since no test has a network."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmix.errors import UserError
from tokenmix.lab.tasks.text.corpus import load_text
from tokenmix.lab.tasks.text.labelled import load_labelled
from tokenmix.lab.tasks.text.questions import load_questions
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import make_config

ROWS = [{"sentence": f"it is {word} number {i}", "label": word} for i in range(60) for word in ("good", "bad")]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMIX_DATA", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        yield


def write(folder: Path, **parts: list[dict[str, Any]]) -> str:
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return f"hf:{folder}"


def test_labelled_text(tmp_path: Path):
    spec = write(tmp_path, train=ROWS[:100], validation=ROWS[100:110], test=ROWS[110:])
    data = load_labelled(spec)
    assert (len(data.train), len(data.test), data.classes) == (100, 10, ["bad", "good"])
    assert data.train.pairs is None
    assert data.test.texts == [row["sentence"] for row in ROWS[100:110]], "the test part often has no labels"
    assert load_labelled(f"{spec}#sentence,label").train.texts == data.train.texts
    assert "validation" in data.source


def test_classes_have_their_names_and_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As a hub's set has them: numbers in the rows, names in the header of the data card."""
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: '*.jsonl'\ndataset_info:\n  features:\n"
        "  - name: sentence\n    dtype: string\n  - name: label\n    dtype:\n      class_label:\n        names:\n"
        "          '0': up\n          '1': down\n---\n"
    )
    rows = [{**row, "label": i % 2} for i, row in enumerate(ROWS)]
    data = load_labelled(write(tmp_path, train=rows))
    assert data.classes == ["up", "down"]
    assert len(data.train) + len(data.test) == len(ROWS)
    assert not set(data.train.texts) & set(data.test.texts)
    left = load_labelled(write(tmp_path, train=[{**rows[0], "label": -1}, *rows[1:]]))
    assert len(left.train) + len(left.test) == len(ROWS) - 1
    assert "train, row 1: 'label' is None, not a label" in capsys.readouterr().err


def test_a_corpus_is_trained_on(tmp_path: Path):
    lines = [{"text": f"the cat number {i} sees the dog"} for i in range(200)]
    (tmp_path / "set").mkdir()
    spec = write(tmp_path / "set", train=lines[:150], test=lines[150:])
    corpus = load_text(spec)
    assert list(corpus.train) == [line["text"] for line in lines[:150]] == list(corpus.train)
    assert corpus.digest == load_text(spec).digest
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32}
    run = train(
        make_config(
            task="masked-lm",
            model="gmlp_text_nano",
            model_kwargs=small,
            data=spec,
            vocab_size=300,
            seq_len=16,
            batch_size=8,
            max_steps=2,
            device="cpu",
            threads=1,
            out=tmp_path / "run",
        ),
        quiet=True,
    )
    assert json.loads((run / "data.json").read_text())["source"].startswith(spec)


def test_questions(tmp_path: Path):
    rows = [
        {"id": str(i), "question": "who?", "context": f"fox {i} ran", "answers": {"text": ["fox"], "answer_start": [0]}}
        for i in range(4)
    ]
    rows[3]["answers"] = {"text": [], "answer_start": []}
    data = load_questions(write(tmp_path, train=rows, validation=rows[:2]))
    assert [len(data.train), len(data.test), data.unanswerable] == [4, 2, True]
    assert data.train[0].answers == (("fox", 0),)
    rows[0]["answers"] = {"text": ["dog"], "answer_start": [0]}
    with pytest.raises(UserError, match=r"train, row 1: question '0' has the answer 'dog' at 0, but there stands"):
        load_questions(write(tmp_path, train=rows, validation=rows[:2]))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hf", "give --data hf:NAME"),
        ("hf:no-such-author/no-such-set", r"cannot be read \(.*\); check name and network, or use a file"),
        ("hf:{}#sentence,mood", "row 1 has no column 'mood'; it has 'sentence', 'label'"),
        ("hf:{}#a,b,c,d", "names 4 columns"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, spec: str, message: str):
    write(tmp_path, train=ROWS)
    with pytest.raises(UserError, match=message) as caught:
        load_labelled(spec.format(tmp_path))
    assert "\n" not in str(caught.value)


def test_pairs_with_glues_metrics(tmp_path: Path):
    (tmp_path / "glue").mkdir()
    rows = [{"one": f"a {i}", "two": f"b {i}", "label": i % 2, "idx": i} for i in range(20)]
    (tmp_path / "glue" / "README.md").write_text(
        "---\nconfigs:\n- config_name: mrpc\n  data_files:\n  - split: train\n    path: train.jsonl\n"
        "  - split: validation\n    path: validation.jsonl\n---\n"
    )
    data = load_labelled(f"{write(tmp_path / 'glue', train=rows, validation=rows[:6])}:mrpc")
    assert (data.train.texts[3], data.metrics, len(data.test)) == ("a 3", ("accuracy", "f1"), 6)
    assert data.train.pairs is not None
    assert data.train.pairs[3] == "b 3"


def test_questions_need_squads_columns(tmp_path: Path):
    with pytest.raises(UserError, match="1 parts with the columns sentence, label; questions need"):
        load_questions(write(tmp_path, train=ROWS))
