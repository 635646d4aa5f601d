"""What `tokenmix swap` works on, by a name or a folder; and its `--rank`."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from tokenmix.distillation import LayerRanking, rank_layers
from tokenmix.errors import UserError
from tokenmix.files import read_json, user_path
from tokenmix.lab.convert import TextBatches, longest, open_folder, read_texts, split_texts
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.programs import Batch
from tokenmix.lab.train.task import TaskData
from tokenmix.models.foreign import open_model
from tokenmix.registry import MODELS, TORCHVISION, Arguments, check_models, is_foreign

BATCH, HELD_OUT, MAX_LENGTH = 32, 512, 128


def load_model(target: str, img_size: int | None) -> tuple[nn.Module, tuple[object, ...] | None]:
    """A model of ours or timm's, or `torchvision:NAME`, with shapes only; of `module:factory`; or of a run folder.

    With it the arguments of a forward pass, which a run's data tells; None for those that the model tells itself.
    """
    folder = user_path(target)
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
    check_models([target])
    try:
        with torch.device("meta") if target.startswith(TORCHVISION) or not is_foreign(target) else nullcontext():
            return open_model(target, img_size), None
    except TypeError as error:
        if img_size is None:
            raise
        raise UserError(f"{target} is built without an image size; omit --img-size ({error})") from None


def rank_folder(folder: Path, to: str, where: str, text: Path | None, steps: int, swap: Arguments) -> LayerRanking:
    """Rank the layers of a run on images by its own data, or those of a text model of Hugging Face by a file.

    A run's layers are compared by its logits, a text model's by the mean of the tokens, on samples that nothing was
    fitted to; a run's are training samples or, where it has them, validation samples. `swap` are arguments of
    `swap_attention`.
    """
    config = folder / "config.json"
    if config.exists() and "model_type" in read_json(config):
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
    size = min(BATCH, data.num_train // 2)
    if data.num_validation:
        held_out, images = data.validation_batches(batch_size=size), _Images(folder, data, size)
    else:
        count = max(1, min(HELD_OUT // size, data.num_train // size // 2))
        held_out, images = itertools.islice(_Images(folder, data, size), count), _Images(folder, data, size, count)
    return rank_layers(
        task.model,
        to,
        images,
        held_out=[_image(folder, batch) for batch in held_out],
        where=where,
        loss="kl",
        steps=steps,
        example_inputs=task.swap_example(),
        **swap,
    )


class _Images:
    """Training images of a run's data from batch `start` on."""

    def __init__(self, run: Path, data: TaskData, size: int, start: int = 0) -> None:
        self.run, self.data, self.size, self.start = run, data, size, start

    def __iter__(self) -> Iterator[Tensor]:
        batches = self.data.train_batches(batch_size=self.size, epoch=0, start=self.start)
        return (_image(self.run, batch) for batch in batches)


def _image(run: Path, batch: Batch | Tensor) -> Tensor:
    images = batch if isinstance(batch, Tensor) else batch.get("image")
    if not isinstance(images, Tensor):
        raise UserError(f"{run} is not trained on batches of images; rank its layers in Python by tokenmix.rank_layers")
    return images
