"""Reading text: corpora to learn a language from, labelled sentences and pairs, questions with answers in a text."""

from tokenmix.data.text.baseline import tfidf_baseline
from tokenmix.data.text.corpus import Corpus
from tokenmix.data.text.encoded import EncodedText
from tokenmix.data.text.labelled import LabelledData, LabelledText, load_labelled
from tokenmix.data.text.packed import PackedText
from tokenmix.data.text.questions import EncodedQuestions
from tokenmix.data.text.sequences import Sequences
from tokenmix.data.text.squad import Question, QuestionData, load_questions
from tokenmix.data.text.table import get_text, list_text, load_text
from tokenmix.data.text.tokens import Tokens, tokenized

__all__ = [
    "Corpus",
    "EncodedQuestions",
    "EncodedText",
    "LabelledData",
    "LabelledText",
    "PackedText",
    "Question",
    "QuestionData",
    "Sequences",
    "Tokens",
    "get_text",
    "list_text",
    "load_labelled",
    "load_questions",
    "load_text",
    "tfidf_baseline",
    "tokenized",
]
