"""Text classification: one label, or one number, for each text or pair of texts."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassF1Score, MulticlassMatthewsCorrCoef
from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef

from tokenmix.errors import UserError
from tokenmix.lab.tasks.classes import class_metrics, likeliest
from tokenmix.lab.tasks.text.data.labelled import load_labelled
from tokenmix.lab.tasks.text.data.sequences import EncodedText
from tokenmix.lab.tasks.text.encoding import tokenizing
from tokenmix.lab.tasks.text.task import (
    DistillingTextTask,
    Sentence,
    TextData,
    hub_form,
    inputs_of,
    read_sentences,
    tokenizer_for,
)
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distillation import DistillingTask
from tokenmix.lab.train.metrics import PositiveF1
from tokenmix.lab.train.programs import HubForm
from tokenmix.lab.train.task import TaskData
from tokenmix.lab.train.task_data import check_names
from tokenmix.text.heads import GMLPForSequenceClassification


class TextClassification(DistillingTextTask):
    """A classifier on the first token, trained with cross-entropy, or with mean squared error on numeric labels.

    Texts longer than `seq_len` are cut, of a pair the longer one; the description counts them.
    """

    monitor: ClassVar[str] = "accuracy"
    mode: ClassVar[Literal["max", "min"]] = "max"
    tables: ClassVar[frozenset[str]] = frozenset({"confusion"})
    hub: ClassVar[HubForm | None] = hub_form("text-classification", "AutoModelForSequenceClassification")
    network: ClassVar[type[Any]] = GMLPForSequenceClassification

    def __init__(self, model: Any, config: TrainConfig, data: Mapping[str, Any]) -> None:
        super().__init__(model, config, data)
        self.classes: list[str] = list(data["classes"])
        # The first of those that are usual for the data.
        self.monitor = data.get("metrics", ["accuracy" if self.classes else "pearson"])[0]  # type: ignore[misc]

    @classmethod
    def load_data(cls, config: TrainConfig, like: Mapping[str, Any] | None = None) -> TextData:
        """Read and encode the texts of `data`; `UserError` if `like` has other classes, or pairs where there are
        none.
        """
        texts = load_labelled(
            config.data.data,
            limit=config.data.limit,
            limit_eval=config.data.limit_eval,
            validation=config.data.validation,
            seed=config.loop.seed,
        )
        if like is not None:
            check_names(config.data.data, texts.classes, like["classes"])
            if (texts.train.pairs is not None) != like["pairs"]:
                raise UserError(
                    f"of {config.data.data!r} and the run's own data, one has pairs of texts and the other single texts"
                )
        tokenizer = tokenizer_for(config, [*texts.train.texts, *(texts.train.pairs or ())])
        length = config.options.seq_len if like is None else int(like["seq_len"])
        encoded = partial(EncodedText, tokenizer=tokenizer, max_length=length)
        train, test = encoded(texts.train), encoded(texts.test)
        held = None if texts.validation is None else encoded(texts.validation)
        description = {
            "classes": texts.classes,
            "pairs": texts.train.pairs is not None,
            "cut": train.cut + test.cut,
            "source": texts.source,
        }
        if texts.classes and texts.metrics != ("accuracy",):
            description["metrics"] = list(texts.metrics)
        return TextData(train, test, held, tokenizer=tokenizer, config=config, length=length, description=description)

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy, or mean squared error."""
        out = self.model(**inputs_of(batch))
        return self.distilled(lambda: out.loss, out.logits, batch)

    def check_teacher(self, teacher: DistillingTask, data: TaskData) -> None:
        """As of every task on text; numbers have no logits."""
        if not self.classes:
            raise UserError(
                f"{self.config.data.data} has numbers for labels, and a teacher has logits for classes only"
            )
        super().check_teacher(teacher, data)

    def evaluate(self, batch: Mapping[str, Tensor]) -> None:
        """Logits of the batch against its labels."""
        logits = self.model(**inputs_of(batch)).logits.float()
        self.metrics.update(logits if self.classes else logits[:, 0], batch["labels"])

    def make_metrics(self) -> MetricCollection:
        """Those of classes, and macro F1.

        Of numbers Pearson's and Spearman's correlation; of GLUE's CoLA also Matthews' correlation, of MRPC and QQP F1.
        """
        if not self.data["classes"]:
            return MetricCollection(
                {"pearson": PearsonCorrCoef(), "spearman": SpearmanCorrCoef()}, compute_groups=False
            )
        options: dict[str, Any] = {"num_classes": len(self.data["classes"]), "validate_args": False}
        chosen: dict[str, Metric] = {"macro_f1": MulticlassF1Score(average="macro", **options)}
        own = self.data.get("metrics", ())
        if "matthews" in own:
            chosen["matthews"] = MulticlassMatthewsCorrCoef(**options)
        if "f1" in own:
            chosen["f1"] = PositiveF1()
        return class_metrics(options["num_classes"], **chosen)

    @torch.no_grad()
    def predict(self, inputs: Sequence[str | Path]) -> list[dict[str, Any]]:
        """Label, its probability and the five most probable classes of each line, or its number; the two texts of a
        pair are on a line with a tab between them.
        """
        self.eval()
        tokenizer: Any = self.tokenizer()
        answers = []
        for sentence in read_sentences(inputs):
            parts = _parts(sentence, bool(self.data["pairs"]))
            longest = int(self.data["seq_len"])
            with tokenizing(f"the run's tokenizer cannot read {sentence.where}"):
                encoded: Any = tokenizer(parts[0], *parts[1:], truncation=True, max_length=longest, return_tensors="pt")
            logits = self.model(**encoded.to(self.device)).logits[0].float()
            number = None if self.classes else {"value": round(logits.item(), 6)}
            answers.append({"text": sentence.text, **(number or likeliest(logits.softmax(-1), self.classes))})
        return answers


def _parts(sentence: Sentence, pairs: bool) -> list[str]:
    parts = [part.strip() for part in sentence.text.split("\t")] if pairs else [sentence.text]
    if pairs and len(parts) != 2:
        raise UserError(f"{sentence.where}: the run was trained on pairs; give two texts with a tab between them")
    return parts
