"""Text: masked-language modelling, sentence classification, question answering."""

from tokenmix.lab.registry import DATA_SETS, TASKS, DataEntry, Kind, TaskEntry

TASKS.register(
    TaskEntry(
        name="masked-lm",
        about="masked words of running text; perplexity at masked positions",
        task="tokenmix.lab.tasks.text.masked_lm:MaskedLM",
        options="tokenmix.lab.tasks.text.options:MaskingOptions",
        defaults={"model": "gmlp_text_nano"},
        skeleton="bert_text_nano",
    ),
    TaskEntry(
        name="text-classification",
        about="one label for each text or pair of texts; accuracy, macro F1",
        task="tokenmix.lab.tasks.text.classification:TextClassification",
        options="tokenmix.lab.tasks.text.options:LabelOptions",
        defaults={"model": "gmlp_text_nano"},
        skeleton="bert_text_nano",
    ),
    TaskEntry(
        name="question-answering",
        about="the answer's span in a context, or none; exact match, F1",
        task="tokenmix.lab.tasks.text.question_answering:QuestionAnswering",
        options="tokenmix.lab.tasks.text.options:QuestionOptions",
        defaults={"model": "gmlp_text_nano"},
        skeleton="bert_text_nano",
    ),
)

LAYOUTS: tuple[tuple[str, tuple[Kind, ...], str, str], ...] = (
    ("text", ("corpus",), ", a file or a folder of text files", "corpus:load_text_files"),
    ("jsonl", ("corpus", "labelled-text"), "#column, or #text,label", "labelled:load_table"),
    ("csv", ("corpus", "labelled-text"), "#column, or #text,label", "labelled:load_table"),
    ("parquet", ("corpus", "labelled-text"), "#column, or #text,label", "labelled:load_table"),
    ("glue", ("labelled-text",), "/SST-2, in GLUE's layout", "labelled:load_glue"),
    ("squad", ("questions",), ", in SQuAD's layout", "questions:load_squad"),
)
"""The user's own files: name, kinds, what follows name:PATH, and the reader."""

DATA_SETS.register(
    *(
        DataEntry(
            name=name,
            kinds=kinds,
            about=f"{name}:PATH{about}",
            load=f"tokenmix.lab.tasks.text.data.{load}",
            variant="path",
        )
        for name, kinds, about, load in LAYOUTS
    ),
    DataEntry(
        name="hf",
        kinds=("corpus", "labelled-text", "questions"),
        about="hf:NAME[:CONFIG] of the Hugging Face hub; #column, or #text,label",
        licence="its author's",
        origin="huggingface.co, by datasets",
        load="tokenmix.lab.tasks.text.data.questions:load_hub",
        variant="name",
    ),
)
