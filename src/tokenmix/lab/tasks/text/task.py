"""Shared code of text tasks: sequences and tokenizer, transformers models, sentences to predict."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.files import Values, user_path
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.indexed import IndexedDataset
from tokenmix.lab.tasks.foreign import build_theirs, class_fields, described_architecture, folder_of, from_folder
from tokenmix.lab.tasks.text.files import read_lines
from tokenmix.lab.tasks.text.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from tokenmix.lab.train.checkpoint import read_weights
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distillation import DistillingTask
from tokenmix.lab.train.distributed import distributed_info
from tokenmix.lab.train.folder import TOKENIZER, RunFolder
from tokenmix.lab.train.programs import Description, HubForm, check_sizes
from tokenmix.lab.train.task import IndexedData, TaskData, TaskModule
from tokenmix.registry import Arguments, is_transformers
from tokenmix.swap.probe import watch_pass
from tokenmix.text import create_config, describe
from tokenmix.text.blocks import check_segments, extend_gate, resized_bias

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


AFTER_PADDING = ("roberta", "camembert", "mpnet", "data2vec-text", "longformer", "xmod")
"""Model types of transformers, or parts of them, whose positions begin after that of the padding."""
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "labels", "start_positions", "end_positions")


def hub_form(pipeline: str, auto: str) -> HubForm:
    """Form of models that transformers' automatic class `auto` loads, with their tokenizer."""
    code = (
        f"import tokenmix.register\nfrom transformers import {auto}, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{{repo}}")\nmodel = {auto}.from_pretrained("{{repo}}")\n'
        'outputs = model(**tokenizer("a text", return_tensors="pt"))'
    )
    return HubForm("transformers", pipeline, "text", code)


class Answering(nn.Module):
    """A transformers model with one output tensor, for export."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits; for question answering those of start and end, (B, N, 2)."""
        out = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return out.logits if hasattr(out, "logits") else torch.stack([out.start_logits, out.end_logits], -1)


class TextData(IndexedData):
    """Sequences of at most `seq_len` tokens, and their tokenizer."""

    def __init__(
        self,
        *parts: IndexedDataset | None,
        tokenizer: "PreTrainedTokenizerFast",
        config: TrainConfig,
        description: Values,
    ) -> None:
        super().__init__(*parts, config=config, description=description)  # type: ignore[arg-type]
        self.tokenizer = tokenizer

    def save(self, run: Path) -> None:
        # Remove the truncation of the last call; each call sets its own.
        self.tokenizer.backend_tokenizer.no_truncation()
        # Length to which transformers' pipelines truncate a text.
        self.tokenizer.model_max_length = self.description["seq_len"]
        save_tokenizer(self.tokenizer, run / TOKENIZER)


