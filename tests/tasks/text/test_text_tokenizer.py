"""Tokenizers: round trip, special tokens, the same in every process, and clear errors."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, normalizers

from tokenmix.errors import UserError
from tokenmix.lab import cli
from tokenmix.lab.tasks.text.corpus import Corpus, growth, tokenized, tokenizing
from tokenmix.lab.tasks.text.labelled import EncodedText, LabelledText
from tokenmix.lab.tasks.text.questions import EncodedQuestions, Question
from tokenmix.lab.tasks.text.tokenizer import SPECIAL, load_tokenizer, save_tokenizer, train_tokenizer

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
        "from tokenmix.lab.tasks.text.tokenizer import train_tokenizer\n"
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


def altered(folder: Path, **fields: Any) -> Path:
    """A tokenizer whose tokenizer.json says something else."""
    path = save_tokenizer(train_tokenizer(TEXTS, "bpe", 300), folder) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def replaced(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


MANY = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}] * 1000
GROWING: dict[str, tuple[dict[str, Any], str]] = {
    "normalizer": ({"normalizer": replaced("b" * 10_000)}, "makes 10,000 bytes of one character"),
    "steps": ({"normalizer": {"type": "Sequence", "normalizers": [replaced("aaaa")] * 9}}, "makes 262,144 bytes"),
    "prepended": ({"normalizer": {"type": "Prepend", "prepend": "a" * 999}}, "makes 1,000 bytes"),
    "decoder": ({"decoder": replaced("b" * 10_000)}, "makes 10,000 bytes"),
    "special": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [*MANY, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
            }
        },
        "makes 1,000 special tokens",
    ),
    "repeated": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2000,
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {},
            }
        },
        "repeats a text 2,000 times",
    ),
    "charsmap": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "cannot be read"),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_tokenizer_does_not_multiply_its_text(tmp_path: Path, name: str):
    fields, said = GROWING[name]
    with pytest.raises(UserError, match=said):
        load_tokenizer(altered(tmp_path / "made", **fields))


def test_usual_normalizers_are_no_growth():
    steps = [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Prepend("\u2581")]
    assert growth(normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])) == 2 * 4 * 3
    assert growth(None) == growth(normalizers.NFC()) == 1


def test_numbers_of_pieces_have_no_gaps(tmp_path: Path):
    folder = altered(tmp_path / "made")
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["model"]["vocab"]["zz"] = 10**6
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(UserError, match="has the id 1000000, but"):
        load_tokenizer(folder)


def test_a_file_neither_cuts_nor_fills_texts(tmp_path: Path):
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    fill = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    folder = altered(tmp_path / "made", truncation=cut, padding={**fill, "pad_to_multiple_of": None})
    tokenizer = load_tokenizer(folder)
    encoded = tokenizer.backend_tokenizer.encode_batch([TEXTS[0]])[0]
    assert encoded.ids == train_tokenizer(TEXTS, "bpe", 300)(TEXTS[0])["input_ids"]


HARD = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}


def test_a_regex_that_gives_up_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """The library panics, with an error that is no Exception, and writes a backtrace to file descriptor 2."""
    tokenizer = load_tokenizer(altered(tmp_path / "made", pre_tokenizer=HARD))
    texts = ["a fox", "x" * 1000]
    with pytest.raises(UserError, match=r"cannot read these texts \(PanicException: .*retry-limit"):
        EncodedText(LabelledText(texts, None, torch.zeros(2)), tokenizer, max_length=8)
    with pytest.raises(UserError, match="cannot read these questions"):
        EncodedQuestions([Question("1", "who?", texts[1], ())], tokenizer, max_length=64, stride=8, max_question=8)
    with pytest.raises(UserError, match="cannot read this text"):
        tokenized(Corpus(texts, texts, [], "", digest="0"), tokenizer, tmp_path / "cache")
    assert "panicked" not in capfd.readouterr().err


def test_what_others_write_to_stderr_stays(capfd: pytest.CaptureFixture[str]):
    with tokenizing("no matter"):
        os.write(2, b"before\nthread 'x' panicked at a.rs:1:\nwhy\nnote: see\nafter\n")
    assert capfd.readouterr().err == "before\nafter\n"


def test_other_errors_pass():
    for error in (KeyboardInterrupt, ValueError, MemoryError):
        with pytest.raises(error), tokenizing("no matter"):
            raise error


def test_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    words = ["train-tokenizer", "--data", f"text:{tmp_path / 'a.txt'}", "--kind", "wordpiece", "--vocab-size", "150"]
    assert cli.main([*words, "--out", str(tmp_path / "made")]) == 0
    assert "wordpiece tokenizer with" in capsys.readouterr().out
    assert load_tokenizer(tmp_path / "made")("fox")["input_ids"]
    assert cli.main([*words, "--out", str(tmp_path / "made")]) == 2
    assert "not empty" in capsys.readouterr().err
