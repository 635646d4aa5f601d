"""`tokenmix swap` by name or folder, with its `--rank`; and `tokenmix distill` of a Hugging Face folder on texts."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from tokenmix.distillation import DistillReport, LayerRanking, distill, rank_layers
from tokenmix.environment import environment, quiet_transformers
from tokenmix.errors import UserError, as_user_error
from tokenmix.files import (
    check_new,
    check_regular,
    copy_folder,
    new_folder,
    read_bytes,
    read_json,
    read_text,
    user_path,
    write_bytes,
    write_json,
)
from tokenmix.lab.tasks.foreign import from_folder
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.programs import Batch
from tokenmix.models.foreign import open_model
from tokenmix.registry import MODELS, TORCHVISION, Arguments, is_foreign
from tokenmix.swap import SwapReport, swap_attention
from tokenmix.swap.registry import find_sites

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


WINDOW = 50
MOST_HELD_OUT = 10
KEPT = (".json", ".txt", ".model")
NOT_KEPT = ("config.json", "model.safetensors.index.json", "distill.json")


def read_texts(file: Path) -> list[str]:
    """Lines of a file, without empty and repeated ones."""
    texts = list(dict.fromkeys(filter(None, map(str.strip, read_text(file).splitlines()))))
    if len(texts) < 2 * MOST_HELD_OUT:
        raise UserError(f"{file} has {len(texts)} different lines; give at least {2 * MOST_HELD_OUT}, one text in each")
    return texts


class TextBatches:
    """Texts as batches of similar length in random order, new in each pass by PyTorch's random state."""

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
        return self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        )

    def in_order(self) -> list[Mapping[str, Tensor]]:
        starts = range(0, len(self.texts), self.batch_size)
        return [self.encoded(self.texts[start : start + self.batch_size]) for start in starts]


def split_texts(texts: Sequence[str], held_out: int, seed: int) -> tuple[list[str], list[str]]:
    """Random split into training texts and held-out texts; at most a tenth is held out."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(held_out, len(texts) // MOST_HELD_OUT)
    return [texts[i] for i in order[count:]], [texts[i] for i in order[:count]]


def open_folder(folder: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Model and tokenizer of a folder; no code in the folder is run, and nothing is fetched."""
    return _from_folder(folder, "AutoModel").eval(), _from_folder(folder, "AutoTokenizer")


def _from_folder(folder: Path, kind: Literal["AutoModel", "AutoTokenizer"]) -> Any:
    import transformers

    import tokenmix.register  # noqa: F401  (our text models, and swapped ones)

    if not (folder / "config.json").exists():
        raise UserError(
            f"{folder} has no config.json; give the folder of a model of Hugging Face, which save_pretrained writes"
        )
    check_regular(folder / "config.json")
    unknown = as_user_error(f"{folder} cannot be opened by transformers (", "); give a complete folder")
    with unknown:
        return from_folder(getattr(transformers, kind), folder)


def _is_of_transformers(folder: Path) -> bool:
    config = folder / "config.json"
    if not config.exists():
        return False
    with as_user_error(f"{config} is damaged (", "); put a whole one back", ValueError, RecursionError):
        found = read_json(config)
    return isinstance(found, dict) and "model_type" in found


