"""Corpora from files in every layout, what is held out of them, the named ones if cached, and bad files."""

import codecs
import json
from pathlib import Path

import pytest

from tokenmix.errors import UserError
from tokenmix.lab.data import fetch_data, list_data
from tokenmix.lab.data.lookup import short_name, with_absolute_paths
from tokenmix.lab.tasks.text import corpus
from tokenmix.lab.tasks.text.corpus import load_text
from tokenmix.lab.tasks.text.files import choose_test, is_test


def sides(spec: str) -> tuple[list[str], list[str]]:
    found = load_text(spec)
    again = list(found.train)
    assert again == list(found.train), "a corpus can be read as often as wanted"
    return again, list(found.test)


def test_the_last_tenth_of_a_file_is_held_out(tmp_path: Path):
    lines = [f"This is the line with number {i:03}.\n" for i in range(100)]
    (tmp_path / "a.txt").write_text("".join(lines))
    train, test = sides(f"text:{tmp_path / 'a.txt'}")
    assert train == ["".join(lines[:90])]
    assert test == ["".join(lines[90:])]


@pytest.mark.parametrize("several", [False, True])
def test_lines_that_end_as_in_windows_are_the_same_text(several: bool, tmp_path: Path):
    found = []
    for end in ("\n", "\r\n"):
        folder = tmp_path / str(len(end))
        for name in ("train/a.txt", "test/b.txt") if several else ("a.txt",):
            lines = [f"This is the line with number {i:03} of {name}.{end}" for i in range(100)]
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_bytes("".join(lines).encode())
        found.append(sides(f"text:{folder}" if several else f"text:{folder / 'a.txt'}"))
    assert found[0] == found[1]


def test_a_long_file_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "PIECE", 100)
    (tmp_path / "a.txt").write_text("".join(f"number {i:03}\n" for i in range(100)))
    train, _ = sides(f"text:{tmp_path / 'a.txt'}")
    assert len(train) == 9
    assert all(piece.endswith("\n") for piece in train)


def test_a_document_longer_than_memory_is_cut_at_blanks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "PIECE", 10)
    for text in ("", "short", "some words and then some", "x" * 35, "words\n" * 9):
        found = list(corpus.pieces([text]))
        assert "".join(found) == text
        assert all(len(piece) <= 20 for piece in found)
    assert list(corpus.pieces(["some words and then"])) == ["some words and then"]
    assert list(corpus.pieces(["some words and then some more"])) == ["some ", "words and ", "then some more"]


def test_a_tenth_of_a_folder_is_held_out_and_copies_stay_together(tmp_path: Path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"story {i % 10}")
    train, test = sides(f"text:{tmp_path}")
    assert len(train) == 18
    assert len(test) == 2
    assert not set(train) & set(test)


def test_parts_of_a_folder_are_used(tmp_path: Path):
    for part, words in (("train", "learn this"), ("validation", "test that")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "a.txt").write_text(words)
    assert sides(f"text:{tmp_path}") == (["learn this"], ["test that"])


