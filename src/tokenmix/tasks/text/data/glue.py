"""GLUE in its published folders: train.tsv and dev.tsv (the labels of test.tsv are not published).

Wang et al., "GLUE", arXiv:1804.07461.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmix.data.fetch import log
from tokenmix.data.lookup import DataRequest
from tokenmix.errors import UserError, unknown_name
from tokenmix.tasks.text.data.files import check_file, read_lines
from tokenmix.tasks.text.data.labelled import LabelledData, build_labelled

__all__ = ["GLUE", "load_glue"]

Table = list[tuple[str, ...]]


@dataclass(frozen=True)
class GlueColumns:
    """Where a task's texts and labels stand.

    Attributes:
        columns: names in the header, the label last; or places in a row, if there is no header.
        classes: the labels in GLUE's order; None where a number is to be predicted.
        metrics: GLUE's own.
        dev: the file that is tested on.
    """

    columns: tuple[str, ...] | tuple[int, ...]
    classes: tuple[str, ...] | None
    metrics: tuple[str, ...] = ("accuracy",)
    dev: str = "dev.tsv"


BOTH = ("0", "1")
ENTAILED = ("entailment", "not_entailment")
GLUE: dict[str, GlueColumns] = {
    "SST-2": GlueColumns(("sentence", "label"), BOTH),
    # source, label, the author's own mark, sentence; without a header.
    "CoLA": GlueColumns((3, 1), BOTH, ("matthews",)),
    "MRPC": GlueColumns(("#1 String", "#2 String", "Quality"), BOTH, ("accuracy", "f1")),
    "QQP": GlueColumns(("question1", "question2", "is_duplicate"), BOTH, ("accuracy", "f1")),
    "STS-B": GlueColumns(("sentence1", "sentence2", "score"), None, ("pearson", "spearman")),
    "MNLI": GlueColumns(
        ("sentence1", "sentence2", "gold_label"),
        ("entailment", "neutral", "contradiction"),
        dev="dev_matched.tsv",
    ),
    "MNLI-MM": GlueColumns(
        ("sentence1", "sentence2", "gold_label"),
        ("entailment", "neutral", "contradiction"),
        dev="dev_mismatched.tsv",
    ),
    "QNLI": GlueColumns(("question", "sentence", "label"), ENTAILED),
    "RTE": GlueColumns(("sentence1", "sentence2", "label"), ENTAILED),
    "WNLI": GlueColumns(("sentence1", "sentence2", "label"), BOTH),
}


def load_glue(request: DataRequest) -> LabelledData:
    """`glue:PATH/SST-2`, or `glue:PATH#SST-2` if the folder has another name; #MNLI-MM tests on the mismatched part."""
    place, _, named = request.variant.partition("#")
    folder = Path(place).expanduser()
    tasks = {name.lower(): name for name in GLUE}
    wanted = named or folder.name
    if wanted.lower() not in tasks:
        raise unknown_name("task of GLUE", wanted, GLUE)
    name = tasks[wanted.lower()]
    layout = GLUE[name]
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is no folder; give glue:PATH with train.tsv and {layout.dev} inside")
    train, test = (_read(check_file(folder / file), layout) for file in ("train.tsv", layout.dev))
    source = f"GLUE {name}: {folder.resolve()}, tested on {layout.dev}"
    return build_labelled(
        request.spec, train, test, source, classes=layout.classes or "numbers", metrics=layout.metrics
    )


def _read(path: Path, layout: GlueColumns) -> Table:
    lines = (line.rstrip("\r\n").split("\t") for line in read_lines(path))
    headed = isinstance(layout.columns[0], str)
    places = _places(path, next(lines), layout.columns) if headed else [int(place) for place in layout.columns]
    rows, left_out = [], 0
    for number, fields in enumerate(lines, 2 if headed else 1):
        # Published QQP has a few broken lines, and MNLI some without agreement on a label.
        if len(fields) <= max(places) or fields[places[-1]] == "-":
            left_out += 1
            continue
        row = tuple(fields[place] for place in places)
        _check_label(path, number, row[-1], layout)
        rows.append(row)
    if left_out:
        log(f"{path}: {left_out} lines without a label or with too few fields are left out")
    return rows


def _places(path: Path, header: Sequence[str], columns: Sequence[str | int]) -> list[int]:
    for column in columns:
        if column not in header:
            raise UserError(f"{path} has no column {column!r}; it has {', '.join(map(repr, header))}")
    return [header.index(str(column)) for column in columns]


def _check_label(path: Path, number: int, label: str, layout: GlueColumns) -> None:
    if layout.classes is not None:
        if label not in layout.classes:
            raise UserError(f"{path}, line {number}: the label {label!r} is none of {', '.join(layout.classes)}")
        return
    try:
        float(label)
    except ValueError:
        raise UserError(f"{path}, line {number}: the score {label!r} is no number") from None
