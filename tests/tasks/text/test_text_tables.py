"""Tables as other programs write them: stray quotation marks, spellings of a label, damaged and unpacking Parquet."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tokenmix.errors import UserError
from tokenmix.lab.tasks.text import files
from tokenmix.lab.tasks.text.corpus import load_text
from tokenmix.lab.tasks.text.labelled import load_labelled


def parts(folder: Path, ending: str, content: bytes) -> str:
    for part in ("train", "test"):
        (folder / f"{part}.{ending}").write_bytes(content)
    return f"{ending}:{folder}"


STRAY = {
    "before other text": ('"5 inch screen,neg\nnice,pos\nugly,neg\nthe 7" one,pos\n', "expected after"),
    "before a field": ('"5 inch screen,neg\nnice,pos\nugly,neg\nthe 7",pos\n', "rows of their own"),
    "before a quoted field": ('"5 inch screen,neg\nnice,pos\n"ugly, and bad",neg\nthe one,pos\n', "expected after"),
    "never": ('"5 inch screen,neg\nnice,pos\nugly,neg\nthe one,pos\n', "unexpected end"),
}


@pytest.mark.parametrize("name", STRAY)
def test_a_stray_quotation_mark_costs_its_own_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    rows, reason = STRAY[name]
    data = load_labelled(parts(tmp_path, "csv", f"text,label\ngood film,pos\n{rows}fine,neg\n".encode()))
    assert len(data.train) == 5
    assert [text for text in data.train.texts if "\n" in text or "screen" in text] == []
    said = capsys.readouterr().err
    assert "train.csv, line 3: the quoted field that ends on line" in said
    assert reason in said


def test_a_stray_quotation_mark_in_the_last_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = 'pos,good film\nneg,"5 inch screen\npos,the 7"\nneg,fine\n'
    data = load_labelled(parts(tmp_path, "csv", f"label,text\n{rows}".encode()) + "#text,label")
    assert data.train.texts == ["good film", 'the 7"', "fine"]
    assert "train.csv, line 3: the quoted field that ends on line 4" in capsys.readouterr().err


def test_quoted_fields_may_span_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    texts = ["one\ntwo", "a, b\n\nc", 'he said "no, thanks"\nand left', "x, y\nz", "first, last\nthen, again, more"]
    rows = "".join('"{}",{}\r\n'.format(text.replace('"', '""'), i % 2) for i, text in enumerate(texts))
    spec = parts(tmp_path, "csv", f'text,label\r\n{rows}"Nice" product,1\r\n'.encode())
    data = load_labelled(spec)
    assert data.train.texts == [*texts, "Nice product"]
    assert data.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert "left out" not in capsys.readouterr().err


def test_a_header_that_never_ends_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match=r"train\.csv, line 1: the quoted field that ends on line 3"):
        load_labelled(parts(tmp_path, "csv", b'"text,label\na,b\nc,d\n'))


def test_spellings_of_a_label_are_one_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = ["a,pos", "b, pos", "c,neg ", "d,neg", "e,Neg"]
    data = load_labelled(parts(tmp_path, "csv", "\n".join(["text,label", *rows]).encode()))
    assert data.classes == ["Neg", "neg", "pos"]
    assert "the label ' pos' is read as 'pos', and 1 others likewise" in capsys.readouterr().err
    values = ['"1"', "1", "1.0", '"1.00"', "0", "0.0", '"01"', "true"]
    rows = [f'{{"text": "t{i}", "label": {value}}}' for i, value in enumerate(values)]
    data = load_labelled(parts(tmp_path, "jsonl", "\n".join(rows).encode()))
    assert data.classes == ["0", "01", "1", "True"]
    assert "the label '1.0' is read as '1', and 2 others likewise" in capsys.readouterr().err


def test_forms_of_unicode_are_one_label(tmp_path: Path):
    rows = "text,label\na,caf\u00e9\nb,cafe\u0301\nc,tea\n"
    assert load_labelled(parts(tmp_path, "csv", rows.encode())).classes == ["caf\u00e9", "tea"]


def test_an_infinite_number_is_no_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = load_labelled(write(tmp_path, {"text": ["a", "b", "c"], "label": [1.0, 0.0, float("inf")]}))
    assert (data.classes, len(data.train)) == (["0", "1"], 2)
    assert "row 3: 'label' is inf, not a label" in capsys.readouterr().err


def test_one_spelling_is_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = load_labelled(parts(tmp_path, "csv", b"text,label\na,1.0\nb,0.0\n"))
    assert data.classes == ["0", "1"]
    assert "is read as" not in capsys.readouterr().err


def write(folder: Path, columns: dict[str, Any], **options: Any) -> str:
    for part in ("train", "test"):
        parquet.write_table(pa.table(columns), folder / f"{part}.parquet", **options)
    return f"parquet:{folder}"


def test_a_label_that_is_not_a_number_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    labels = pa.array([1.0, 0.0, float("nan"), None, 0.0, 1.0], from_pandas=False)
    data = load_labelled(write(tmp_path, {"text": list("abcdef"), "label": labels}))
    assert (data.classes, data.train.texts) == (["0", "1"], list("abef"))
    assert "train.parquet, row 3: 'label' is nan, not a label" in capsys.readouterr().err
    data = load_labelled(parts(tmp_path, "csv", b"text,label\na,1\nb,NaN\nc,0\n"))
    assert (data.classes, data.train.texts) == (["0", "1"], ["a", "c"])


def test_integers_of_one_part_are_the_floats_of_the_other(tmp_path: Path):
    """pandas writes integers as floats where one is missing."""
    parquet.write_table(pa.table({"text": ["a", "b"], "label": [0, 1]}), tmp_path / "train.parquet")
    parquet.write_table(pa.table({"text": ["a", "b", "c"], "label": [0.0, 1.0, None]}), tmp_path / "test.parquet")
    data = load_labelled(f"parquet:{tmp_path}")
    assert (data.classes, data.test.labels.tolist()) == (["0", "1"], [0, 1])


def invalid() -> pa.Array:
    words = pa.array([b"good", b"\xff\xfe", b"fine", b"ok"], pa.binary())
    return pa.Array.from_buffers(pa.string(), 4, words.buffers())


DAMAGED = {
    "text": ({"text": invalid(), "label": list("abab")}, "row 2: 'text' is damaged (UnicodeDecodeError"),
    "label": ({"text": list("wxyz"), "label": invalid()}, "row 2: 'label' is damaged (UnicodeDecodeError"),
    "date": (
        {"text": list("wxyz"), "label": pa.array([0, 2**62, 0, 1], pa.timestamp("us"))},
        "row 2: 'label' is damaged (OverflowError",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("dictionary", [True, False])
def test_a_value_that_cannot_be_read_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, dictionary: bool
):
    columns, said = DAMAGED[name]
    data = load_labelled(write(tmp_path, columns, use_dictionary=dictionary))
    assert len(data.train) == 3
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("columns", [{"text": [["a"]], "label": ["b"]}, {"text": ["a"], "label": [{"b": 1}]}])
def test_columns_of_lists_are_refused_before_they_are_read(tmp_path: Path, columns: Any):
    with pytest.raises(UserError, match=r"neither text nor a label; name another column"):
        load_labelled(write(tmp_path, columns))
    with pytest.raises(
        UserError, match=r"no column 'other'; it has 'text', 'label': name columns after the path, as in #"
    ):
        load_text(f"{write(tmp_path, columns)}#other").train.__iter__().__next__()


def repeated(count: int, value: str) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value]))


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"text": repeated(400, "a" * 30_000), "label": ["a", "b"] * 200}, {}),
        ({"text": pa.array(["a" * 11_000_000, "b"]), "label": ["a", "b"]}, {"use_dictionary": False}),
    ],
)
def test_a_small_file_does_not_unpack_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: Any, options: Any
):
    """2.6 kB stood for 40 GB of text."""
    monkeypatch.setattr(files, "LARGE", 10_000_000)
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet", compression="zstd", **options)
    assert (tmp_path / "a.parquet").stat().st_size < 20_000
    with pytest.raises(UserError, match=r"a\.parquet unpacks to .* bytes and more"):
        load_labelled(f"parquet:{tmp_path / 'a.parquet'}")


def test_other_columns_of_a_table_are_not_read(tmp_path: Path):
    columns = {"picture": [b"\xff" * 10] * 2, "list": [[1], [2]], "text": ["a", "b"], "label": [True, False]}
    assert load_labelled(write(tmp_path, columns)).classes == ["False", "True"]


def test_long_values_are_not_printed_whole(tmp_path: Path):
    with pytest.raises(UserError) as error:
        load_text(
            parts(tmp_path, "jsonl", json.dumps({"text": list(range(10_000))}).encode())
        ).train.__iter__().__next__()
    assert len(str(error.value)) < 300


def test_a_name_that_is_not_text_is_one_line(tmp_path: Path):
    """Arrow does not check names; Python's error was a traceback."""
    write(tmp_path, {"text": list("abcd"), "label": list("wxyz")})
    damaged = (tmp_path / "train.parquet").read_bytes().replace(b"label", b"l\xffbel")
    (tmp_path / "train.parquet").write_bytes(damaged)
    with pytest.raises(UserError, match=r"train\.parquet is truncated or not a parquet file \(UnicodeDecodeError"):
        load_labelled(f"parquet:{tmp_path}")


@pytest.mark.parametrize("separator", ["\t", ";"])
def test_other_separators(tmp_path: Path, separator: str):
    rows = ["text,label ", "a good film,pos", '"a bad, long one",neg', "fine,pos"]
    content = "\n" + "\n".join(separator.join(row.rsplit(",", 1)) for row in rows)
    data = load_labelled(parts(tmp_path, "csv", content.encode()))
    assert data.train.texts == ["a good film", "a bad, long one", "fine"]
    assert data.train.labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize("header", ["text,label,label", "text,text,label"])
def test_a_column_that_is_there_twice_is_one_line(tmp_path: Path, header: str):
    spec = parts(tmp_path, "csv", f"{header}\na,b,c\nd,e,f\n".encode())
    with pytest.raises(UserError, match="two columns have this name"):
        load_labelled(spec)


def test_a_label_that_may_mean_none_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = load_labelled(parts(tmp_path, "csv", b"text,label\na,pos\nb,neg\nc,N/A\n"))
    assert data.classes == ["N/A", "neg", "pos"]
    assert "the label 'N/A' is a class; remove its rows if it means that there is none" in capsys.readouterr().err
