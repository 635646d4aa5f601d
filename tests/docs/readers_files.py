"""What a reader of the pages has: the files, runs and data sets that commands name, tiny and made by the tests."""

import functools
import itertools
import json
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from timm.models import save_for_hf
from transformers import BertConfig, BertModel

from test_docs import split_words
from tokenmix.lab import cli
from tokenmix.lab.data.store import Names, fetched
from tokenmix.lab.tasks.points.data import write_ply
from tokenmix.lab.tasks.points.data.layouts import PARTS
from tokenmix.lab.tasks.text.tokenizer import save_tokenizer, train_tokenizer

LINES = [f"On day {i} the ship sailed {i * 7} miles further to the south." for i in range(400)]
LAYERS = """
from tokenmix.layers import SelfAttention


class MyAttention(SelfAttention):
    def __init__(self, dim):
        super().__init__(dim, num_heads=4)


class MyMixer(MyAttention):
    pass
"""
NETS = """
from torchvision.models import ResNet
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.resnet import BasicBlock


def detector(num_classes):
    backbone = BackboneWithFPN(ResNet(BasicBlock, [1, 1, 1, 1]), {"layer4": "0"}, [512], out_channels=16)
    anchors = AnchorGenerator(((16,), (32,)), ((1.0,),) * 2)
    return FasterRCNN(backbone, num_classes, min_size=64, max_size=64, rpn_anchor_generator=anchors)
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def noise(path: Path, *shape: int, below: int = 256) -> np.ndarray:
    """Other numbers for each file."""
    return np.random.default_rng(zlib.crc32(path.as_posix().encode())).integers(0, below, shape, dtype=np.uint8)


def picture(path: Path, side: int = 48) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(path, side, side, 3)).save(path)


def classes(path: Path, parts: Sequence[str] = ("",)) -> None:
    for part, label, i in itertools.product(parts, ("dark", "light"), range(12)):
        picture(path / part / label / f"{i}.png")


def masks(path: Path) -> None:
    for part, i in itertools.product(("train", "val"), range(4)):
        picture(path / part / "images" / f"{i}.png")
        file = path / part / "masks" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(file, 48, 48, below=2)).save(file)


def coco(path: Path) -> None:
    for part in ("train2017", "val2017"):
        images, objects = [], []
        for i in range(1, 5):
            picture(path / part / f"{i}.png", 64)
            images.append({"id": i, "file_name": f"{i}.png", "width": 64, "height": 64})
            edge = [8 * i, 16, 8 * i + 24, 16, 8 * i + 24, 48, 8 * i, 48]
            box = {"bbox": [8 * i, 16, 24, 32], "segmentation": [edge], "area": 768, "iscrowd": 0}
            objects.append({"id": i, "image_id": i, "category_id": 1, **box})
        labels = {"images": images, "annotations": objects, "categories": [{"id": 1, "name": "block"}]}
        write(path / "annotations" / f"instances_{part}.json", json.dumps(labels))


def cloud(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_ply(path, torch.from_numpy(noise(path, 80, 3) / 256))


def clouds(path: Path) -> None:
    for label, i in itertools.product(("ball", "rod"), range(10)):
        cloud(path / label / f"{i}.ply")


def shapenet_part(path: Path) -> None:
    synsets = {"Chair": "03001627", "Bag": "02773838"}
    write(path / "synsetoffset2category.txt", "".join(f"{name}\t{synset}\n" for name, synset in synsets.items()))
    for side in ("train", "val", "test"):
        listed = [f"shape_data/{synset}/{side}" for synset in synsets.values()]
        write(path / "train_test_split" / f"shuffled_{side}_file_list.json", json.dumps(listed))
        for name, synset in synsets.items():
            file = path / synset / f"{side}.txt"
            points = noise(file, 40, 3) / 256
            rows = (f"{x} {y} {z} 0 0 1 {PARTS[name].start + i % 2}" for i, (x, y, z) in enumerate(points))
            write(file, "\n".join(rows))


def squad(path: Path) -> None:
    asked = []
    for day, line in enumerate(LINES[:40]):
        answers = [{"text": str(day), "answer_start": 7}]
        asked.append({"context": line, "qas": [{"id": str(day), "question": "Which day?", "answers": answers}]})
    for part in ("train", "dev"):
        write(path / f"{part}-v1.1.json", json.dumps({"data": [{"title": "ship", "paragraphs": asked}]}))


def bert(path: Path) -> None:
    save_tokenizer(train_tokenizer(LINES, vocab_size=300), path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=300, **sizes)).save_pretrained(path)


def resnet(path: Path) -> None:
    model = timm.create_model("resnet10t", in_chans=1, num_classes=10)
    save_for_hf(model, str(path), model_args={"in_chans": 1}, safe_serialization=True)


FILES: dict[str, Callable[[Path], Any]] = {
    **dict.fromkeys(("three.png", "seven.png", "shirt.png", "a.jpg", "b.png"), picture),
    **dict.fromkeys(("photograph.jpg", "photograph.png"), functools.partial(picture, side=128)),
    **dict.fromkeys(("photos", "my-folder"), classes),
    "data/imagenet": functools.partial(classes, parts=("train", "val")),
    "my-masks": masks,
    **dict.fromkeys(("my-coco", "data/coco"), coco),
    "chair.ply": cloud,
    "chair.obj": lambda path: write(path, "v 0 0 0\nv 0 0 1\nv 0 1 0\nf 1 2 3\n"),
    **dict.fromkeys(("my-clouds", "bricks"), clouds),
    "my-shapenet-part": shapenet_part,
    **dict.fromkeys(("my-squad", "squad"), squad),
    "log.txt": lambda path: write(path, "\n".join(LINES)),
    "sentences.txt": lambda path: write(path, "\n".join(LINES[:60])),
    "reviews.csv": lambda path: write(
        path, "text,label\n" + "".join(f"{line},{i % 2}\n" for i, line in enumerate(LINES))
    ),
    **dict.fromkeys(("my-bert", "all-MiniLM-L6-v2"), bert),
    "my_resnet": resnet,
    "my_layers": lambda path: write(path.with_suffix(".py"), LAYERS),
    "my_nets": lambda path: write(path.with_suffix(".py"), NETS),
}
"""Files, folders and modules by the name in a command; `my-LAYOUT` is the reader's PATH in that layout."""

