"""Labelled sentences and pairs: tables, hub data sets, and GLUE's folders (arXiv:1804.07461); and as token ids."""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import user_path
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.indexed import DataSet, IndexedDataset
from tokenmix.lab.data.lookup import DataRequest, load_data
from tokenmix.lab.data.reading import check_file
from tokenmix.lab.tasks.text.corpus import Corpus, block_characters, groups, load_column, tokenizing
from tokenmix.lab.tasks.text.files import label_name, open_table, read_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Batch = dict[str, Tensor]
MOST_CLASSES = 1000
_BOTH, _ENTAILED, _NLI = ("0", "1"), ("entailment", "not_entailment"), ("entailment", "neutral", "contradiction")
GLUE: dict[str, tuple[tuple[str, ...] | tuple[int, ...], tuple[str, ...] | Literal["numbers"]]] = {
    "SST-2": (("sentence", "label"), _BOTH),
    # source, label, the author's own mark, sentence; no header.
    "CoLA": ((3, 1), _BOTH),
    "MRPC": (("#1 String", "#2 String", "Quality"), _BOTH),
    "QQP": (("question1", "question2", "is_duplicate"), _BOTH),
    "STS-B": (("sentence1", "sentence2", "score"), "numbers"),
    "MNLI": (("sentence1", "sentence2", "gold_label"), _NLI),
    "MNLI-MM": (("sentence1", "sentence2", "gold_label"), _NLI),
    "QNLI": (("question", "sentence", "label"), _ENTAILED),
    "RTE": (("sentence1", "sentence2", "label"), _ENTAILED),
    "WNLI": (("sentence1", "sentence2", "label"), _BOTH),
}
"""GLUE's tasks: columns of the published files, label last, by name or position; and classes in order."""
GLUE_METRICS = {
    "cola": ("matthews",),
    "mrpc": ("accuracy", "f1"),
    "qqp": ("accuracy", "f1"),
    "stsb": ("pearson", "spearman"),
}
"""GLUE's metrics other than accuracy, by the hub's task names."""


@dataclass(frozen=True)
class LabelledText:
    """Texts, optional second texts `pairs`, and labels: int64 (n,), or float32 (n,) for regression."""

    texts: list[str]
    pairs: list[str] | None
    labels: Tensor

    def __len__(self) -> int:
        return len(self.texts)

    def subset(self, indices: Tensor) -> "LabelledText":
        positions = indices.tolist()
        pairs = None if self.pairs is None else [self.pairs[i] for i in positions]
        return LabelledText([self.texts[i] for i in positions], pairs, self.labels[indices])


@dataclass(frozen=True)
class LabelledData(DataSet[LabelledText]):
    """A data set for text classification, for regression without classes; `metrics` are its usual metrics."""

    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def kind(self) -> Literal["classification", "regression"]:
        return "classification" if self.classes else "regression"


def load_labelled(
    spec: str,
    *,
    limit: int | None = None,
    limit_eval: int | None = None,
    validation: int | None = 0,
    seed: int = 0,
    root: Path | None = None,
) -> LabelledData:
    """Labelled texts for training and testing; the choice of test texts never depends on the seed.

    Args:
        spec: `csv:PATH#text,label` or `csv:PATH#text,text_pair,label`, also jsonl and parquet, of a file or a folder
            with train.csv and test.csv; `glue:PATH/SST-2`; `hf:NAME[:CONFIG]#text,label`; a registered set's name.
        limit: keep this many training samples, with the class proportions, chosen by the seed.
        limit_eval: keep this many test samples, the same for every seed.
        validation: hold out this many training samples; None: a tenth of those used. `limit` applies to the others.
        seed: affects only the samples that `limit` keeps.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown set, unreadable file, missing column, or only one label.
    """
    whole: LabelledData = load_data(spec, "labelled-text", root=root)
    # Numeric labels have no class proportions.
    labels = [part.labels if whole.classes else torch.zeros(len(part)) for part in (whole.train, whole.test)]
    return whole.split((labels[0], labels[1]), limit=limit, limit_eval=limit_eval, validation=validation, seed=seed)


