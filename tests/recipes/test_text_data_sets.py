"""Texts of our recipes: how they are read and split, the sets themselves if cached, and the TF-IDF baseline."""

import tarfile
from pathlib import Path

import pytest
import torch

from recipes.datasets import packages
from recipes.datasets.text import wordnet
from recipes.datasets.text.corpora import _html_text, _without_markup
from recipes.datasets.text.labelled import balanced, sense_pairs
from recipes.datasets.text.wordnet import Synset, parse
from tokenmix.errors import UserError
from tokenmix.lab.data import list_data
from tokenmix.lab.data.fetch import FetchError
from tokenmix.lab.data.lookup import stored_path
from tokenmix.lab.registry import DATA_SETS
from tokenmix.lab.tasks.text.corpus import load_text
from tokenmix.lab.tasks.text.labelled import load_labelled


def test_they_are_listed_in_a_checkout(tmp_path: Path):
    rows = {row.name: row for row in list_data(tmp_path)}
    assert rows["english"].kinds == ("corpus",)
    assert not rows["english"].cached
    assert rows["vader"].kinds == ("labelled-text",)


def test_an_unknown_domain():
    with pytest.raises(UserError, match="unknown domain of vader 'films'"):
        load_labelled("vader:films")


def test_markup_is_stripped():
    assert _without_markup("In <FI>the<Fi> beginning<CM><RF>begin: or, start<Rf>.") == "In the beginning."
    page = "<html><head><title>x</title></head><body><p>One <b>two</b>\nthree</p><p>Four &amp; five</p></body></html>"
    assert _html_text(page) == "One two three\nFour & five"


def test_wordnet_lines():
    line = '00001740 03 n 02 object 0 physical_object(p) 1 001 ~ 00001930 n 0000 | a thing; "a ball"; "one" \n'
    found = list(parse("noun", ["  1 the licence", line]))
    assert [(s.file, s.words, s.definition, s.examples) for s in found] == [
        (3, ("object", "physical object"), "a thing", ["a ball", "one"])
    ]


def test_a_forged_wordnet_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With as many synsets as the true one has, in archives that can be read."""
    (tmp_path / "usr" / "share" / "wordnet").mkdir(parents=True)
    line = "00001740 03 n 01 {} 0 000 | {}\n"
    for part, count in {"noun": 82_115, "verb": 13_767, "adj": 18_156, "adv": 3_621}.items():
        text = "".join(line.format(f"word{i}", "forged") for i in range(count))
        (tmp_path / "usr" / "share" / "wordnet" / f"data.{part}").write_text(text)

    def download(url: str, path: Path) -> Path:
        with tarfile.open(path, "w:gz") as tar:
            tar.add(tmp_path / "usr" / "share" / "wordnet", "dict")
        return path

    monkeypatch.setattr(wordnet, "download", download)
    monkeypatch.setattr(packages, "apt_package", lambda package, folder: (tmp_path, "1:3.0-37"))
    with pytest.raises(FetchError, match=r"princeton.*has sha256.*Debian package wordnet-base: .*has sha256"):
        wordnet.fetch_wordnet(tmp_path)


def test_sense_pairs_are_balanced_for_each_word():
    senses = [
        Synset("noun", 3, ("bank",), 'money; "the bank lends"; "banks are closed"; "go to the bank"'),
        Synset("noun", 3, ("bank", "shore"), 'land; "the bank of a river"; "the shore is flat"'),
        Synset("verb", 29, ("bank",), 'trust; "bank on it"'),
    ]
    pairs = sense_pairs(senses)
    assert sum(label == "same" for *_, label in pairs) == 3
    assert sum(label == "different" for *_, label in pairs) == 3
    assert {word for word, *_ in pairs} == {"bank"}
    kept = balanced([*pairs, ("lone", "a lone wolf", "a lone star", "same")])
    assert len(kept) == 6
    assert "lone" not in {word for word, *_ in kept}


@pytest.mark.parametrize(
    ("name", "stored", "train", "test"),
    [
        ("vader:movie", "vader", 8097, 1973),
        ("vader:movie,tweets", "vader", 8097, 707),
        ("wordnet-pairs", "wordnet", 13647, 3398),
    ],
)
def test_real_set_if_cached(name: str, stored: str, train: int, test: int):
    if not stored_path(stored).exists():
        pytest.skip(f"{stored} is not in the cache; `tokenmix data get {name.partition(':')[0]}` fetches it")
    data = load_labelled(name)
    assert (len(data.train), len(data.test)) == (train, test)
    assert not set(data.train.texts) & set(data.test.texts)
    if data.train.pairs:
        words = [{text.partition(":")[0] for text in part.texts} for part in (data.train, data.test)]
        assert not words[0] & words[1]
        assert torch.bincount(data.test.labels).tolist() == [test // 2, test // 2]


@pytest.mark.parametrize(("name", "train", "test"), [("sotu", 209, 24), ("bible", 1099, 90), ("moby-dick", 126, 14)])
def test_named_corpus_if_cached(name: str, train: int, test: int):
    if not all(stored_path(stored).exists() for stored in DATA_SETS[name].stored):
        pytest.skip(f"{name} is not in the cache; `tokenmix data get {name}` fetches it")
    corpus = load_text(name)
    learnt, held = list(corpus.train), list(corpus.test)
    assert (len(learnt), len(held)) == (train, test)
    assert not set(learnt) & set(held)
    # One file of moby-dick's package holds the whole book.
    assert max(map(len, learnt)) < 300_000
    assert not any("<" in document for document in held)
