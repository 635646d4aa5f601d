"""Text: masked-language modelling, sentence classification, question answering."""

from tokenmix.registry import DATA_SETS, TASKS, DataEntry, TaskEntry
from tokenmix.tasks.text import presets

__all__ = ["presets"]

TASKS.register(
    TaskEntry(
        name="masked-lm",
        about="masked words of running text; perplexity at masked positions",
        task="tokenmix.tasks.text.masked_lm:MaskedLM",
        options="tokenmix.tasks.text.options:MaskingOptions",
        defaults={"model": "gmlp_text_nano"},
    ),
    TaskEntry(
        name="text-classification",
        about="one label for each text or pair of texts; accuracy, macro F1",
        task="tokenmix.tasks.text.classification:TextClassification",
        options="tokenmix.tasks.text.options:LabelOptions",
        defaults={"model": "gmlp_text_nano"},
    ),
    TaskEntry(
        name="question-answering",
        about="the answer's span in a context, or none; exact match, F1",
        task="tokenmix.tasks.text.question_answering:QuestionAnswering",
        options="tokenmix.tasks.text.options:QuestionOptions",
        defaults={"model": "gmlp_text_nano"},
    ),
)

DATA_SETS.register(
    DataEntry(
        name="text",
        kinds=("corpus",),
        about="text:PATH, a file or a folder of text files",
        licence="yours",
        origin="your disk",
        load="tokenmix.tasks.text.data.corpus:load_text_files",
        variant="path",
    ),
    *(
        DataEntry(
            name=kind,
            kinds=("corpus", "labelled-text"),
            about=f"{kind}:PATH#column, or #text,label",
            licence="yours",
            origin="your disk",
            load="tokenmix.tasks.text.data.labelled:load_table",
            variant="path",
        )
        for kind in ("jsonl", "csv", "parquet")
    ),
    DataEntry(
        name="glue",
        kinds=("labelled-text",),
        about="glue:PATH/SST-2, in GLUE's layout",
        licence="yours",
        origin="your disk",
        load="tokenmix.tasks.text.data.labelled:load_glue",
        variant="path",
    ),
    DataEntry(
        name="squad",
        kinds=("questions",),
        about="squad:PATH, in SQuAD's layout",
        licence="yours",
        origin="your disk",
        load="tokenmix.tasks.text.data.questions:load_squad",
        variant="path",
    ),
    DataEntry(
        name="hf",
        kinds=("corpus", "labelled-text", "questions"),
        about="hf:NAME[:CONFIG] of the Hugging Face hub; #column, or #text,label",
        licence="its author's",
        origin="huggingface.co, by datasets",
        load="tokenmix.tasks.text.data.questions:load_hub",
        variant="name",
    ),
)
