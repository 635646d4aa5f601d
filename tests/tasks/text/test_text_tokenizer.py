"""Tokenizers: round trip, special tokens, the same in every process, and clear errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmix import cli
from tokenmix.errors import UserError
from tokenmix.tasks.text.tokenizer import SPECIAL, load_tokenizer, save_tokenizer, train_tokenizer

TEXTS = [f"The quick brown fox no. {i} jumps over the lazy dog's café." for i in range(40)]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_pieces_and_form(tmp_path: Path, kind: Any):
    tokenizer = train_tokenizer(TEXTS, kind, 300)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 4]) == list(SPECIAL)
    assert len(tokenizer) <= 300
    folder = save_tokenizer(tokenizer, tmp_path / "tokenizer")
    assert {p.name for p in folder.iterdir()} >= {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer"], "nothing is left next to"
    again = load_tokenizer(folder)
    for sentence in ("The lazy fox jumps.", "The café no. 7"):
        ids = again(sentence)["input_ids"]
        assert ids == tokenizer(sentence)["input_ids"]
        assert (ids[0], ids[-1]) == (2, 3)
        assert str(again.decode(ids, skip_special_tokens=True)).strip() == sentence
    pair = again("a fox", "a dog")
    assert pair["token_type_ids"].index(1) == pair["input_ids"].index(3) + 1
    assert again("fox [MASK] dog")["input_ids"].count(again.mask_token_id) == 1
    with pytest.raises(UserError, match="exists and is not empty"):
        save_tokenizer(tokenizer, folder)


def test_the_same_in_every_process():
    code = (
        "from tokenmix.tasks.text.tokenizer import train_tokenizer\n"
        "for kind in ('bpe', 'wordpiece'):\n"
        f"    print(train_tokenizer({TEXTS!r}, kind, 290).backend_tokenizer.to_str())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = [train_tokenizer(TEXTS, kind, 290).backend_tokenizer.to_str() for kind in ("bpe", "wordpiece")]
    assert told.splitlines() == here


def test_lowercase():
    for kind in ("bpe", "wordpiece", "unigram"):
        tokenizer = train_tokenizer(TEXTS, kind, 300, lowercase="yes")
        assert tokenizer("THE FOX")["input_ids"] == tokenizer("the fox")["input_ids"]


def test_bytes_are_never_unknown():
    tokenizer = train_tokenizer(TEXTS, "bpe", 300)
    assert tokenizer.unk_token_id not in tokenizer("漢字 ☃")["input_ids"]
    assert tokenizer.unk_token_id in train_tokenizer(TEXTS, "wordpiece", 300)("漢字")["input_ids"]


@pytest.mark.parametrize(
    ("texts", "kind", "size", "message"),
    [
        (TEXTS, "bpe", 100, "give 261 or more"),
        (TEXTS, "wordpiece", 20, "is too small for .* characters"),
        (TEXTS, "word", 300, "bpe, wordpiece or unigram"),
        ([], "bpe", 300, "there is no text"),
        ([" ", "\n"], "unigram", 300, "there is no text"),
    ],
)
def test_impossible_tokenizers(texts: list[str], kind: Any, size: int, message: str):
    with pytest.raises(UserError, match=message):
        train_tokenizer(texts, kind, size)


def test_incomplete_folders(tmp_path: Path):
    with pytest.raises(UserError, match="there is no tokenizer folder"):
        load_tokenizer(tmp_path / "none")
    folder = save_tokenizer(train_tokenizer(TEXTS, "bpe", 300), tmp_path / "made")
    config = folder / "tokenizer_config.json"
    (folder / "special_tokens_map.json").unlink()
    whole = json.loads(config.read_text())
    config.write_text(json.dumps({k: v for k, v in whole.items() if k != "mask_token"}))
    with pytest.raises(UserError, match="names no mask_token"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(folder)
    config.unlink()
    with pytest.raises(UserError, match=r"has no tokenizer_config.json; copy it whole"):
        load_tokenizer(folder)


def test_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    words = ["train-tokenizer", "--data", f"text:{tmp_path / 'a.txt'}", "--kind", "wordpiece", "--vocab-size", "150"]
    assert cli.main([*words, "--out", str(tmp_path / "made")]) == 0
    assert "wordpiece tokenizer with" in capsys.readouterr().out
    assert load_tokenizer(tmp_path / "made")("fox")["input_ids"]
    assert cli.main([*words, "--out", str(tmp_path / "made")]) == 2
    assert "not empty" in capsys.readouterr().err
