"""Masked-language modelling: predictions for [MASK], perplexity at masked positions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.files import Values
from tokenmix.lab.data.indexed import validation_size
from tokenmix.lab.tasks.text.corpus import PackedText, load_text, tokenized, tokenizing
from tokenmix.lab.tasks.text.task import DistillingTextTask, TextData, hub_form, inputs_of, read_sentences
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distillation import DistillingTask
from tokenmix.lab.train.metrics import Metric, Rows, joined, quotient
from tokenmix.lab.train.programs import Description, HubForm, PlainSamples, Shown
from tokenmix.registry import Arguments
from tokenmix.text.heads import NO_LABEL, GMLPForMaskedLM

BEST = 5


def masked_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Logits at the masked positions (M, V). Our models compute only these; transformers models compute all."""
    inputs = inputs_of(batch, model)
    if not isinstance(model, GMLPForMaskedLM):
        del inputs["labels"]  # would add a loss over all tokens
    logits = model(**inputs).logits
    return logits if logits.dim() == 2 else logits[batch["labels"] != NO_LABEL]


class MaskedLM(DistillingTextTask):
    """Cross-entropy at the masked positions of all ranks; the head is applied to these positions only."""

    monitor: str = "perplexity"
    baselines: ClassVar[tuple[str, ...]] = ("unigram",)
    auto: ClassVar[str] = "AutoModelForMaskedLM"
    hub: ClassVar[HubForm | None] = hub_form("fill-mask", auto)
    network: ClassVar[type[Any]] = GMLPForMaskedLM
    fields: ClassVar[Arguments] = {"predict": "labelled"}

    @classmethod
    def load_data(cls, config: TrainConfig, like: Description | None = None) -> TextData:
        """The packed text of `config.data.data`; with `like`, in sequences of that run's length."""
        corpus = load_text(config.data.data)
        tokenizer, length, described = cls.tokenization(config, like, corpus.train)
        shared: Values = {
            "length": length,
            "masking": config.options.masking,
            "share": config.options.mask_prob,
            "seed": config.loop.seed,
        }
        whole, test = tokenized(corpus, tokenizer)
        # The end of the running text is held out, since cuts between training sequences move.
        window = max(1, length - 2)
        held = window * validation_size(max(1, len(whole) // window), config.data.validation, config.data.limit)
        train, validation = whole.part(0, len(whole) - held), whole.part(len(whole) - held, len(whole))
        return TextData(
            PackedText(train, tokenizer, part="train", **shared),
            PackedText(test, tokenizer, part="test", **shared),
            PackedText(validation, tokenizer, part="test", **shared) if held else None,
            tokenizer=tokenizer,
            config=config,
            description={**described, "source": corpus.source},
        )

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        count = (batch["labels"] != NO_LABEL).sum().float().clamp_min(1)
        if "architecture" in self.data:
            logits = masked_logits(self.model, batch)
            entropy = F.cross_entropy(logits.float(), batch["labels"][batch["labels"] != NO_LABEL], reduction="sum")
            entropy = entropy / count
        else:
            out = self.model(**inputs_of(batch, self.model), num_items_in_batch=count)
            entropy, logits = out.loss, out.logits
        loss, logs = self.distilled(entropy, logits, batch, count)
        return self.part_weight * loss, logs

    def teacher_logits(self, teacher: DistillingTask, batch: Mapping[str, Tensor]) -> Tensor:
        return masked_logits(teacher.model, batch)

    def count(self, batch: Mapping[str, Tensor]) -> int:
        return int((batch["labels"] != NO_LABEL).sum())

    def evaluate(self, batch: Mapping[str, Tensor]) -> Rows:
        index, hidden = batch["index"], batch["labels"] != NO_LABEL
        # A sequence without masked positions also has a row.
        nothing = torch.zeros(len(index), dtype=torch.int16)
        parts: list[Rows] = [{"index": index, "loss": nothing, "right": nothing, "masked": nothing}]
        if hidden.any():
            logits, sequence = masked_logits(self.model, batch).float(), hidden.nonzero()[:, 0]
            parts.append(self.judged(logits, batch["labels"][hidden], index.to(sequence.device)[sequence]))
        return joined(parts)

    def judged(self, logits: Tensor, targets: Tensor, index: Tensor) -> Rows:
        entropy, right = F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets
        return {"index": index, "loss": entropy, "right": right.short(), "masked": torch.ones_like(right).short()}

    @classmethod
    def make_metrics(cls, config: TrainConfig, data: Description) -> dict[str, Metric]:

        def of_masked(name: str) -> Callable[[Rows], Tensor]:
            return lambda rows: torch.stack([rows[name].double(), rows["masked"].double()], 1)

        return {
            "loss": Metric.of_sums(quotient, of_masked("loss"), higher_is_better=False),
            "perplexity": Metric.of_sums(lambda sums: quotient(sums).exp(), of_masked("loss"), higher_is_better=False),
            "accuracy": Metric.of_sums(quotient, of_masked("right")),
        }

    def macs(self) -> int:
        """Multiply-adds of one sequence, with the head at the mean number of masked positions."""
        if "architecture" in self.data:
            return super().macs()
        length = int(self.data["seq_len"])
        masked = round(self.config.options.mask_prob * (length - 2))
        return self.model.macs(length, num_predicted=masked)  # type: ignore[operator]

    def plain_samples(self, data: TextData, part: Literal["train", "test"]) -> Iterator[PlainSamples]:
        for batch in data.batches_of(part, 16):
            yield PlainSamples(None, batch["labels"][batch["labels"] != NO_LABEL])

    def num_targets(self) -> int:
        return int(self.data["vocab_size"])

    def show(self, batch: Mapping[str, Tensor]) -> list[Shown]:
        tokenizer: Any = self.tokenizer()
        hidden = batch["labels"] != NO_LABEL
        answers = masked_logits(self.model, batch).argmax(-1).split(hidden.sum(1).tolist())
        found = []
        for ids, there, labels, answer in zip(batch["input_ids"], hidden, batch["labels"], answers):
            truth, prediction = (", ".join(tokenizer.decode(one).strip() for one in x) for x in (labels[there], answer))
            found.append(Shown(tokenizer.decode(ids[ids != tokenizer.pad_token_id]), truth, prediction))
        return found

    def predict(self, inputs: Sequence[str | Path]) -> list[Values]:
        """For each [MASK] the most probable token, its probability, the top five, and the filled sentence."""
        tokenizer: Any = self.tokenizer()
        answers = []
        for sentence in read_sentences(inputs):
            text, longest = sentence.text, int(self.data["seq_len"])
            shown = repr(text if len(text) <= 60 else f"{text[:57]}...")
            with tokenizing(f"the run's tokenizer cannot read {sentence.where}"):
                ids = tokenizer(text, return_tensors="pt")["input_ids"].to(self.device)
            if not (ids == tokenizer.mask_token_id).any():
                raise UserError(
                    f"{sentence.where}: no {tokenizer.mask_token} in {shown}; write it where a word should be predicted"
                )
            if ids.shape[1] > longest:
                raise UserError(
                    f"{sentence.where}: {shown} has {ids.shape[1]} tokens and the model takes {longest}; cut it"
                )
            masked = torch.nonzero(ids[0] == tokenizer.mask_token_id)[:, 0]
            probabilities = self.model(input_ids=ids).logits[0, masked].float().softmax(-1)
            best, which = probabilities.topk(BEST)
            filled = ids[0].clone()
            filled[masked] = which[:, 0]
            with tokenizing("the run's tokenizer cannot write its pieces as text"):
                whole = tokenizer.decode(filled, skip_special_tokens=True)
                pieces = [[str(tokenizer.decode([token])).strip() for token in tokens] for tokens in which.tolist()]
            for i, (values, words) in enumerate(zip(best.tolist(), pieces), 1):
                top: dict[str, float] = {}
                for p, word in zip(values, words):
                    # Pieces with and without a preceding space read the same; keep the more probable one.
                    top.setdefault(word, round(p, 6))
                label, probability = next(iter(top.items()))
                told = {"label": label, "probability": probability, "top": top, "filled": whole}
                answers.append({"text": text, "mask": i, **told})
        return answers
