"""Labelled text in the user's tables, in GLUE's and SQuAD's published layouts, and the real sets if cached."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenmix.errors import UserError
from tokenmix.lab.data.indexed import make_loader
from tokenmix.lab.tasks.text.corpus import groups
from tokenmix.lab.tasks.text.files import is_test
from tokenmix.lab.tasks.text.labelled import EncodedText, LabelledText, Rows, load_labelled
from tokenmix.lab.tasks.text.questions import EncodedQuestions, Question, load_questions
from tokenmix.lab.tasks.text.tokenizer import train_tokenizer

TEXTS = [f"it is {word} number {i}" for i in range(60) for word in ("good", "bad")]


LEARNT = [(text, text.split()[2]) for text in TEXTS if not is_test(text)][:6]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([*TEXTS, "Who ran? The old fox, named Ödön, ran 12 miles."], "wordpiece", 110)


def table(folder: Path, rows: list[tuple[str, ...]], header: tuple[str, ...]) -> Path:
    path = folder / "a.csv"
    path.write_text("\n".join(",".join(row) for row in (header, *rows)))
    return path


def test_csv_and_jsonl(tmp_path: Path):
    path = table(tmp_path, [(text, text.split()[2]) for text in TEXTS], ("text", "label"))
    data = load_labelled(f"csv:{path}")
    assert data.classes == ["bad", "good"]
    assert len(data.train) + len(data.test) == len(TEXTS)
    assert not set(data.train.texts) & set(data.test.texts)
    assert [data.classes[label] for label in data.train.labels] == [text.split()[2] for text in data.train.texts]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"s": t, "y": t.split()[2]}) for t in TEXTS))
    same = load_labelled(f"jsonl:{tmp_path / 'a.jsonl'}#s,y")
    assert same.test.texts == data.test.texts
    limited = load_labelled(f"csv:{path}", limit=20, limit_eval=4)
    assert (len(limited.train), len(limited.test)) == (20, 4)
    assert torch.bincount(limited.train.labels).tolist() == pytest.approx([10, 10], abs=2)


def test_pairs_and_numbers(tmp_path: Path):
    rows = [(f"a {i}", f"b {i}", f"{i / 4}") for i in range(80)]
    data = load_labelled(f"csv:{table(tmp_path, rows, ('one', 'two', 'score'))}#one,two,score")
    assert (data.kind, data.classes, data.train.labels.dtype) == ("regression", [], torch.float32)
    assert data.train.pairs is not None
    assert [pair.replace("b", "a") for pair in data.train.pairs] == data.train.texts


def test_test_texts_that_are_training_texts_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for part, numbers in (("train", range(8)), ("test", range(6, 10))):
        (tmp_path / f"{part}.csv").write_text("text,label\n" + "".join(f"t {i},{i % 2}\n" for i in numbers))
    load_labelled(f"csv:{tmp_path}")
    assert "2 of 4 test texts are training texts too ('t 6'), so metrics say less" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "rows", "columns", "message"),
    [
        (("text", "label"), [("a", "x"), ("b", "y")], "text,class", "no column 'class'; it has 'text', 'label'"),
        (("text", "label"), [(f"a{i}", "x") for i in range(50)], "text,label", "every label of .* is 'x'"),
        (("text", "label"), [("b", "")], "text,label", "line 2: 'label' is '', not a label"),
        (("text", "label"), LEARNT, "text,label", "has no rows for testing"),
        (("text", "label"), [("a", "x")], "a,b,c,d", "names 4 columns"),
        (("text", "label"), [], "text,label", "has no rows"),
    ],
)
def test_bad_tables(tmp_path: Path, header: Any, rows: Any, columns: str, message: str):
    path = table(tmp_path, rows, header)
    with pytest.raises(UserError, match=message) as caught:
        load_labelled(f"csv:{path}#{columns}")
    assert "a.csv" in str(caught.value)


def test_unknown_labelled_sets():
    with pytest.raises(UserError, match="did you mean vader"):
        load_labelled("vadr")
    with pytest.raises(UserError, match="give --data glue:PATH/SST-2"):
        load_labelled("glue:")


GLUE = {
    "SST-2": ("sentence\tlabel", ['a "fine film \t1', "dull\t0"]),
    "CoLA": (None, ["gj04\t1\t\tHe ran.", "gj04\t0\t*\tRan he the."]),
    "MRPC": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", ["1\t1\t2\tHe ran.\tHe did run.", "0\t1\t2\tA.\tB."]),
    "QQP": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", ["0\t1\t2\tWho?\tWhom?\t1", "1\t3\t4\tA?\tB?\t0"]),
    "STS-B": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        ["0\tg\tf\ty\t1\tn\tn\tA plane.\tAn airplane.\t5.000", "1\tg\tf\ty\t1\tn\tn\tA.\tB.\t1.000"],
    ),
    "MNLI": (
        "index\tsentence1\tsentence2\tlabel1\tgold_label",
        ["0\tA.\tB.\tneutral\tneutral", "1\tC.\tD.\tx\tcontradiction", "2\tE.\tF.\tx\tentailment", "3\tG.\tH.\tx\t-"],
    ),
    "QNLI": ("index\tquestion\tsentence\tlabel", ["0\tWho?\tHe.\tentailment", "1\tWho?\tIt.\tnot_entailment"]),
    "RTE": ("index\tsentence1\tsentence2\tlabel", ["0\tA.\tB.\tentailment", "1\tC.\tD.\tnot_entailment"]),
}


@pytest.mark.parametrize("name", GLUE)
def test_glue(tmp_path: Path, name: str):
    header, rows = GLUE[name]
    (tmp_path / name).mkdir()
    for file in ("train.tsv", "dev_matched.tsv" if name == "MNLI" else "dev.tsv"):
        (tmp_path / name / file).write_text("\n".join([*([header] if header else []), *rows]) + "\n")
    data = load_labelled(f"glue:{tmp_path / name}")
    kept = 3 if name == "MNLI" else 2
    assert len(data.train) == len(data.test) == kept
    assert (data.train.pairs is None) == (name in ("SST-2", "CoLA"))
    expected = {
        "STS-B": [5.0, 1.0],
        "MNLI": [1, 2, 0],
        "QNLI": [0, 1],
        "RTE": [0, 1],
    }.get(name, [1, 0])
    assert data.train.labels.tolist() == expected
    first = {"SST-2": 'a "fine film ', "CoLA": "He ran.", "STS-B": "A plane."}
    assert data.train.texts[0] == first.get(name, data.train.texts[0])


@pytest.mark.parametrize(
    ("folder", "header", "row", "message"),
    [
        ("SST-2", "text\tlabel", "a\t1", "no column 'sentence'; it has 'text', 'label'"),
        ("SST-2", "sentence\tlabel", "a\tgood", "line 2: the label 'good' is none of 0, 1"),
        ("STS-B", "sentence1\tsentence2\tscore", "a\tb\thigh", "the score 'high' is not a number"),
        ("SST2", "sentence\tlabel", "a\t1", "did you mean SST-2"),
    ],
)
def test_bad_glue(tmp_path: Path, folder: str, header: str, row: str, message: str):
    (tmp_path / folder).mkdir()
    for file in ("train.tsv", "dev.tsv"):
        (tmp_path / folder / file).write_text(f"{header}\n{row}\n")
    with pytest.raises(UserError, match=message):
        load_labelled(f"glue:{tmp_path / folder}")


def test_encoded_text(tmp_path: Path, tokenizer: Any):
    rows = [(text, "bad " * (i % 7 + 1), str(i % 2)) for i, text in enumerate(TEXTS)]
    data = load_labelled(f"csv:{table(tmp_path, rows, ('a', 'b', 'y'))}#a,b,y")
    encoded = EncodedText(data.train, tokenizer, max_length=12)
    batch = encoded.read(torch.tensor([3, 0, 7]), 0)
    expected = tokenizer(data.train.texts[0], data.train.pairs[0], truncation="longest_first", max_length=12)  # type: ignore[index]
    length = int(batch["attention_mask"][1].sum())
    assert batch["input_ids"][1, :length].tolist() == expected["input_ids"]
    assert batch["token_type_ids"][1, :length].tolist() == expected["token_type_ids"]
    assert (batch["input_ids"][1, length:] == tokenizer.pad_token_id).all()
    assert batch["labels"].tolist() == data.train.labels[[3, 0, 7]].tolist()
    assert 0 < encoded.cut < len(encoded)
    loader = make_loader(encoded, batch_size=5, shuffle=False, seed=0)
    assert sum(len(b["index"]) for b in loader) == len(encoded) == len(data.train)
    with pytest.raises(UserError, match="give 5 or more"):
        EncodedText(data.train, tokenizer, max_length=4)


CONTEXT = "The old fox, named Ödön, ran 12 miles. " * 4 + "Then it slept."


def squad(folder: Path, answers: list[dict[str, Any]], version: str = "v2.0", **more: Any) -> str:
    asked = [
        {"id": "q1", "question": "Who ran?", "answers": answers, "is_impossible": False},
        {"id": "q2", "question": "Who flew?", "answers": [], "is_impossible": True},
    ]
    whole = {"data": [{"title": "x", "paragraphs": [{"context": CONTEXT, "qas": asked}]}], **more}
    for part in ("train", "dev"):
        (folder / f"{part}-{version}.json").write_text(json.dumps(whole))
    return f"squad:{folder}"


def test_squad_answers_are_found_again_in_the_parts(tmp_path: Path, tokenizer: Any):
    place = CONTEXT.rindex("12 miles")
    data = load_questions(squad(tmp_path, [{"text": "12 miles", "answer_start": place}]))
    assert data.unanswerable
    parts = EncodedQuestions(data.train, tokenizer, max_length=48, stride=16, max_question=10)
    assert set(parts.sample.tolist()) == {0, 1}
    batch = parts.read(torch.arange(len(parts)), 0)
    hits = 0
    for row, (sample, start, end) in enumerate(zip(parts.sample, batch["start_positions"], batch["end_positions"])):
        if start == 0:
            assert end == 0
            continue
        offsets = parts.offsets[row]
        assert sample == 0
        assert CONTEXT[offsets[start, 0] : offsets[end, 1]] == "12 miles"
        hits += 1
    assert hits >= 1
    covered = np.concatenate([o[o[:, 0] >= 0] for o, s in zip(parts.offsets, parts.sample) if s == 0])
    assert covered[:, 1].max() == len(CONTEXT), "the parts reach the end of the context"
    assert batch["input_ids"].shape[1] <= 48


WORDS = {
    "accent": ("Le caf\u00e9 est pr\u00e8s de l'h\u00f4tel.", "caf\u00e9"),
    "two accents": ("Ng\u01b0\u1eddi Vi\u1ec7t Nam", "Vi\u1ec7t"),
    "last": ("Il boit un caf\u00e9", "un caf\u00e9"),
    "hangul": ("\ud55c\uad6d \uc0ac\ub78c", "\ud55c\uad6d"),
    "ligature": ("The \ufb01ne print", "\ufb01ne"),
}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize(("kind", "size"), [("bpe", 400), ("unigram", 60), ("wordpiece", 90)])
@pytest.mark.parametrize("name", WORDS)
def test_answers_in_decomposed_text_are_found(name: str, kind: Any, size: int, form: Any):
    """Normalizers compose e and an accent, and give the place of the e alone."""
    context, answer = (unicodedata.normalize(form, text) for text in WORDS[name])
    tokenizer = train_tokenizer([context, unicodedata.normalize("NFC", context)] * 3, kind, size)
    question = Question("1", "?", context, ((answer, context.index(answer)),))
    parts = EncodedQuestions([question], tokenizer, max_length=120, stride=5, max_question=20)
    start, end = parts.spans[0].tolist()
    assert context[parts.offsets[0][start][0] : parts.offsets[0][end][1]].strip() == answer


def test_blocks_of_texts_are_encoded_as_all_at_once(monkeypatch: pytest.MonkeyPatch, tokenizer: Any):
    texts = LabelledText([*TEXTS[:30], "bad " * 40], [*TEXTS[30:60], "good " * 9], torch.zeros(31))
    asked = [Question(str(i), text, CONTEXT, (("Then", CONTEXT.index("Then")),)) for i, text in enumerate(TEXTS[:9])]
    encoded = [
        EncodedText(texts, tokenizer, max_length=12),
        EncodedQuestions(asked, tokenizer, max_length=90, stride=9),
    ]
    monkeypatch.setattr("tokenmix.lab.tasks.text.corpus.BLOCK", 100)
    again = [EncodedText(texts, tokenizer, max_length=12), EncodedQuestions(asked, tokenizer, max_length=90, stride=9)]
    for one, other in zip(encoded, again):
        assert len(one) == len(other)
        everything = torch.arange(len(one))
        for key, value in one.read(everything, 0).items():  # type: ignore[attr-defined]
            assert torch.equal(value, other.read(everything, 0)[key])  # type: ignore[attr-defined]
    assert encoded[0].cut == again[0].cut == 31  # type: ignore[attr-defined]
    assert encoded[1].sample.tolist() == again[1].sample.tolist()  # type: ignore[attr-defined]


def test_a_context_that_takes_too_much_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, tokenizer: Any):
    monkeypatch.setattr("tokenmix.lab.tasks.text.corpus.BLOCK", 10)
    with pytest.raises(UserError, match="the context of question '7' has 170 characters; split it"):
        EncodedQuestions([Question("7", "who?", CONTEXT, ())], tokenizer, max_length=90, stride=9)


def test_rows_are_neighbours_in_one_array():
    rows = Rows("b")
    for row in ([1, 2], [], [3]):
        rows.append(row)
    assert [row.tolist() for row in rows] == [[1, 2], [], [3]]
    assert list(groups([3, 1, 1, 9, 1], 4, int)) == [[3, 1], [1, 9], [1]]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"text": "12 miles", "answer_start": True}, "give text and a whole number"),
        ({"text": "12 miles", "answer_start": 9999}, "the context has .* characters"),
        ({"text": "12 miles", "answer_start": 0}, "there stands 'The old '"),
        ({"text": "12 miles", "answer_start": -3}, "question 'q1' has the answer '12 miles' at -3"),
    ],
)
def test_answers_outside_the_context(tmp_path: Path, answer: Any, message: str):
    with pytest.raises(UserError, match=message):
        load_questions(squad(tmp_path, [answer]))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("null", "has not SQuAD's layout"),
        ('{"id": 1, "question": "who?", "answers": [{"text": "a", "answer_start": Infinity}]}', "the number Infinity"),
        ('{"id": 1, "question": "who?", "answers": [{"text": "a", "answer_start": 1e400}]}', "the number 1e400"),
        ('{"id": 1, "question": "who?", "answers": [{"text": "a", "answer_start": "0"}]}', "and a whole number"),
        ('{"id": 1, "question": "who?", "answers": [{"text": 5, "answer_start": 0}]}', "give text"),
        ('{"id": 1, "question": 5, "answers": []}', "is not text"),
        ("[" * 20_000, "maximum recursion depth"),
        ("9" * 5000, "4300 digits"),
    ],
)
def test_hostile_questions(tmp_path: Path, asked: str, message: str):
    spec = squad(tmp_path, [])
    told = f'{{"data": [{{"paragraphs": [{{"context": "a b", "qas": [{asked}]}}]}}]}}'
    (tmp_path / "train-v2.0.json").write_text(told)
    with pytest.raises(UserError, match=message) as caught:
        load_questions(spec)
    assert "train-v2.0.json" in str(caught.value)


def test_bad_squad(tmp_path: Path, tokenizer: Any):
    with pytest.raises(UserError, match=r"has no train-v1.1.json"):
        load_questions(f"squad:{tmp_path}")
    spec = squad(tmp_path, [], data=[{"title": "x"}])
    with pytest.raises(UserError, match="has not SQuAD's layout"):
        load_questions(spec)
    (tmp_path / "train-v2.0.json").write_text('{"data": [\n')
    with pytest.raises(UserError, match=r"not JSON .*line 2"):
        load_questions(spec)
    with pytest.raises(UserError, match="must be more than the stride"):
        EncodedQuestions([], tokenizer, max_length=64, stride=60)
