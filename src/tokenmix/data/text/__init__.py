"""Reading text: corpora to learn a language from, labelled sentences and pairs, questions with answers in a text."""

from tokenmix.data.text.corpus import Corpus
from tokenmix.data.text.packed import PackedText
from tokenmix.data.text.sequences import Sequences, TextLoader, make_text_loader
from tokenmix.data.text.table import get_text, list_text, load_text
from tokenmix.data.text.tokens import Tokens, tokenized

__all__ = [
    "Corpus",
    "PackedText",
    "Sequences",
    "TextLoader",
    "Tokens",
    "get_text",
    "list_text",
    "load_text",
    "make_text_loader",
    "tokenized",
]
