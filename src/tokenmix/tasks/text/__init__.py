"""Text: masked-language modelling, sentence classification, question answering."""

from tokenmix.registry import TASKS, TaskEntry
from tokenmix.tasks.text import presets

__all__ = ["presets"]

TASKS.register(
    TaskEntry(
        name="masked-lm",
        about="masked words of running text; perplexity at masked positions",
        task="tokenmix.tasks.text.masked_lm:MaskedLM",
    ),
    TaskEntry(
        name="text-classification",
        about="one label for each text or pair of texts; accuracy, macro F1",
        task="tokenmix.tasks.text.classification:TextClassification",
    ),
    TaskEntry(
        name="question-answering",
        about="the answer's span in a context, or none; exact match, F1",
        task="tokenmix.tasks.text.question_answering:QuestionAnswering",
    ),
)
