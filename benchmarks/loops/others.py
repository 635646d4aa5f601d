"""Masked language models with the Trainer of Hugging Face, PCT by a plain loop, detection with that of torchvision."""

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.ops import box_convert
from torchvision.transforms import v2

from loops.measure import Clock
from loops.pictures import SMOOTHING, common, optimizer_of, ours
from tokenmix.lab.train.sources import make_config
from tokenmix.models import create_model

Loops = dict[str, Callable[[Clock], None]]


@dataclass(frozen=True)
class Sizes:
    """Samples of a step, and how large each is: tokens, points or pixels."""

    batch_size: int
    size: int


def masked_lm(folder: Path, model: str, sizes: Sizes) -> Loops:
    """Token-level masking of 15 % in sequences of one length, from texts that were tokenised before."""
    text, tokenizer = glosses(folder)

    def trainer(clock: Clock) -> None:
        from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

        from tokenmix.lab.tasks.text.tokenizer import load_tokenizer
        from tokenmix.text import GMLPForMaskedLM, create_config

        loaded = load_tokenizer(tokenizer)
        # As the trainer builds it: the head is applied to the masked positions alone.
        sized = {"max_position_embeddings": sizes.size, "predict": "labelled"}
        net = GMLPForMaskedLM(create_config(model, vocab_size=len(loaded), pad_token_id=loaded.pad_token_id, **sized))

        class Tick(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.tick(sizes.batch_size * sizes.size)

        with tempfile.TemporaryDirectory() as out:
            arguments = TrainingArguments(
                out,
                per_device_train_batch_size=sizes.batch_size,
                learning_rate=2e-3,
                weight_decay=0.05,
                max_grad_norm=1.0,
                max_steps=10**6,
                logging_steps=20,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            )
            collator = DataCollatorForLanguageModeling(loaded, mlm_probability=0.15)
            rows: Any = _blocks(text, loaded, sizes.size)
            Trainer(net, arguments, collator, train_dataset=rows, callbacks=[Tick()]).train()

    def config() -> Any:
        return make_config(
            task="masked-lm",
            model=model,
            data=f"text:{text}",
            tokenizer=tokenizer,
            seq_len=sizes.size,
            **common(sizes.batch_size, 0),
        )

    return {"tokenmix": ours(config, sizes.batch_size * sizes.size), "Hugging Face Trainer": trainer}


def glosses(folder: Path) -> tuple[Path, Path]:
    """WordNet's definitions as a text file, and a tokenizer of them; made once."""
    from recipes.datasets.text.wordnet import fetch_wordnet
    from tokenmix.lab.data.store import Names, fetched
    from tokenmix.lab.tasks.text.tokenizer import save_tokenizer, train_tokenizer

    text, tokenizer = folder / "text" / "train.txt", folder / "text" / "tokenizer"
    if not tokenizer.exists():
        tensors, _ = fetched("wordnet", None, fetch_wordnet)
        text.parent.mkdir(parents=True, exist_ok=True)
        names = Names(tensors["text"], tensors["ends"])
        lines = [" ".join(names[i].split()) for i in range(0, len(names), 8)]
        text.write_text("\n\n".join(lines))
        save_tokenizer(train_tokenizer(lines), tokenizer)
    return text, tokenizer


def _blocks(text: Path, tokenizer: Any, size: int) -> list[dict[str, list[int]]]:
    """Blocks of one length, as in transformers' run_mlm."""
    ids = list(chain(*(tokenizer(line)["input_ids"] for line in text.read_text().split("\n\n"))))
    return [{"input_ids": ids[i : i + size], "attention_mask": [1] * size} for i in range(0, len(ids) - size, size)]


def clouds(folder: Path, model: str, sizes: Sizes) -> Loops:
    """Clouds of 2,048 points in files, of which 1,024 are trained on, scaled and moved."""
    made = folder / "clouds"
    if not made.exists():
        rng, partial = np.random.default_rng(0), folder / "clouds.partial"
        for number in range(8 * sizes.batch_size):
            points = rng.normal(size=(2048, 3))
            points /= np.linalg.norm(points, axis=1, keepdims=True) if number % 2 else np.abs(points).max(1)[:, None]
            place = partial / ("test" if number < 8 else "train") / ("ball" if number % 2 else "box")
            place.mkdir(parents=True, exist_ok=True)
            np.save(place / f"{number}.npy", points.astype(np.float32))
        partial.rename(made)

    def plain(clock: Clock) -> None:
        files = sorted((made / "train").glob("*/*.npy"))
        data = _Clouds(
            [np.load(file) for file in files], [int(file.parent.name == "box") for file in files], sizes.size
        )
        loader = DataLoader(data, sizes.batch_size, shuffle=True, drop_last=True)
        net: nn.Module = create_model(model, num_classes=2)
        optimizer, total = optimizer_of(net), 0.0
        true, predicted = [], []
        net.train()
        while True:
            for points, labels in loader:
                optimizer.zero_grad()
                logits = net(points)
                loss = F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                total += loss.item() * len(points)
                true.append(labels.numpy())
                predicted.append(logits.detach().argmax(1).numpy())
                clock.tick(len(points))

    def config() -> Any:
        return make_config(
            task="point-classification",
            model=model,
            data=f"clouds:{made}",
            num_points=sizes.size,
            choice="first",
            smoothing=SMOOTHING,
            **common(sizes.batch_size, 0),
        )

    return {"tokenmix": ours(config, sizes.batch_size), "plain PCT loop": plain}


class _Clouds(Dataset):
    """As PCT reads ModelNet40: the first points, scaled to 2/3..3/2 and moved by 0.2 along each axis, shuffled."""

    def __init__(self, points: list[np.ndarray], labels: list[int], size: int) -> None:
        self.points, self.labels, self.size = points, labels, size

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        factors, offsets = np.random.uniform(2 / 3, 3 / 2, 3), np.random.uniform(-0.2, 0.2, 3)
        points = (self.points[index][: self.size] * factors + offsets).astype(np.float32)
        np.random.shuffle(points)
        return points, self.labels[index]


def boxes(folder: Path, model: str, sizes: Sizes) -> Loops:
    """Tiles of an aerial photograph with boxes of trees, mirrored at random."""
    made = coco_folder(folder, sizes)

    def reference(clock: Clock) -> None:
        data = _Coco(made / "train2017", made / "annotations" / "instances_train2017.json")
        loader = DataLoader(
            data, sizes.batch_size, shuffle=True, drop_last=True, collate_fn=lambda batch: tuple(zip(*batch))
        )
        net: nn.Module = create_model(model, num_classes=1, min_size=(sizes.size,), max_size=sizes.size)
        optimizer = optimizer_of(net)
        net.train()
        while True:
            for images, targets in loader:
                losses = net(list(images), [dict(target) for target in targets])
                loss = torch.stack(list(losses.values())).sum()
                if not np.isfinite(loss.item()):
                    raise FloatingPointError(f"the loss is {loss.item()}")
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                clock.tick(len(images))

    def config() -> Any:
        return make_config(
            task="detection", model=model, data=f"coco:{made}", img_size=sizes.size, **common(sizes.batch_size, 0)
        )

    return {"tokenmix": ours(config, sizes.batch_size), "torchvision's reference loop": reference}


class _Coco(Dataset):
    """torchvision's CocoDetection as its reference scripts transform it, mirrored half of the time."""

    def __init__(self, folder: Path, annotations: Path) -> None:
        document = json.loads(annotations.read_text())
        self.files = [folder / image["file_name"] for image in document["images"]]
        self.found: list[list[dict[str, Any]]] = [[] for _ in self.files]
        for one in document["annotations"]:
            self.found[one["image_id"]].append(one)
        self.change = v2.ToDtype(torch.float32, scale=True)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        found = self.found[index]
        image = v2.functional.pil_to_tensor(Image.open(self.files[index]).convert("RGB"))
        box = box_convert(torch.tensor([one["bbox"] for one in found], dtype=torch.float32), "xywh", "xyxy")
        if random.random() < 0.5:
            image = image.flip(-1)
            box[:, [0, 2]] = image.shape[-1] - box[:, [2, 0]]
        target = {"boxes": box, "labels": torch.zeros(len(found), dtype=torch.int64), "image_id": torch.tensor(index)}
        return self.change(image), target


def coco_folder(folder: Path, sizes: Sizes) -> Path:
    """The layout of COCO, made once."""
    from recipes.datasets.images.trees import fetch_trees
    from tokenmix.lab.data.store import fetched

    made, partial = folder / "coco", folder / "coco.partial"
    if made.exists():
        return made
    tensors, _ = fetched("trees", None, fetch_trees)
    picture, all_boxes, rng = tensors["image_0"], tensors["boxes_0"], random.Random(0)
    (partial / "annotations").mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 12 * sizes.batch_size), ("val", 2)):
        images: list[dict[str, Any]] = []
        found: list[dict[str, Any]] = []
        (partial / f"{part}2017").mkdir(exist_ok=True)
        while len(images) < count:
            top, left = (rng.randrange(side - sizes.size) for side in picture.shape[1:])
            cut = torch.tensor([left, top, left, top])
            inside = (all_boxes - cut).clamp(0, sizes.size)
            inside = inside[((inside[:, 2:] - inside[:, :2]) > 8).all(1)]
            if not len(inside):
                continue
            number = len(images)
            tile = picture[:, top : top + sizes.size, left : left + sizes.size].permute(1, 2, 0).numpy()
            Image.fromarray(np.ascontiguousarray(tile)).save(partial / f"{part}2017" / f"{number}.jpg", quality=90)
            images.append({"id": number, "file_name": f"{number}.jpg", "height": sizes.size, "width": sizes.size})
            for x, y, right, bottom in inside.tolist():
                found.append(
                    {
                        "id": len(found),
                        "image_id": number,
                        "category_id": 1,
                        "bbox": [x, y, right - x, bottom - y],
                        "area": (right - x) * (bottom - y),
                        "iscrowd": 0,
                    }
                )
        document = {"images": images, "annotations": found, "categories": [{"id": 1, "name": "tree"}]}
        (partial / "annotations" / f"instances_{part}2017.json").write_text(json.dumps(document))
    partial.rename(made)
    return made
