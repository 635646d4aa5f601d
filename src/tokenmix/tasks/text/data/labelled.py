"""Sentences, and pairs of them, with a label: tables of the user's own, GLUE's folders, and real sets by name."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tokenmix.data.images.image_set import choose
from tokenmix.data.lookup import DataRequest, load_data
from tokenmix.errors import UserError
from tokenmix.tasks.text.data.corpus import Corpus, find_parts, table_corpus
from tokenmix.tasks.text.data.files import Row, TableKind, check_columns, check_file, read_rows
from tokenmix.tasks.text.data.split import is_test

__all__ = ["LabelledData", "LabelledText", "build_labelled", "load_labelled", "load_table"]

MOST_CLASSES = 1000


@dataclass(frozen=True)
class LabelledText:
    """Texts with labels.

    Attributes:
        texts: one for each sample.
        pairs: the second text of each sample; None if there is only one.
        labels: int64 (number of samples,), or float32 where a number is to be predicted.
    """

    texts: list[str]
    pairs: list[str] | None
    labels: Tensor

    def __len__(self) -> int:
        return len(self.texts)

    def subset(self, indices: Tensor) -> "LabelledText":
        """These samples, in this order."""
        places = indices.tolist()
        pairs = None if self.pairs is None else [self.pairs[i] for i in places]
        return LabelledText([self.texts[i] for i in places], pairs, self.labels[indices])


@dataclass(frozen=True)
class LabelledData:
    """A data set for text classification, or regression.

    Attributes:
        spec: what was asked for.
        train, test: the samples.
        classes: names of the labels; empty where a number is to be predicted.
        source: where it came from, in a line.
        metrics: those that are usual for it.
    """

    spec: str
    train: LabelledText
    test: LabelledText
    classes: list[str]
    source: str
    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def kind(self) -> Literal["classification", "regression"]:
        """Whether labels are classes or numbers."""
        return "classification" if self.classes else "regression"


def load_labelled(
    spec: str,
    *,
    limit: int | None = None,
    limit_eval: int | None = None,
    seed: int = 0,
    root: Path | None = None,
) -> LabelledData:
    """Labelled texts for training and testing; which are for testing never depends on the seed.

    Args:
        spec: `vader`, `vader:DOMAIN`, `vader:DOMAIN,DOMAIN` (trained on one, tested on the other),
            `wordnet-definitions`, `wordnet-pairs`; `csv:PATH#text,label` or `csv:PATH#text,text_pair,label`, jsonl and
            parquet alike, of a file or of a folder with train.csv and test.csv; `glue:PATH/SST-2`.
        limit: keep this many training samples, in the shares of the classes, chosen by the seed.
        limit_eval: keep this many test samples, the same for every seed.
        seed: chooses the samples that `limit` keeps, nothing else.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown set, unreadable file, a column that is missing, or labels that are all the same.
    """
    whole: LabelledData = load_data(spec, "labelled-text", root=root)
    return replace(
        whole, train=_limited(whole, whole.train, limit, seed), test=_limited(whole, whole.test, limit_eval, 0)
    )


def load_table(request: DataRequest) -> Corpus | LabelledData:
    """`csv:PATH#text,label` and its like; as a corpus `csv:PATH#column`."""
    kind: Any = request.name
    if request.kind == "corpus":
        return table_corpus(kind, request.variant)
    return _labelled_table(request.spec, kind, request.variant)


def _limited(data: LabelledData, part: LabelledText, limit: int | None, seed: int) -> LabelledText:
    labels = part.labels if data.classes else torch.zeros(len(part), dtype=torch.int64)
    kept = choose(labels, limit, seed)
    return part if kept is None else part.subset(kept)


def _labelled_table(spec: str, kind: TableKind, rest: str) -> LabelledData:
    place, _, named = rest.partition("#")
    columns = tuple(named.split(",")) if named else ("text", "label")
    if len(columns) not in (2, 3) or not all(columns):
        raise UserError(f"{spec!r} names {len(columns)} columns; give #text,label or #text,text_pair,label")
    path = Path(place).expanduser()
    source = f"{kind}: {path.resolve()}"
    if path.is_dir():
        parts = find_parts(path, f".{kind}")
        if parts is None:
            raise UserError(f"{path} has no train.{kind} with a test.{kind}; name the file, or add them")
        train, test = (_rows(part, kind, columns) for part in parts)
    else:
        rows = _rows(check_file(path), kind, columns)
        # By the texts: a sentence that stands there twice is on one side.
        train, test = ([r for r in rows if is_test(" ".join(r[:-1])) == side] for side in (False, True))
        source += ", a tenth of the rows held out"
    return build_labelled(spec, train, test, source)


def _rows(path: Path, kind: TableKind, columns: tuple[str, ...]) -> list[tuple[str, ...]]:
    found = []
    for row in read_rows(path, kind):
        if not found:
            check_columns(path, row[1], columns)
        found.append(_values(row, columns))
    if not found:
        raise UserError(f"{path} has no rows; write it again or leave it out")
    return found


def _values(row: Row, columns: tuple[str, ...]) -> tuple[str, ...]:
    where, values = row
    texts = [values.get(name) for name in columns[:-1]]
    label = values.get(columns[-1])
    for name, text in zip(columns, texts):
        if not isinstance(text, str):
            raise UserError(f"{where}: {name!r} is {text!r}, not text; leave the row out or name another column")
    if label is None or isinstance(label, list | dict) or str(label).strip() == "":
        raise UserError(f"{where}: {columns[-1]!r} is {label!r}, no label; leave the row out or name another column")
    return (*(str(text) for text in texts), str(label))


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

    Labels that are numbers, and not all whole, are to be predicted as numbers, as are all if `classes` is `numbers`.
    Others are classes, whose order is that of `classes`, else of numbers, else of the alphabet.
    """
    for part, name in ((train, "training"), (test, "testing")):
        if not part:
            raise UserError(f"{spec} has no rows for {name}; give more rows, or a folder with train and test inside")
    given = {row[-1] for row in train}
    if len(given) < 2:
        raise UserError(f"every label of {spec} is {given.pop()!r}; two different ones are needed at least")
    numbers = classes == "numbers" or (classes is None and _numbers(given))
    names = [] if numbers else list(classes or _ordered(given))
    if len(names) > MOST_CLASSES:
        raise UserError(f"{spec} has {len(names)} different labels, such as {names[0]!r}; name the column of the label")
    unknown = {row[-1] for row in test} - set(names)
    if names and unknown:
        raise UserError(
            f"the test part of {spec} has the label {sorted(unknown)[0]!r}, which the training part has not"
        )
    parts = [_part(part, names) for part in (train, test)]
    return LabelledData(spec, parts[0], parts[1], names, source, metrics)


def _part(rows: Sequence[tuple[str, ...]], names: list[str]) -> LabelledText:
    places = {name: place for place, name in enumerate(names)}
    labels: Any = [places[row[-1]] for row in rows] if names else [float(row[-1]) for row in rows]
    pairs = [row[1] for row in rows] if len(rows[0]) == 3 else None
    return LabelledText(
        [row[0] for row in rows], pairs, torch.tensor(labels, dtype=torch.int64 if names else torch.float32)
    )


def _numbers(labels: set[str]) -> bool:
    """Whether they are numbers, and not all whole: ratings, not classes."""
    try:
        values = [float(label) for label in labels]
    except ValueError:
        return False
    return all(math.isfinite(v) for v in values) and any(not v.is_integer() for v in values)


def _ordered(labels: set[str]) -> list[str]:
    try:
        return sorted(labels, key=float)
    except ValueError:
        return sorted(labels)
