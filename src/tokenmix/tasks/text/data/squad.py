"""Questions about a text, in the layout of SQuAD 1.1 and 2.0.

Rajpurkar et al., arXiv:1606.05250 and arXiv:1806.03822.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmix.data.lookup import DataRequest, load_data
from tokenmix.errors import UserError
from tokenmix.tasks.text.data.files import check_file, read_lines

__all__ = ["Question", "QuestionData", "load_questions", "load_squad", "read_squad"]

VERSIONS = ("v2.0", "v1.1")


@dataclass(frozen=True)
class Question:
    """A question, the text that it is about, and its answers as (text, where it begins in the context); maybe none."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class QuestionData:
    """Questions for training and testing; `unanswerable` says whether some have no answer, as in version 2."""

    spec: str
    train: list[Question]
    test: list[Question]
    unanswerable: bool
    source: str


def load_questions(spec: str, *, root: Path | None = None) -> QuestionData:
    """Questions about texts, for training and testing.

    Args:
        spec: `squad:PATH`, a folder with train-v1.1.json and dev-v1.1.json, or with those of v2.0.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown set, another layout, a damaged file, or an answer that does not stand in its context.
    """
    return load_data(spec, "questions", root=root)


def load_squad(request: DataRequest) -> QuestionData:
    """A folder with train-v1.1.json and dev-v1.1.json, or with those of v2.0."""
    folder = request.path
    for version in VERSIONS:
        files = [folder / f"{part}-{version}.json" for part in ("train", "dev")]
        if all(file.exists() for file in files):
            train, test = (read_squad(file) for file in files)
            none = any(not question.answers for question in [*train, *test])
            return QuestionData(request.spec, train, test, none, f"SQuAD {version}: {folder.resolve()}")
    wanted = " or ".join(f"train-{version}.json with dev-{version}.json" for version in reversed(VERSIONS))
    raise UserError(f"{str(folder)!r} has no {wanted}; give the folder that holds them")


def read_squad(path: Path) -> list[Question]:
    """The questions of one file."""
    try:
        whole = json.loads("".join(read_lines(check_file(path))))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno} is no JSON ({error.msg}); fetch the file again") from None
    try:
        questions = list(_questions(path, whole))
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} has not SQuAD's layout ({error!r}); it needs data, paragraphs, qas") from None
    if not questions:
        raise UserError(f"{path} holds no question; fetch the file again")
    return questions


def _questions(path: Path, whole: Any) -> Iterator[Question]:
    for article in whole["data"]:
        for paragraph in article["paragraphs"]:
            context = paragraph["context"]
            for asked in paragraph["qas"]:
                found = [] if asked.get("is_impossible") else asked["answers"]
                answers = tuple((answer["text"], int(answer["answer_start"])) for answer in found)
                _check_answers(path, asked["id"], context, answers)
                yield Question(str(asked["id"]), asked["question"], context, answers)


def _check_answers(path: Path, name: str, context: str, answers: tuple[tuple[str, int], ...]) -> None:
    for text, start in answers:
        if not text or start < 0 or context[start : start + len(text)] != text:
            inside = f"there stands {context[max(start, 0) : max(start, 0) + len(text)]!r}"
            where = inside if 0 <= start < len(context) else f"the context has {len(context)} characters"
            raise UserError(
                f"{path}: question {name!r} has the answer {text!r} at {start}, but {where}; correct answer_start"
            )