def longest(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", wanted: int) -> int:
    """The requested number of tokens, limited to the model's maximum."""
    positions = getattr(model.config, "max_position_embeddings", None) or wanted
    return min(wanted, positions, tokenizer.model_max_length)


def is_no_embedding(model: nn.Module) -> Callable[[str, nn.Parameter], bool]:
    """Selects all parameters except embedding tables, of which a text changes only a few rows."""
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
    """Replace attention of a text model and distill it from the original; writes a folder in the same format.

    The arguments are the options of `tokenmix distill`; `progress` receives lines.
    """
    check_new(out)
    teacher, tokenizer = open_folder(folder)
    max_length = longest(teacher, tokenizer, max_length)
    student, names = copy.deepcopy(teacher), [site.name for site in find_sites(teacher) if site.known]
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
    with new_folder(out) as partial:
        with quiet_transformers():
            student.save_pretrained(partial)
        # transformers makes it readable for its owner only.
        for file in partial.glob("*.safetensors"):
            file.chmod((partial / "config.json").stat().st_mode)
        # The tokenizer, and files of sentence-transformers, such as the folder 1_Pooling.
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


BATCH, HELD_OUT, MAX_LENGTH = 32, 512, 128


def load_model(target: str, img_size: int | None) -> tuple[nn.Module, tuple[object, ...] | None]:
    """A model by name or folder, and its forward arguments; None if the model knows its own.

    Models of ours or timm's and `torchvision:NAME` have shapes only. Others are `module:factory`, a run folder, whose
    data gives the arguments, or a folder of Hugging Face.
    """
    folder = user_path(target)
    if _is_of_transformers(folder):
        if img_size is not None:
            raise UserError(f"{target} has the image size of its config; omit --img-size")
        return _from_folder(folder, "AutoModel").eval(), None
    if folder.is_dir():
        if img_size is not None:
            raise UserError(f"{target} is a run with a fixed image size; omit --img-size")
        task = load_task(folder)
        image: list[int] = [task.data.get("channels", 0), *task.data.get("img_size", ())]
        return task.model, task.swap_example() or ((torch.zeros(1, *image),) if len(image) == 3 else None)
    if target in MODELS and "image-classification" not in (tasks := MODELS[target].tasks):
        raise UserError(
            f"{target} is a model of {', '.join(tasks)}, whose mixer is one of its arguments; by name, swap takes "
            "image classifiers only"
        )
    try:
        with torch.device("meta") if target.startswith(TORCHVISION) or not is_foreign(target) else nullcontext():
            return open_model(target, img_size), None
    except TypeError as error:
        if img_size is None:
            raise
        raise UserError(f"{target} is built without an image size; omit --img-size ({error})") from None


def rank_folder(folder: Path, to: str, where: str, text: Path | None, steps: int, swap: Arguments) -> LayerRanking:
    """Rank the layers of a run on images by its own data, or of a Hugging Face text model by a file.

    A run's layers are compared by logits, a text model's by the mean of the tokens, on samples outside the fit. For a
    run these are validation samples if there are any, else training samples. `swap` are arguments of `swap_attention`.
    """
    if _is_of_transformers(folder):
        if text is None:
            raise UserError(f"{folder} is a model without data; give --text FILE with a text in each line")
        model, tokenizer = open_folder(folder)
        length = longest(model, tokenizer, MAX_LENGTH)
        learned, kept = split_texts(read_texts(text), HELD_OUT, seed=0)
        return rank_layers(
            model,
            to,
            TextBatches(tokenizer, learned, BATCH, length),
            held_out=TextBatches(tokenizer, kept, BATCH, length).in_order(),
            where=where,
            output="mean",
            steps=steps,
            num_tokens=length,
            example_inputs=(torch.zeros(1, length, dtype=torch.long),),
            **swap,
        )
    if text is not None:
        raise UserError(f"{folder} is a run, whose own data is used; leave out --text")
    task = load_task(folder)
    data = type(task).load_data(task.config, like=task.data)
    size, start = min(BATCH, data.num_train // 2), 0
    train_batches = partial(data.train_batches, batch_size=size, epoch=0)
    if data.num_validation:
        held_out = data.validation_batches(batch_size=size)
    else:
        start = max(1, min(HELD_OUT // size, data.num_train // size // 2))
        held_out = itertools.islice(train_batches(start=0), start)
    return rank_layers(
        task.model,
        to,
        _Images(folder, partial(train_batches, start=start)),
        held_out=list(_Images(folder, lambda: held_out)),
        where=where,
        loss="kl",
        steps=steps,
        example_inputs=task.swap_example(),
        **swap,
    )


class _Images:
    """Images of a run's batches; each pass begins anew."""

    def __init__(self, run: Path, batches: Callable[[], Iterable[Batch]]) -> None:
        self.run, self.batches = run, batches

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.batches():
            if not isinstance(images := batch.get("image"), Tensor):
                raise UserError(
                    f"{self.run} is not trained on batches of images; rank its layers in Python by tokenmix.rank_layers"
                )
            yield images
