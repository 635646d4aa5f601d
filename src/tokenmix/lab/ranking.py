"""`tokenmix swap --rank`: the layers of a run or of a text model, by how well a mixer replaces them."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmix.distillation import LayerRanking, rank_layers
from tokenmix.errors import UserError
from tokenmix.files import read_json
from tokenmix.lab.convert import TextBatches, longest, open_folder, read_texts, split_texts
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.task import TaskData

BATCH, HELD_OUT, MAX_LENGTH = 32, 512, 128


def rank_folder(
    folder: Path, to: str, where: str, text: Path | None, steps: int, swap: Mapping[str, Any]
) -> LayerRanking:
    """Rank the layers of a run on images by its own data, or those of a text model of Hugging Face by a file.

    A run's layers are compared by its logits, a text model's by the mean of the tokens, on samples that nothing was
    fitted to; a run's are training samples or, where it has them, validation samples. `swap` are arguments of
    `swap_attention`.
    """
    config = folder / "config.json"
    if config.exists() and "model_type" in read_json(config):
        return _rank_text_model(folder, to, where, text, steps, swap)
    if text is not None:
        raise UserError(f"{folder} is a run, whose own data is used; leave out --text")
    return _rank_run(folder, to, where, steps, swap)


def _rank_text_model(
    folder: Path, to: str, where: str, text: Path | None, steps: int, swap: Mapping[str, Any]
) -> LayerRanking:
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


def _rank_run(run: Path, to: str, where: str, steps: int, swap: Mapping[str, Any]) -> LayerRanking:
    task = load_task(run)
    data = type(task).load_data(task.config, like=task.data)
    size = min(BATCH, data.num_train // 2)
    if data.num_validation:
        held_out, learned = data.validation_batches(batch_size=size), _Images(data, size)
    else:
        count = max(1, min(HELD_OUT // size, data.num_train // size // 2))
        held_out = itertools.islice(_Images(data, size), count)
        learned = _Images(data, size, count)
    return rank_layers(
        task.model,
        to,
        learned,
        held_out=[_image(run, batch) for batch in held_out],
        where=where,
        loss="kl",
        steps=steps,
        example_inputs=task.swap_example(),
        **swap,
    )


class _Images:
    """Training images of a run's data from batch `start` on."""

    def __init__(self, data: TaskData, size: int, start: int = 0) -> None:
        self.data, self.size, self.start = data, size, start

    def __iter__(self) -> Iterator[Tensor]:
        batches = self.data.train_batches(batch_size=self.size, epoch=0, start=self.start)
        return (batch["image"] if isinstance(batch, dict) else batch for batch in batches)


def _image(run: Path, batch: Any) -> Tensor:
    images = batch if isinstance(batch, Tensor) else batch.get("image") if isinstance(batch, dict) else None
    if not isinstance(images, Tensor):
        raise UserError(f"{run} is not trained on batches of images; rank its layers in Python by tokenmix.rank_layers")
    return images
