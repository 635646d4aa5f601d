"""WordNet 3.0: glosses, definitions and example sentences of its synsets.

Fellbaum (ed.), "WordNet: An Electronic Lexical Database", 1998. The files' layout is that of wndb(5WN).
"""

import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from recipes.datasets.packages import debian_files
from tokenmix.lab.data.fetch import FetchError, check_digest, download, first_that_works
from tokenmix.lab.data.lookup import stored_path
from tokenmix.lab.data.store import Names, Stored, fetched

__all__ = ["NOUN_FILES", "Synset", "parse", "read_wordnet"]

HOME = "https://wordnetcode.princeton.edu/3.0/WNdb-3.0.tar.gz"
PACKAGE = "wordnet-base"
PARTS = ("noun", "verb", "adj", "adv")
CONTENT = "512500d3515c3ebb31bb9bce65910968272a93103d6d4687f99cefaa1f6e11ed"
"""SHA-256 of data.adj, data.adv, data.noun and data.verb, one after the other."""
NOUN_FILES = [
    "Tops",
    "act",
    "animal",
    "artifact",
    "attribute",
    "body",
    "cognition",
    "communication",
    "event",
    "feeling",
    "food",
    "group",
    "location",
    "motive",
    "object",
    "person",
    "phenomenon",
    "plant",
    "possession",
    "process",
    "quantity",
    "relation",
    "shape",
    "state",
    "substance",
    "time",
]
"""Names of the lexicographer files 3 to 28: the 26 topics that nouns are sorted into."""


@dataclass(frozen=True)
class Synset:
    """Words of one meaning.

    Attributes:
        part: noun, verb, adj or adv.
        file: number of its lexicographer file.
        words: that share the meaning, with blanks for underscores.
        gloss: definition and examples as printed.
    """

    part: str
    file: int
    words: tuple[str, ...]
    gloss: str

    @property
    def definition(self) -> str:
        """The gloss without its example sentences."""
        return re.split(r'[;:,]?\s*"', self.gloss, maxsplit=1)[0].strip(" ;")

    @property
    def examples(self) -> list[str]:
        """The example sentences, without their quotation marks."""
        return [text for found in re.findall(r'"([^"]+)"', self.gloss) if (text := found.strip())]


def read_wordnet(root: Path | None = None) -> tuple[list[Synset], str, str]:
    """All synsets in the order of the files, where they came from, and the checksum of their store; fetched once."""
    tensors, notes = fetched("wordnet", root, fetch_wordnet, "use your own text")
    names = Names(tensors["text"], tensors["ends"])
    synsets = []
    for index in range(len(names)):
        part, file, words, gloss = names[index].split("\t")
        synsets.append(Synset(part, int(file), tuple(words.split("|")), gloss))
    return synsets, f"WordNet 3.0: {notes['source']}, in {stored_path('wordnet', root)}", f"wordnet {len(names)}"


def fetch_wordnet(folder: Path) -> Stored:
    """From Princeton, else from the Debian package."""
    files, source = first_that_works(
        "WordNet 3.0 (7 MB)",
        [
            (HOME, partial(_from_home, folder)),
            (f"Debian package {PACKAGE}", partial(debian_files, PACKAGE, "usr/share/wordnet/data.*", CONTENT, folder)),
        ],
    )
    lines = {file.suffix[1:]: file.read_text("utf-8").splitlines() for file in files}
    synsets = (synset for part in PARTS for synset in parse(part, lines[part]))
    names = Names.of("\t".join((s.part, str(s.file), "|".join(s.words), s.gloss)) for s in synsets)
    return {"text": names.text, "ends": torch.as_tensor(names.ends)}, {"source": source}


def parse(part: str, lines: Iterable[str]) -> Iterator[Synset]:
    """The synsets of a data file; the licence in front is indented."""
    for line in lines:
        if line.startswith(" ") or not line.strip():
            continue
        fields, _, gloss = line.partition(" | ")
        _, file, _, count, *rest = fields.split(" ")
        words = [rest[2 * i] for i in range(int(count, 16))]
        # An adjective's position in the phrase stands behind it in brackets.
        cleaned = tuple(re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words)
        yield Synset(part, int(file), cleaned, " ".join(gloss.split()))


def _from_home(folder: Path) -> tuple[list[Path], str]:
    archive = download(HOME, folder / "wordnet.tar.gz")
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder / "home", filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise FetchError(f"{archive.name} is no readable archive ({error})") from None
    files = sorted((folder / "home" / "dict").glob("data.*"))
    check_digest(files, CONTENT)
    return files, HOME
