"""Readers of text: corpora for language modelling, labelled sentences and pairs, questions with extractive answers."""

from tokenmix.lab.tasks.text.data.corpus import Corpus, load_text, tokenized
from tokenmix.lab.tasks.text.data.files import read_lines
from tokenmix.lab.tasks.text.data.labelled import LabelledText, load_labelled
from tokenmix.lab.tasks.text.data.questions import EncodedQuestions, Question, load_questions
from tokenmix.lab.tasks.text.data.sequences import EncodedText, PackedText

__all__ = [
    "Corpus",
    "EncodedQuestions",
    "EncodedText",
    "LabelledText",
    "PackedText",
    "Question",
    "load_labelled",
    "load_questions",
    "load_text",
    "read_lines",
    "tokenized",
]