def test_tables(tmp_path: Path):
    rows = [f"row {i}, with a comma" for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": row}) for row in rows))
    (tmp_path / "a.csv").write_text("body,n\n" + "\n".join(f'"{row}",1' for row in rows))
    (tmp_path / "t").mkdir()
    for part in ("train", "test"):
        (tmp_path / "t" / f"{part}.jsonl").write_text(json.dumps({"text": part}))
    found = sides(f"jsonl:{tmp_path / 'a.jsonl'}#body")
    assert found == sides(f"csv:{tmp_path / 'a.csv'}#body")
    assert sorted(found[0] + found[1]) == sorted(rows)
    assert 5 < len(found[1]) < 40
    assert sides(f"jsonl:{tmp_path / 't'}") == (["train"], ["test"])


def test_digest_follows_the_contents(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_text("one\n" * 20)
    first = load_text(f"text:{file}").digest
    assert load_text(f"text:{file}").digest == first
    file.write_text("two\n" * 20)
    assert load_text(f"text:{file}").digest != first


BAD = {
    "latin.txt": ("text:{}", "caf\xe9\n".encode("latin-1"), "line 1: byte 0xe9 at offset 3 is not UTF-8"),
    "second.txt": ("text:{}", b"good\n\xff\n", "line 2: byte 0xff at offset 5"),
    "wide.txt": ("text:{}", codecs.BOM_UTF16_LE + "a".encode("utf-16-le"), "is UTF-16; convert it"),
    "empty.txt": ("text:{}", b"", "is empty"),
    "mac.csv": ("csv:{}#t", b"t,u\ra,b\r", "ends its lines with CR alone; convert it"),
    "bad.jsonl": ("jsonl:{}#t", b'{"t": \n', "line 1 is not JSON"),
    "list.jsonl": ("jsonl:{}#t", b"[1]\n", "is a JSON list, not an object"),
    "other.jsonl": ("jsonl:{}#t", b'{"u": "a"}\n', "no column 't'; it has 'u'"),
    "number.jsonl": ("jsonl:{}#t", b'{"t": 3}\n', "'t' is 3, not text"),
    "head.csv": ("csv:{}#t", b"t,u\n", "has no rows"),
    "wide.csv": ("csv:{}#t", b"t,u\n1,2,3\n", "line 2 has 3 fields, the header 2"),
    "short.csv": ("csv:{}#t", b"t,u\n1\n", "line 2 has 1 fields, the header 2"),
    "twice.csv": ("csv:{}#t", b"t,t\n1\n", "line 2 has 1 fields, the header 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_told_with_place_and_remedy(tmp_path: Path, name: str):
    spec, raw, message = BAD[name]
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError, match=message) as caught:
        sides(spec.format(tmp_path / name))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_several_that_cannot_be_read_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"the text number {i}\n")
    (tmp_path / "latin.txt").write_bytes(b"good\n" + "caf\xe9\n".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    corpus = load_text(f"text:{tmp_path}")
    for _ in range(2):
        assert len([*corpus.train, *corpus.test]) == 20
    said = capsys.readouterr().err
    assert said.count("left out") == 2
    assert "latin.txt, line 2: byte 0xe9" in said
    assert "empty.txt is empty" in said
    assert "(2 so far)" in said


HOSTILE_ROWS = [
    '{"t": 1e400}',
    '{"t": Infinity}',
    '{"t": ' + "9" * 5000 + "}",
    "[" * 20_000,
    '{"t": "\\ud800"}',
    '{"t": null}',
    "null",
    "{}",
    '{"t": ["a"]}',
    '{"t": "a',
]


def test_rows_that_cannot_be_used_are_left_out_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "a.jsonl"
    good = [f'{{"t": "text {i} \\ud83d\\ude00"}}' for i in range(50)]
    file.write_text("\n".join([HOSTILE_ROWS[0], *good, *HOSTILE_ROWS]))
    corpus = load_text(f"jsonl:{file}#t")
    texts = [*corpus.train, *corpus.test]
    assert sorted(texts) == sorted(f"text {i} \N{GRINNING FACE}" for i in range(50))
    said = capsys.readouterr().err
    assert said.count("left out") == 10
    assert "line 1 is not JSON (the number 1e400)" in said
    file.write_text("\n".join([*HOSTILE_ROWS, *good]))
    with pytest.raises(UserError, match="line 1 is not JSON"):
        list(load_text(f"jsonl:{file}#t").train)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("text:/no/such", "does not exist"),
        ("text", "give --data text:PATH"),
        ("jsonl:", "give --data jsonl:PATH#column"),
        ("englisch", "did you mean english"),
        ("/tmp", "give text:/tmp"),
    ],
)
def test_unknown_corpora(spec: str, message: str):
    with pytest.raises(UserError, match=message):
        load_text(spec)


def test_parquet_needs_pyarrow_or_a_whole_file(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(UserError, match=r"tokenmix.parquet.|is truncated or not a parquet file"):
        list(load_text(f"parquet:{tmp_path / 'a.parquet'}").train)


def test_parquet(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [f"row {i}" for i in range(100)]
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet")
    train, test = sides(f"parquet:{tmp_path / 'a.parquet'}")
    assert sorted(train + test) == sorted(rows)


def test_sides_do_not_depend_on_case_or_blanks():
    assert is_test("A  word") == is_test("a word")
    share = sum(is_test(str(i)) for i in range(5000)) / 5000
    assert share == pytest.approx(0.1, abs=0.02)
    assert len(choose_test(str(i) for i in range(41))) == 5


def test_table_and_names(tmp_path: Path):
    rows = {row.name: row for row in list_data(tmp_path)}
    assert not rows["english"].cached
    assert rows["text"].cached
    with pytest.raises(UserError, match="unknown data set 'sotuu'; did you mean sotu"):
        fetch_data("sotuu")
    assert with_absolute_paths("jsonl:a/b.jsonl#text") == f"jsonl:{Path('a/b.jsonl').absolute()}#text"
    assert short_name("jsonl:a/b.jsonl#text") == "jsonl-b.jsonl"
