"""Text classification: one label, or one number, per text or pair of texts."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from scipy.stats import rankdata
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import Values
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.indexed import balanced_order
from tokenmix.lab.tasks.classes import ClassTask, likeliest, told, train_counts
from tokenmix.lab.tasks.text.corpus import tokenizing
from tokenmix.lab.tasks.text.labelled import EncodedText, load_labelled
from tokenmix.lab.tasks.text.task import DistillingTextTask, TextData, hub_form, inputs_of, read_sentences
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distillation import DistillingTask
from tokenmix.lab.train.metrics import Metric, Rows
from tokenmix.lab.train.programs import Description, HubForm, PlainSamples, Shown
from tokenmix.lab.train.task import TaskData, check_names
from tokenmix.text.heads import GMLPForSequenceClassification


class TextClassification(DistillingTextTask, ClassTask):
    """A classifier on the first token, trained with cross-entropy, or with mean squared error on numeric labels.

    Texts longer than `seq_len` are truncated, in a pair the longer one; the description counts them.
    """

    auto: ClassVar[str] = "AutoModelForSequenceClassification"
    hub: ClassVar[HubForm | None] = hub_form("text-classification", auto)
    network: ClassVar[type[Any]] = GMLPForSequenceClassification
    baselines: ClassVar[tuple[str, ...]] = ("majority", "TF-IDF")

    @classmethod
    def load_data(cls, config: TrainConfig, like: Description | None = None) -> TextData:
        """Read and encode the texts; `UserError` if `like` has other classes, or pairs and these texts do not."""
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
                    f"of {config.data.data!r} and the run's own data, one has pairs of texts and the other single "
                    "texts; give data like the run's own"
                )
        learnt = [*texts.train.texts, *(texts.train.pairs or ())]
        tokenizer, length, description = cls.tokenization(config, like, learnt)
        encoded = partial(EncodedText, tokenizer=tokenizer, max_length=length)
        train, test = encoded(texts.train), encoded(texts.test)
        _log_cut(train.cut + test.cut, len(train) + len(test), length)
        description |= {"classes": texts.classes, "source": texts.source}
        description |= {"pairs": texts.train.pairs is not None, "cut": train.cut + test.cut}
        if texts.classes:
            description["counts"] = train_counts(texts.classes, texts.train.labels)
            if texts.metrics != ("accuracy",):
                description["metrics"] = list(texts.metrics)
        elif (config.options.class_weights, config.options.sampler) != ("none", "shuffle"):
            raise UserError(
                f"{config.data.data!r} has numbers for labels, which are of no class; leave --class-weights and "
                "--sampler out"
            )
        else:
            spread, mean = (one.item() for one in torch.std_mean(texts.train.labels))
            if not 0.1 < spread < 10 or abs(mean) > 10 * spread:
                log(
                    f"the labels of {config.data.data} have mean {mean:.3g} and standard deviation {spread:.3g}; a "
                    "network learns them slowly unless you subtract the one and divide by the other"
                )
        return TextData(
            balanced_order(train, texts.train.labels, config.options.sampler),
            test,
            None if texts.validation is None else encoded(texts.validation),
            tokenizer=tokenizer,
            config=config,
            description=description,
        )

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        out = self.model(**inputs_of(batch, self.model))
        weighted = self.options.class_weights == "balanced"
        loss = self.class_loss(out.logits.float(), batch["labels"]) if weighted else out.loss
        return self.distilled(loss, out.logits, batch)

    def check_teacher(self, teacher: DistillingTask, data: TaskData) -> None:
        if not self.classes:
            raise UserError(
                f"{self.config.data.data} has numbers for labels, and a teacher has logits for classes only; "
                "leave --teacher out"
            )
        super().check_teacher(teacher, data)

    def evaluate(self, batch: Mapping[str, Tensor]) -> Rows:
        logits = self.model(**inputs_of(batch, self.model)).logits.float()
        if self.classes:
            return self.judged(logits, batch["labels"], batch["index"])
        return {"index": batch["index"], "value": logits[:, 0], "label": batch["labels"]}

    def usual_monitor(self) -> str:
        """The first of the data's own metrics, as in GLUE."""
        if self.data.get("metrics"):
            return self.data["metrics"][0]
        return super().usual_monitor() if self.data["classes"] else "pearson"

    @classmethod
    def make_metrics(cls, config: TrainConfig, data: Description) -> dict[str, Metric]:
        if data["classes"]:
            return super().make_metrics(config, data)
        return {
            "pearson": Metric.of_columns(correlation, "value", "label"),
            "spearman": Metric.of_columns(rank_correlation, "value", "label"),
            "rmse": Metric.of_columns(root_mean_square, "value", "label", higher_is_better=False),
        }

    def plain_samples(self, data: TextData, part: Literal["train", "test"]) -> Iterator[PlainSamples]:
        for batch in data.batches_of(part, 128):
            texts = data.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
            yield PlainSamples(texts, batch["labels"])

    def show(self, batch: Mapping[str, Tensor]) -> list[Shown]:
        texts = self.tokenizer().batch_decode(batch["input_ids"], skip_special_tokens=True)
        logits = self.model(**inputs_of(batch, self.model)).logits.float().cpu()
        if not self.classes:
            return [Shown(t, f"{y:.3g}", f"{z:.3g}") for t, y, z in zip(texts, batch["labels"].tolist(), logits[:, 0])]
        answers = [told(likeliest(row, self.classes)) for row in logits.softmax(-1)]
        return [Shown(t, self.classes[y], a) for t, y, a in zip(texts, batch["labels"].tolist(), answers)]

    def predict(self, inputs: Sequence[str | Path]) -> list[Values]:
        """Label, probability and top five classes of each line, or its number; a tab separates the texts of a pair."""
        tokenizer: Any = self.tokenizer()
        answers, cut = [], 0
        for sentence in read_sentences(inputs):
            parts = [part.strip() for part in sentence.text.split("\t")] if self.data["pairs"] else [sentence.text]
            if self.data["pairs"] and len(parts) != 2:
                raise UserError(
                    f"{sentence.where}: the run was trained on pairs; give two texts with a tab between them"
                )
            longest = int(self.data["seq_len"])
            with tokenizing(f"the run's tokenizer cannot read {sentence.where}"):
                encoded: Any = tokenizer(parts[0], *parts[1:], truncation=True, max_length=longest, return_tensors="pt")
            cut += bool(encoded.encodings[0].overflowing)
            logits = self.model(**inputs_of(encoded.to(self.device), self.model)).logits[0].float()
            number = None if self.classes else {"value": round(logits.item(), 6)}
            answers.append({"text": sentence.text, **(number or likeliest(logits.softmax(-1), self.classes))})
        _log_cut(cut, len(answers), int(self.data["seq_len"]))
        return answers


def _log_cut(cut: int, count: int, length: int) -> None:
    if cut:
        log(f"{cut} of {count} texts have more than {length} tokens (--seq-len) and were cut")


def correlation(predicted: Tensor, true: Tensor) -> Tensor:
    """Pearson correlation."""
    return torch.stack([predicted.double(), true.double()]).corrcoef()[0, 1]


def root_mean_square(predicted: Tensor, true: Tensor) -> Tensor:
    """Root of the mean squared error, in units of the label."""
    return (predicted.double() - true.double()).square().mean().sqrt()


def rank_correlation(predicted: Tensor, true: Tensor) -> Tensor:
    """Spearman correlation: Pearson's of the ranks, with mean ranks for ties."""
    return correlation(*(torch.from_numpy(rankdata(values)) for values in (predicted, true)))
