"""A folder of Hugging Face, converted: some of its attention replaced, and distilled from the original on texts."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor, nn

from tokenmix.distillation import DistillReport, distill
from tokenmix.environment import environment, quiet_transformers
from tokenmix.errors import UserError, as_user_error
from tokenmix.files import check_regular, copy_folder, new_folder, read_bytes, read_text, write_bytes, write_json
from tokenmix.registry import Arguments
from tokenmix.swap import SwapReport, swap_attention
from tokenmix.swap.registry import find_sites

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WINDOW = 50
MOST_HELD_OUT = 10
KEPT = (".json", ".txt", ".model")
NOT_KEPT = ("config.json", "model.safetensors.index.json", "distill.json")


def read_texts(file: Path) -> list[str]:
    """The lines of a file, without those that are empty or repeated."""
    texts = list(dict.fromkeys(filter(None, map(str.strip, read_text(file).splitlines()))))
    if len(texts) < 2 * MOST_HELD_OUT:
        raise UserError(f"{file} has {len(texts)} different lines; give at least {2 * MOST_HELD_OUT}, one text in each")
    return texts


class TextBatches:
    """Texts as batches of a tokenizer's arguments, in random order; a batch has texts of about the same length.

    The order is PyTorch's own random state's, another in each pass.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], batch_size: int, max_length: int
    ) -> None:
        self.tokenizer, self.texts, self.batch_size, self.max_length = tokenizer, texts, batch_size, max_length

    def __len__(self) -> int:
        return -(-len(self.texts) // self.batch_size)

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        order = torch.randperm(len(self.texts)).tolist()
        window = WINDOW * self.batch_size
        for start in range(0, len(order), window):
            texts = sorted((self.texts[i] for i in order[start : start + window]), key=len)
            batches = [texts[i : i + self.batch_size] for i in range(0, len(texts), self.batch_size)]
            for i in torch.randperm(len(batches)).tolist():
                yield self.encoded(batches[i])

    def encoded(self, texts: Sequence[str]) -> Mapping[str, Tensor]:
        """One batch, padded to its longest text."""
        return self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        )

    def in_order(self) -> list[Mapping[str, Tensor]]:
        """All batches in the order of the texts."""
        starts = range(0, len(self.texts), self.batch_size)
        return [self.encoded(self.texts[start : start + self.batch_size]) for start in starts]


def split_texts(texts: Sequence[str], held_out: int, seed: int) -> tuple[list[str], list[str]]:
    """Texts to learn from and held-out ones, at random; at most a tenth is held out."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(held_out, len(texts) // MOST_HELD_OUT)
    return [texts[i] for i in order[count:]], [texts[i] for i in order[:count]]


def open_folder(folder: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model and the tokenizer of a folder; no code in it is run, and nothing is fetched."""
    import transformers

    from tokenmix.swap.opening import register_swapped

    register_swapped()
    if not (folder / "config.json").exists():
        raise UserError(
            f"{folder} has no config.json; give the folder of a model of Hugging Face, which save_pretrained writes"
        )
    check_regular(folder / "config.json")
    # Whatever transformers raises for a folder that it does not know.
    with (
        as_user_error(f"{folder} cannot be opened by transformers (", "); give a complete folder"),
        quiet_transformers(),
    ):
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return model.eval(), cast("PreTrainedTokenizerBase", tokenizer)


def longest(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", wanted: int) -> int:
    """The number of tokens that is wanted, or the most that the model takes."""
    positions = getattr(model.config, "max_position_embeddings", None) or wanted
    return min(wanted, positions, tokenizer.model_max_length)


def is_no_embedding(model: nn.Module) -> Callable[[str, nn.Parameter], bool]:
    """All that is trained but tables of embeddings, which a text changes in a few rows only."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return lambda name, parameter: id(parameter) not in tables


def convert_folder(
    folder: Path,
    to: str,
    texts: Sequence[str],
    out: Path,
    *,
    layers: Sequence[int] | None = None,
    mixer_kwargs: Arguments | None = None,
    drop: Literal["positions"] | None = None,
    output: Literal["mean", "cls", "tokens"] = "mean",
    loss: Literal["cosine", "mse"] = "cosine",
    steps: int = 1000,
    batch_size: int = 32,
    lr: float = 1e-3,
    max_length: int = 128,
    held_out: int = 500,
    precision: Literal["fp32", "bf16"] = "fp32",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> tuple[SwapReport, DistillReport]:
    """Replace attention of a text model and distill it from the original; leaves a folder of the same form.

    The arguments are the options of `tokenmix distill`; `progress` is given lines.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; give another --out")
    teacher, tokenizer = open_folder(folder)
    max_length = longest(teacher, tokenizer, max_length)
    student, names = copy.deepcopy(teacher), [site.name for site in find_sites(teacher)]
    wrong = [number for number in layers or () if number >= len(names)]
    if wrong:
        raise UserError(f"there is no layer {wrong[0]}; the model has layers 0 to {len(names) - 1}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        swap = swap_attention(
            student,
            to,
            names if layers is None else [names[number] for number in layers],
            num_tokens=max_length,
            example_inputs=(torch.zeros(1, max_length, dtype=torch.long),),
            mixer_kwargs=mixer_kwargs,
            drop=drop,
        )
    if progress is not None:
        for line in str(swap).splitlines():
            progress(line)
    learned, kept = split_texts(texts, held_out, seed)
    report = distill(
        teacher,
        student,
        TextBatches(tokenizer, learned, batch_size, max_length),
        output="last_hidden_state" if output == "tokens" else output,
        loss=loss,
        steps=steps,
        lr=lr,
        train_only=is_no_embedding(student),
        held_out=TextBatches(tokenizer, kept, batch_size, max_length).in_order(),
        precision=precision,
        seed=seed,
        progress=progress,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as partial:
        with quiet_transformers():
            student.save_pretrained(partial)
        # transformers leaves it readable for its owner alone.
        for file in partial.glob("*.safetensors"):
            file.chmod((partial / "config.json").stat().st_mode)
        # The tokenizer, and what sentence-transformers keeps, such as the folder 1_Pooling.
        for entry in sorted(folder.iterdir()):
            if entry.is_symlink() or entry.name in NOT_KEPT:
                continue
            if entry.is_dir() and entry.name[:1].isdigit():
                (partial / entry.name).mkdir()
                copy_folder(entry, partial / entry.name)
            elif entry.is_file() and entry.suffix in KEPT:
                write_bytes(partial / entry.name, read_bytes(entry))
        write_json(partial / "distill.json", {"swap": swap.to_json(), "distill": report.to_json(), **environment()})
    return swap, report