class TextTask(TaskModule):
    """A task on token sequences, with a model of `tokenmix.text` or of transformers.

    `network` is the class of our models. `fields` are fields of its config that neither data nor user set. `auto` is
    the automatic class that builds transformers models.
    """

    network: ClassVar[type[Any]]
    auto: ClassVar[str]
    fields: ClassVar[Arguments] = {}
    inspects: ClassVar[Literal["images", "text", "nothing"]] = "text"
    set_elsewhere: ClassVar[Mapping[str, str]] = {
        "vocab_size": "--tokenizer",
        "pad_token_id": "--tokenizer",
        "max_position_embeddings": "--seq-len",
        "num_labels": "--data",
    }

    @classmethod
    def tokenization(
        cls, config: TrainConfig, like: Description | None, texts: Iterable[str]
    ) -> tuple["PreTrainedTokenizerFast", int, Values]:
        """The tokenizer, the length of a sequence, and what the description says of them and of a foreign model.

        The tokenizer is the named one, else that of --init-from or the teacher, else a new one trained on the texts.
        `UserError` if a model of transformers takes fewer pieces or tokens.
        """
        source = config.options.tokenizer
        if source is None and is_transformers(config.model.model):
            source = folder_of(config.model.model)
        elif source is None:
            starts = (config.loop.init_from, getattr(config.options, "teacher", None))
            runs = [RunFolder.of_weights(Path(start)) for start in starts if start is not None]
            folders = [run.path / TOKENIZER for run in runs if run is not None]
            source = next((folder for folder in folders if folder.is_dir()), None)
        known = source is not None
        tokenizer = load_tokenizer(source) if known else train_tokenizer(texts, vocab_size=config.options.vocab_size)
        pieces, length = len(tokenizer), config.options.seq_len if like is None else int(like["seq_len"])
        described: Values = {"vocab_size": pieces, "pad_token_id": tokenizer.pad_token_id, "seq_len": length}
        described |= described_architecture(config, like)
        if "architecture" not in described:
            return tokenizer, length, described
        architecture = described["architecture"]
        size = architecture.get("vocab_size", pieces)
        if pieces > size:
            raise UserError(f"the tokenizer has {pieces:,} pieces and the model {size:,}; give its own")
        # RoBERTa's positions begin after that of its padding.
        kind, pad = architecture["model_type"], architecture.get("pad_token_id")
        fixed = kind == "mpnet" or pad is None
        unused = (1 if fixed else pad) + 1 if any(part in kind for part in AFTER_PADDING) else 0
        most = architecture.get("max_position_embeddings", length + unused) - unused
        if length > most:
            raise UserError(
                f"{config.model.model} takes {most} tokens, got --seq-len {length}; give --seq-len {most} or less"
            )
        return tokenizer, length, described

    @classmethod
    def build_model(cls, config: TrainConfig, data: Description) -> nn.Module:
        if "architecture" in data:
            return build_theirs(config, data, cls.auto)
        given = {"vocab_size": data["vocab_size"], "pad_token_id": data["pad_token_id"]}
        given |= {"max_position_embeddings": data["seq_len"], **cls.fields}
        given |= class_fields(data)
        return cls.network(create_config(config.model.model, **{**given, **config.model.model_kwargs})).train()

    @classmethod
    def check(cls, config: TrainConfig, batch_size: int) -> None:
        super().check(config, batch_size)
        if not is_transformers(config.model.model):
            create_config(config.model.model, **config.model.model_kwargs)

    @classmethod
    def summarize_model(cls, name: str, sizes: Arguments, model_kwargs: Arguments) -> Values:
        """Parameters and multiply-adds of the masked-language model, and published figures."""
        longest = "--model-kwargs max_position_embeddings=N"
        check_sizes(sizes, (), f"{name} is a text model, whose longest text is {longest}")
        return describe(name, **model_kwargs)

    def initial_weights(self, source: Path) -> dict[str, Tensor]:
        """Weights of a safetensors file or folder, fitted to the model's length and head.

        Gates and learned positions are cut or extended to the model's longest sequence; sequences within both lengths
        keep their output. A missing head, or one for other classes, starts new, with a message. Other differences are
        left for `put_weights` to reject.
        """
        model: Any = self.model
        given, own = read_weights(source), model.state_dict()
        body = f"{model.base_model_prefix}."
        weights = {key: value for key, value in given.items() if key.startswith(body)}
        if not weights:
            raise UserError(
                f"{source} holds no text model: none of its tensors begins with {body!r}; give a run of a text task"
            )
        words = f"{body}embeddings.word_embeddings.weight"
        if words in weights and len(weights[words]) != len(own[words]):
            run = RunFolder.of_weights(source)
            raise UserError(
                f"{source} was trained with a vocabulary of {len(weights[words]):,} tokens and this tokenizer has "
                f"{len(own[words]):,}; give its own by --tokenizer {'FOLDER' if run is None else run.path / TOKENIZER}"
            )
        for key in [key for key in weights if key in own and weights[key].shape != own[key].shape]:
            stem, _, name = key.rpartition(".")
            given_value, value = weights[key], own[key]
            if name == "weight" and stem.endswith("gating") and given_value.dim() == value.dim():
                bias = f"{stem}.bias"
                weights[key], weights[bias] = extend_gate(given_value, given[bias], len(own[bias]))
            elif stem.endswith("position_embeddings") and given_value.shape[1] == value.shape[1]:
                kept = given_value[: len(value)]
                weights[key] = torch.cat([kept, value[len(kept) :]])
            elif stem.endswith("relative") and len(given_value) == len(value):
                weights[key] = resized_bias(given_value, value.shape[1], "extend")
        fresh = []
        for key, value in own.items():
            tied = (getattr(model, "_tied_weights_keys", None) or {}).get(key)
            if tied in weights:
                weights[key] = weights[tied]
            elif not key.startswith(body) or key.startswith(f"{body}pooler."):
                fits = key in given and given[key].shape == value.shape
                weights[key] = given[key] if fits else value
                fresh += [] if fits else [key]
        # A classifier's body has a pooler, a masked-language model's has none.
        weights = {key: value for key, value in weights.items() if key in own or not key.startswith(f"{body}pooler.")}
        if fresh and distributed_info().first:
            log(f"the body is that of {source}, the head starts fresh: {', '.join(fresh)}")
        return weights

    def macs(self) -> int:
        if "architecture" in self.data:
            return watch_pass(self.model, self.swap_example(), (), lambda *_: None)[1]
        return self.model.macs(int(self.data["seq_len"]))  # type: ignore[operator]

    def example(self) -> dict[str, Tensor]:
        n = int(self.data["seq_len"])
        ids = torch.arange(2 * n).view(2, n) % int(self.data["vocab_size"])
        mask = torch.ones(2, n, dtype=torch.long)
        mask[1, n // 2 :] = 0
        return {"input_ids": ids, "attention_mask": mask}

    def swap_example(self) -> tuple[Tensor]:
        """Tokens of one sequence, without a mask, whose values are unreadable on the meta device."""
        return (self.example()["input_ids"][:1],)

    def inference_module(self) -> nn.Module:
        return Answering(self.model)

    def save_for_hub(self, folder: Path) -> nn.Module:
        """In transformers' format, with the tokenizer; logits are at all positions, also with labels."""
        if "architecture" not in self.data:
            self.model.config.predict = "all"  # type: ignore[union-attr]
        self.model.save_pretrained(folder)  # type: ignore[operator]
        self.tokenizer().save_pretrained(folder)
        return Answering(from_folder(type(self.model), folder))

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        assert self.config.options.tokenizer is not None
        return load_tokenizer(self.config.options.tokenizer)


class DistillingTextTask(TextTask, DistillingTask):
    """A text task that can learn from the logits of a teacher with the same tokenizer."""

    def teacher_logits(self, teacher: DistillingTask, batch: Mapping[str, Tensor]) -> Tensor:
        """The teacher's logits on the same tokens; masked-language models give those at masked positions."""
        return teacher.model(**inputs_of(batch, teacher.model)).logits

    def check_teacher(self, teacher: DistillingTask, data: TaskData) -> None:
        """Also requires the teacher's tokenizer, and sequences no longer than the teacher's."""
        super().check_teacher(teacher, data)
        name = self.options.teacher
        if teacher.tokenizer().get_vocab() != data.tokenizer.get_vocab():  # type: ignore[attr-defined]
            raise UserError(f"the teacher {name} has another tokenizer; give --tokenizer {name}/{TOKENIZER}")
        if self.data["seq_len"] > teacher.data["seq_len"]:
            raise UserError(
                f"the teacher {name} takes {teacher.data['seq_len']} tokens; give --seq-len {teacher.data['seq_len']}"
            )


def inputs_of(batch: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    taken = {name: value for name, value in batch.items() if name in INPUTS}
    segments = getattr(getattr(model, "config", None), "type_vocab_size", 0)
    # RoBERTa has one kind of token, DistilBERT none.
    if segments < 2:
        taken.pop("token_type_ids", None)
    else:
        check_segments(taken.get("token_type_ids"), segments)
    return taken


class Sentence(NamedTuple):
    """A text to predict, and its location."""

    text: str
    where: str


def read_sentences(inputs: Sequence[str | Path]) -> list[Sentence]:
    """Lines of files, and other inputs as texts; `UserError` for a missing or non-UTF-8 file."""
    found = []
    for given in inputs:
        one_word = len(str(given).split()) == 1
        path = user_path(given) if one_word else Path(given)
        try:
            is_file = path.is_file()
        except OSError:  # too long for a file name: a text
            is_file = False
        # One word with such a suffix is a file name, not a sentence.
        named = isinstance(given, Path) or (one_word and path.suffix in (".txt", ".tsv", ".json", ".jsonl"))
        if is_file:
            lines = [line.strip() for line in read_lines(path)]
            if not any(lines):
                raise UserError(f"{path} holds no sentence; write one on each line")
            found += [Sentence(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line]
        elif named:
            raise UserError(f"no file {given}; give a file of sentences, or a sentence")
        elif not str(given).strip():
            raise UserError("an empty text has no prediction; give a sentence, or a file of sentences")
        else:
            found.append(Sentence(str(given).strip(), "command line"))
    return found
