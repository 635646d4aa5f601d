"""Readers of text: corpora for language modelling, labelled sentences and pairs, questions with extractive answers."""

from tokenmix.lab.tasks.text.data.corpus import load_text
from tokenmix.lab.tasks.text.data.labelled import load_labelled
from tokenmix.lab.tasks.text.data.questions import load_questions

__all__ = ["load_labelled", "load_questions", "load_text"]
