"""Reading text: corpora for language modelling, labelled sentences and pairs, questions with extractive answers."""

from tokenmix.lab.tasks.text.data.corpus import Corpus, Tokens, load_text, tokenized
from tokenmix.lab.tasks.text.data.files import read_lines
from tokenmix.lab.tasks.text.data.labelled import LabelledData, LabelledText, load_labelled
from tokenmix.lab.tasks.text.data.questions import (
    EncodedQuestions,
    Question,
    QuestionData,
    WholeQuestions,
    load_questions,
)
from tokenmix.lab.tasks.text.data.sequences import EncodedText, PackedText

__all__ = [
    "Corpus",
    "EncodedQuestions",
    "EncodedText",
    "LabelledData",
    "LabelledText",
    "PackedText",
    "Question",
    "QuestionData",
    "Tokens",
    "WholeQuestions",
    "load_labelled",
    "load_questions",
    "load_text",
    "read_lines",
    "tokenized",
]
