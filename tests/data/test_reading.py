"""Files of strangers: what is no regular file is not opened, and what is not JSON is one line."""

import os
import socket
from pathlib import Path

import pytest

from tokenmix.errors import UserError
from tokenmix.lab.data.reading import LeftOut, parse_json, read_file


def make(path: Path, kind: str) -> Path:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("pipe", "is a pipe or a device"),
        ("device", "is a pipe or a device"),
        ("socket", "is a pipe or a device"),
        ("folder", "is a folder"),
        ("empty", "is empty"),
        ("missing", "does not exist"),
    ],
)
def test_only_regular_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str):
    monkeypatch.chdir(tmp_path)  # The path of a socket is short.
    with pytest.raises(UserError, match=message):
        read_file(make(Path("x"), kind))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 20_000,
        "9" * 5000,
        "1e400",
        "-1e400",
        "NaN",
        "Infinity",
        "-Infinity",
        '"\\ud800"',
        b"\xff\xfe\x00",
        "",
        '{"a": 1,}',
        b'"\\uDFFF"',
    ],
)
def test_no_json(text: str | bytes):
    with pytest.raises(UserError, match=r"^here is not JSON \(.*\); write or fetch it again$"):
        parse_json(text, "here")


def test_json():
    assert parse_json(b'{"a": [1, 2.5, null, "\\ud83d\\ude00"]}', "here") == {"a": [1, 2.5, None, "\N{GRINNING FACE}"]}


def test_what_is_left_out_is_counted_and_the_first_ten_are_named(capsys: pytest.CaptureFixture[str]):
    left_out = LeftOut()
    for _ in range(2):
        for i in range(30):
            left_out.add(i, f"{i} is damaged")
    assert len(left_out) == 30
    assert capsys.readouterr().err.splitlines()[-1] == "tokenmix: left out: 9 is damaged (10 so far)"