def load_table(request: DataRequest) -> Corpus | LabelledData:
    """`csv:PATH#text,label` and the like, labelled or as a corpus."""
    if request.kind == "corpus":
        return load_column(request)
    table = open_table(request)
    columns = table.columns
    if not columns:
        # For hub data sets the text columns, if there are one or two.
        texts = [n for n, kind in table.types.items() if n != "label" and getattr(kind, "dtype", None) == "string"]
        columns = (*texts, "label") if len(texts) in (1, 2) else ("text", "label")
    if len(columns) not in (2, 3) or not all(columns):
        raise UserError(f"{request.spec!r} names {len(columns)} columns; give #text,label or #text,text_pair,label")
    train, test = table.labelled(columns)
    names = getattr(table.types.get(columns[-1]), "names", None)
    classes = None if names is None else list(dict.fromkeys(map(label_name, names)))
    name, _, task = request.variant.partition("#")[0].partition(":")
    metrics = GLUE_METRICS.get(task if name.endswith("glue") else "", ("accuracy",))
    return build_labelled(request.spec, train, test, table.source, classes=classes, metrics=metrics)


def load_glue(request: DataRequest) -> LabelledData:
    """`glue:PATH/SST-2`, or `glue:PATH#SST-2` for a folder with another name; #MNLI-MM tests on the mismatched part."""
    place, _, named = request.variant.partition("#")
    folder = user_path(place)
    names = {name.lower(): name for name in GLUE}
    wanted = named or folder.name
    if wanted.lower() not in names:
        raise unknown_name("task of GLUE", wanted, GLUE)
    name = names[wanted.lower()]
    columns, classes = GLUE[name]
    # The labels of test.tsv are unpublished.
    dev = {"MNLI": "dev_matched.tsv", "MNLI-MM": "dev_mismatched.tsv"}.get(name, "dev.tsv")
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is not a folder; give glue:PATH with train.tsv and {dev} inside")
    train, test = (_glue_rows(check_file(folder / file), columns, classes) for file in ("train.tsv", dev))
    source = f"GLUE {name}: {folder.resolve()}, tested on {dev}"
    metrics = GLUE_METRICS.get(name.lower().replace("-", ""), ("accuracy",))
    return build_labelled(request.spec, train, test, source, classes=classes, metrics=metrics)


def _glue_rows(path: Path, columns: Sequence[str | int], classes: Sequence[str]) -> list[tuple[str, ...]]:
    # Published files contain unpaired quotation marks, which CSV's rules would pair.
    lines = enumerate((line.rstrip("\r\n").split("\t") for line in read_lines(path)), 1)
    header = next(lines)[1] if isinstance(columns[0], str) else range(max(map(int, columns)) + 1)
    for column in columns:
        if column not in header:
            raise UserError(f"{path} has no column {column!r}; it has {', '.join(map(repr, header))}")
    positions, rows, left_out = [header.index(column) for column in columns], [], 0  # type: ignore[arg-type]
    for number, fields in lines:
        # Published QQP has some broken lines, and MNLI some without a consensus label.
        if len(fields) <= max(positions) or fields[positions[-1]] == "-":
            left_out += 1
            continue
        row = tuple(fields[place] for place in positions)
        if classes == "numbers" and _number(row[-1]) is None:
            raise UserError(f"{path}, line {number}: the score {row[-1]!r} is not a number; correct it")
        if classes != "numbers" and row[-1] not in classes:
            raise UserError(f"{path}, line {number}: the label {row[-1]!r} is none of {', '.join(classes)}; correct it")
        rows.append(row)
    if left_out:
        log(f"{path}: {left_out} lines without a label or with too few fields are left out")
    return rows


def build_labelled(
    spec: str,
    train: Sequence[tuple[str, ...]],
    test: Sequence[tuple[str, ...]],
    source: str,
    *,
    classes: Sequence[str] | Literal["numbers"] | None = None,
    metrics: tuple[str, ...] = ("accuracy",),
) -> LabelledData:
    """A data set of rows (text, label) or (text, text_pair, label).

    Numeric labels that are not all whole are regression targets; so are all labels if `classes` is `numbers`. Other
    labels are classes in the order of `classes`, else numeric, else alphabetical.
    """
    for part, name in ((train, "training"), (test, "testing")):
        if not part:
            raise UserError(f"{spec} has no rows for {name}; give more rows, or a folder with train and test inside")
    given = {row[-1] for row in train}
    if len(given) < 2:
        raise UserError(f"every label of {spec} is {given.pop()!r}; at least two different labels are needed")
    values = [_number(label) for label in given]
    ratings = None not in values and any(not value.is_integer() for value in values if value is not None)
    numbers = classes == "numbers" or (classes is None and ratings)
    names = [] if numbers else list(classes or sorted(given, key=None if None in values else float))
    if len(names) > MOST_CLASSES:
        raise UserError(f"{spec} has {len(names)} different labels, such as {names[0]!r}; specify the label column")
    unknown = {row[-1] for row in test} - set(names)
    if names and unknown:
        raise UserError(
            f"the test part of {spec} has the label {sorted(unknown)[0]!r}, which is missing in the training part; "
            "correct it, or add such rows (a tenth of a file without parts is for testing)"
        )
    trained = {row[:-1] for row in train}
    if copies := [row[0] for row in test if row[:-1] in trained]:
        log(f"{len(copies)} of {len(test)} test texts are training texts too ({copies[0][:40]!r}), so metrics say less")
    code, sides = {name: number for number, name in enumerate(names)}, []
    for rows in (train, test):
        labels: list[float | None] = [code[row[-1]] if names else _number(row[-1]) for row in rows]
        if None in labels:
            raise UserError(f"{spec} has the label {rows[labels.index(None)][-1]!r} among numbers; correct that row")
        pairs = [row[1] for row in rows] if len(rows[0]) == 3 else None
        kept = torch.tensor(labels, dtype=torch.int64 if names else torch.float32)
        sides.append(LabelledText([row[0] for row in rows], pairs, kept))
    return LabelledData(sides[0], sides[1], names, source, metrics=metrics)


