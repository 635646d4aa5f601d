"""`tokenmix distill`: a pretrained model with another mixer in it, taught by the original."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from tokenmix.errors import UserError
from tokenmix.files import check_regular
from tokenmix.lab.cli.checks import check_mixers
from tokenmix.lab.train.words import Pairs


def _layers(args: list[str]) -> tuple[int, ...]:
    found: list[int] = []
    for word in args[0].split(","):
        first, dash, last = word.strip().partition("-")
        numbers = first.isdecimal() and (last.isdecimal() and int(first) <= int(last) if dash else not last)
        if not numbers:
            raise ValueError(f"{word!r} is not a layer; give numbers from 0 as in 3-5 or 0,2,4")
        found += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(found))


Layers = Annotated[
    tuple[int, ...],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="3-5|0,2,4",
        instance_from_str=_layers,
        is_instance=lambda x: isinstance(x, tuple),
        str_from_instance=lambda x: [",".join(map(str, x))],
    ),
]


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Replace attention in a text model of Hugging Face and teach it the original's outputs; no labels."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """A local folder with model and tokenizer."""
    to: str
    """The mixer, a name of tokenmix list mixers or module:Class."""
    text: Path
    """A file with a text in each line."""
    out: Path
    """Folder to write; it must not exist, or be empty."""
    layers: Annotated[Layers | None, tyro.conf.arg(help_behavior_hint="(default: all)")] = None
    """Attention layers to replace, by number from 0."""
    mixer_kwargs: Pairs = field(default_factory=dict)
    """Arguments of the mixer, for example num_slots=32."""
    drop: Literal["positions"] | None = None
    """positions: leave out relative or rotary positions inside an attention, which no mixer has; else it is refused."""
    output: Literal["mean", "cls", "tokens"] = "mean"
    """What is matched: the mean of the tokens, as in sentence embeddings, the first token, or every token."""
    loss: Literal["cosine", "mse"] = "cosine"
    """cosine: of directions; mse: the squared error over the original's mean square."""
    steps: int = 1000
    """Training steps; 0 replaces the layers and measures."""
    batch_size: int = 32
    """Texts a step."""
    lr: float = 1e-3
    """Learning rate."""
    max_length: int = 128
    """Tokens at which texts are cut; the longest text of mixers with a matrix over tokens."""
    held_out: int = 500
    """Texts on which fidelity is measured, at most a tenth of all."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: by autocast; faster on processors that have it."""
    threads: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: PyTorch's own choice)")] = None
    """CPU threads of PyTorch."""
    seed: int = 0
    """Seed of the split, the order and the new weights."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int | None:
        check_mixers([self.to])
        for name, least in (("steps", 0), ("batch_size", 1), ("max_length", 1), ("held_out", 1)):
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            if value < least:
                raise UserError(f"{option} must be at least {least}, got {value}; give {least} or more")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"--threads must be at least 1, got {self.threads}; give 1 or more")
        if not 0 < self.lr < float("inf"):
            raise UserError(f"--lr must be a positive number, got {self.lr}; give one such as 1e-3")
        if not self.folder.is_dir():
            raise UserError(f"no folder {self.folder}; give a local one with config.json, weights and tokenizer")
        check_regular(self.text)
        import torch

        from tokenmix.files import to_json
        from tokenmix.lab.convert import convert_folder, read_texts, say

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        swap, report = convert_folder(
            self.folder,
            self.to,
            read_texts(self.text),
            self.out,
            layers=self.layers,
            mixer_kwargs=self.mixer_kwargs,
            drop=self.drop,
            output=self.output,
            loss=self.loss,
            steps=self.steps,
            batch_size=self.batch_size,
            lr=self.lr,
            max_length=self.max_length,
            held_out=self.held_out,
            precision=self.precision,
            seed=self.seed,
            progress=say,
        )
        print(to_json({"swap": swap.to_json(), "distill": report.to_json()}) if self.json else report)
        say(f"{self.out}: opened by AutoModel.from_pretrained after import tokenmix.register")
        return 130 if report.interrupted else None
