"""Real labelled text by name: rated sentences, definitions by topic, and words in two contexts.

Hutto and Gilbert, "VADER", ICWSM 2014. Pilehvar and Camacho-Collados, "WiC", arXiv:1808.09121, for the third task; its
pairs here are made from WordNet's own example sentences.
"""

import hashlib
import io
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path

from recipes.datasets.packages import members, pypi_archive
from recipes.datasets.text.wordnet import NOUN_FILES, Synset, read_wordnet
from tokenmix.errors import UserError, unknown_name
from tokenmix.lab.data.fetch import FetchError
from tokenmix.lab.data.lookup import DataRequest, stored_path
from tokenmix.lab.data.store import Names, Stored, fetched
from tokenmix.lab.tasks.text.files import is_test
from tokenmix.lab.tasks.text.labelled import LabelledData, build_labelled

__all__ = ["DOMAINS", "load_definitions", "load_sense_pairs", "load_vader", "sense_pairs"]

SHA256 = "6ea3b53f1835a1bb9125cbb9872e8740bd506ab1d9f2266d0c63109b858d71af"
DOMAINS = {
    "movie": "movieReviewSnippets",
    "editorial": "nytEditorialSnippets",
    "tweets": "tweets",
    "amazon": "amazonReviewSnippets",
}
NEUTRAL = 0.5
"""Mean ratings, from -4 to 4, that are nearer to 0 are neither positive nor negative."""
SHARE = 5
"""One in so many is for testing."""


def load_vader(request: DataRequest) -> LabelledData:
    """Positive or negative. Sentences of one review, and equal sentences, lie on the same side."""
    wanted = request.variant.split(",") if request.variant else list(DOMAINS)
    for domain in wanted:
        if domain not in DOMAINS:
            raise unknown_name("domain of vader", domain, DOMAINS)
    if request.variant and len(wanted) > 2:
        raise UserError(
            f"{request.spec!r} names {len(wanted)} domains; give one, or that of training and that of testing"
        )
    tensors, notes = fetched("vader", request.root, _fetch_vader, "use your own: --data csv:PATH#text,label")
    names = Names(tensors["text"], tensors["ends"])
    rows = [names[i].split("\t") for i in range(len(names))]
    train_on, test_on = (wanted[0], wanted[-1]) if request.variant else ("", "")
    train = [r for r in rows if not _held(r) and (not train_on or r[0] == train_on)]
    test = [r for r in rows if _held(r) and (not test_on or r[0] == test_on)]
    source = f"VADER: {notes['source']}, in {stored_path('vader', request.root)}"
    learnt, tested = ([(r[3], _sign(r[2])) for r in part] for part in (train, test))
    return build_labelled(request.spec, learnt, tested, source, classes=SIGNS)


SIGNS = ("negative", "positive")


def _sign(rating: str) -> str:
    return SIGNS[float(rating) > 0]


def _held(row: list[str]) -> bool:
    return is_test(f"{row[0]} {row[1]}", SHARE)


def _fetch_vader(folder: Path) -> Stored:
    archive, source = pypi_archive("vaderSentiment", "3.3.1", SHA256, folder)
    inner = [raw for _, raw in members(archive, "hutto_ICWSM_2014.tar.gz")]
    if not inner:
        raise FetchError(f"{archive.name} has no hutto_ICWSM_2014.tar.gz")
    found: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(inner[0])) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith("_GroundTruth.txt") else None
            if file is not None:
                found[Path(member.name).name.removesuffix("_GroundTruth.txt")] = file.read().decode("utf-8")
    rows = [row for domain, stem in DOMAINS.items() for row in _rated(domain, found.get(stem, ""))]
    names = Names.of("\t".join(row) for row in rows)
    return {"text": names.text, "ends": names.ends}, {"source": source}


def _rated(domain: str, table: str) -> Iterator[tuple[str, str, str, str]]:
    """Domain, review, rating and sentence of those that are rated; of an equal sentence only the first."""
    seen = set()
    for line in table.splitlines():
        number, rating, sentence = line.split("\t", 2)
        key = sentence.strip().lower()
        if abs(float(rating)) >= NEUTRAL and key not in seen:
            seen.add(key)
            yield domain, number.partition("_")[0], rating, " ".join(sentence.split())


def load_definitions(request: DataRequest) -> LabelledData:
    """A noun's definition, and which of the 26 lexicographer files it is in. Equal definitions lie on the same side."""
    synsets, source, _ = read_wordnet(request.root)
    rows = [(s.definition, NOUN_FILES[s.file - 3]) for s in synsets if s.part == "noun"]
    train, test = ([row for row in rows if is_test(row[0], SHARE) == side] for side in (False, True))
    return build_labelled(request.spec, train, test, source, classes=NOUN_FILES)


def load_sense_pairs(request: DataRequest) -> LabelledData:
    """Two example sentences with one word: whether it has the same sense in both. No word is on both sides."""
    synsets, source, _ = read_wordnet(request.root)
    rows = balanced(sense_pairs(synsets))
    test = [row for row in rows if is_test(row[0], SHARE)]
    shown = {sentence for row in test for sentence in row[1:3]}
    # A sentence serves several words; what is tested on has not been seen with another.
    train = [row for row in rows if not is_test(row[0], SHARE) and not shown & {row[1], row[2]}]
    learnt, tested = ([(f"{word}: {one}", other, label) for word, one, other, label in p] for p in (train, test))
    return build_labelled(request.spec, learnt, tested, source, classes=("different", "same"))


Pair = tuple[str, str, str, str]


def sense_pairs(synsets: Iterable[Synset]) -> list[Pair]:
    """Word, two of its example sentences, and `same` or `different`; all that there are, in a fixed order.

    A sentence is a word's if the word stands in it, perhaps inflected by an ending.
    """
    senses: dict[tuple[str, str], list[list[str]]] = defaultdict(list)
    for synset in synsets:
        for word in synset.words:
            shown = [example for example in synset.examples if _contains(example, word)]
            if shown:
                senses[synset.part, word.lower()].append(shown)
    pairs: list[Pair] = []
    for (_, word), groups in sorted(senses.items()):
        for group in groups:
            pairs += [(word, first, second, "same") for first, second in combinations(group, 2)]
        for one, other in combinations(groups, 2):
            pairs += [(word, first, second, "different") for first in one for second in other if first != second]
    return pairs


def balanced(pairs: Iterable[Pair]) -> list[Pair]:
    """As many pairs of different senses as of the same, for every word, picked by a hash; equal pairs are one."""
    words: dict[str, dict[str, list[Pair]]] = defaultdict(lambda: {"same": [], "different": []})
    for pair in dict.fromkeys(pairs):
        words[pair[0]][pair[3]].append(pair)
    kept = []
    for word in sorted(words):
        count = min(len(group) for group in words[word].values())
        for group in words[word].values():
            kept += sorted(group, key=_rank)[:count]
    return sorted(kept, key=_rank)


def _rank(pair: Pair) -> bytes:
    return hashlib.sha256("\t".join(pair).encode()).digest()


def _contains(sentence: str, word: str) -> bool:
    stem, last = re.escape(word.removesuffix("e") if len(word) > 3 else word), re.escape(word[-1:])
    endings = f"e|s|es|ed|d|ing|er|est|{last}ed|{last}ing"
    return re.search(rf"\b{stem}(?:{endings})?\b", sentence, re.IGNORECASE) is not None