def _number(label: str) -> float | None:
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def padded(rows: list[np.ndarray], fill: int) -> Tensor:
    """Stack rows as int64 (B, N), padded with `fill` to the longest."""
    return pad_sequence([torch.from_numpy(row).long() for row in rows], batch_first=True, padding_value=fill)


def token_batch(ids: Sequence[np.ndarray], segments: Sequence[np.ndarray], indices: Tensor, pad: int) -> Batch:
    """Padded token rows with their segments and indices: a model's inputs, and `index`."""
    positions = indices.tolist()
    return {
        "input_ids": padded([ids[i] for i in positions], pad),
        "attention_mask": padded([np.ones(len(ids[i]), np.int64) for i in positions], 0),
        "token_type_ids": padded([segments[i] for i in positions], 0),
        "index": indices,
    }


class Rows(Sequence[np.ndarray]):
    """Integer rows of different lengths, concatenated in one array."""

    def __init__(self, code: str) -> None:
        self._flat, self._ends = array(code), array("q", [0])

    def append(self, row: Iterable[int]) -> None:
        self._flat.extend(row)
        self._ends.append(len(self._flat))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < len(self):
            raise IndexError(f"there are {len(self)} rows, got {place}")
        begin, end = self._ends[place], self._ends[place + 1]
        return np.frombuffer(self._flat, self._flat.typecode, end - begin, begin * self._flat.itemsize)


class EncodedText(IndexedDataset):
    """[CLS] text [SEP], or [CLS] text [SEP] text_pair [SEP], truncated to `max_length`; in a pair the longer one first.

    A batch: input_ids, attention_mask and token_type_ids int64 (B, N) with N of its longest, labels int64 (B,) or
    float32 (B,), index int64 (B,). `cut` is the number of truncated texts.
    """

    unit = "sequences"

    def __init__(self, texts: LabelledText, tokenizer: "PreTrainedTokenizerFast", *, max_length: int) -> None:
        least = 3 if texts.pairs is None else 5
        if max_length < least:
            raise UserError(f"a length of {max_length} leaves no room for the text; give {least} or more")
        self.labels = texts.labels
        self.pad = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
        backend, most = tokenizer.backend_tokenizer, block_characters(tokenizer)
        # No kept token is further from the beginning, or, if the end is kept, from the end.
        longest = max(most // 2, 100 * max_length)
        kept = slice(-longest, None) if tokenizer.truncation_side == "left" else slice(longest)
        columns = [column for column in (texts.texts, texts.pairs) if column is not None]
        self.ids, self.segments, self.cut = Rows("i"), Rows("b"), 0
        with tokenizing("the tokenizer cannot read these texts"):
            backend.no_padding()
            backend.enable_truncation(max_length, strategy="longest_first", direction=tokenizer.truncation_side)
            rows = (tuple(text[kept] for text in row) for row in zip(*columns))
            for group in groups(rows, most, lambda row: sum(map(len, row))):
                for encoding in backend.encode_batch_fast([row if row[1:] else row[0] for row in group]):
                    self.ids.append(encoding.ids)
                    self.segments.append(encoding.type_ids)
                    self.cut += bool(encoding.overflowing)
            backend.no_truncation()

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, indices: Tensor, epoch: int) -> Batch:
        return {**token_batch(self.ids, self.segments, indices, self.pad), "labels": self.labels[indices]}