TWO_SEEDS = "compare --mixers self,external --data digits --seeds 0,1 --only"
RUNS = {
    **dict.fromkeys(("runs/ext", "runs/digits", "runs/vit_nano-digits-0"), "train --model vit_nano --data digits"),
    "runs/vit": "train --model vit_nano --model-kwargs depth=8 --data fashion-mnist",
    "runs/resnet18": "train --model resnet18 --data digits",
    "runs/pretrained": "train masked-lm --model amlp_text_nano --data text:log.txt --vocab-size 300 --seq-len 32",
    "runs/first-machine": f"{TWO_SEEDS} *-seed0",
    "runs/second-machine": f"{TWO_SEEDS} *-seed1",
}
"""Run folders that other pages make, by the command that makes them here."""

TRAIN = "--max-steps 2 --epochs 1 --batch-size 4 --limit-eval 20"
SHORT = {
    "train --model": TRAIN,
    "train --init-from": TRAIN,
    "train --recipe": f"{TRAIN} --warmup-steps 1 --devices 1 --workers 0",
    "compare --mixers": f"{TRAIN} --limit 60 --jobs 0",
    "compare --config": f"{TRAIN} --limit 2 --limit-eval 1 --crops 1 --crop 64 --way whole --seeds 0 --jobs 0",
    "gmlp_small --data": "--batch-size 2 --limit-eval 2",
    "--recipe gmlp_imagenet": "--batch-size 2 --limit-eval 2",
    "--seeds 0,1,2": "--seeds 0",
    "--workers 8": "--workers 0",
    "--devices 8": "--devices 2",
    "--recipe mask_rcnn_coco_1x": "--min-size 64 --max-size 64 --model-kwargs pretrained_backbone=False",
    "cost --tokens": "--tokens 16,64",
    "cost --img-size": "--img-size 32,64",
    "swap --rank": "--steps 2",
    "distill": "--steps 2 --batch-size 4 --max-length 16",
}
"""What makes a command short: for commands with all words of a key, options in place of the page's or in addition."""


def reader(command: str) -> str:
    """The command with the reader's paths: each layout's PATH is a folder, and /data is here."""
    return re.sub(r"([\w-]+):PATH\b", r"\1:my-\1", command).replace(":/data/", ":data/")


def shortened(words: Sequence[str]) -> list[str]:
    made = list(words)
    for key, options in SHORT.items():
        if {*key.split()} <= {*words}:
            for option, value in zip(options.split()[::2], options.split()[1::2]):
                if option in made:
                    made[made.index(option) + 1] = value
                else:
                    made += [option, value]
    return made


def provide(words: Sequence[str], kept: Path) -> None:
    """Make what the command reads and is not here; runs are trained once in `kept` and copied."""
    out = words[words.index("--out") + 1] if "--out" in words else None
    for name in dict.fromkeys(part for word in words for part in re.split("[:=,#]", word) if word != out):
        if Path(name).exists() or Path(f"{name}.py").exists():
            continue
        if name in FILES:
            FILES[name](Path(name))
        elif name in RUNS:
            run = kept / re.sub(r"\W+", "-", RUNS[name])
            if not run.exists():
                made = split_words(RUNS[name])
                provide(made, kept)
                assert cli.main([*shortened(made), "--out", str(run)]) == 0
            shutil.copytree(run, name)


def store_data_sets(root: Path) -> None:
    """A cache of data sets by name, of noise and equal sentences."""
    clothes, trees = {}, {}
    for part, count in (("train", 200), ("t10k", 100)):
        clothes[f"{part}_images"] = torch.from_numpy(noise(Path(part), count, 28, 28))
        clothes[f"{part}_labels"] = torch.arange(count).remainder(10).byte()
    for i, side in enumerate((400, 200, 200, 200)):
        trees[f"image_{i}"] = torch.from_numpy(noise(Path(f"tree {i}"), 3, side, side))
        trees[f"boxes_{i}"] = torch.tensor([[x, x, x + 40, x + 40] for x in range(0, side - 40, 50)]).float()
    names = Names.of(LINES)
    text = {"text": names.text, "ends": names.ends, "test": torch.arange(len(LINES)).remainder(10).eq(0).byte()}
    glosses = Names.of(f"noun\t3\tship\t{line}" for line in LINES)
    stored: dict[str, dict[str, torch.Tensor]] = {
        "fashion-mnist": clothes,
        "trees": trees,
        "blue-marble": {
            "image": torch.from_numpy(noise(Path("image"), 3, 450, 5400)),
            "classes": torch.from_numpy(noise(Path("classes"), 450, 5400, below=7)),
        },
        "wordnet": {"text": glosses.text, "ends": glosses.ends},
        **{f"text-{name}": text for name in ("sotu", "bible", "moby-dick", "anarchism")},
    }
    for name, tensors in stored.items():
        fetched(name, root, lambda _, made=tensors: (made, {"source": "the tests", "digest": "0"}))
