"""What a hostile or careless user may type and give: commands, options, recipes, run folders and files of data.

Each strategy draws a `Case`: files to write and words after `tokenmix`. Sizes that are allowed stay small, so that
what is accepted also ends.
"""

import io
import json
import tarfile
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from tokenmix.lab.train.config import default_config
from tokenmix.lab.train.schema import Range
from tokenmix.registry import list_models

WRONG = (
    "-1 0 1 2 0.5 1e400 -inf nan inf 1e-400 1e9 none true auto [/b] =cmd() ../.. /dev/zero /dev/null {} [] None 1,2 , ä"
)
HOSTILE = (*WRONG.split(), "9" * 5000, "", " ", "\x1b[31m", "a\nb", "\ufeff")
TASKS: dict[str, tuple[str, ...]] = {
    "image-classification": ("--data", "digits", "--model", "vit_nano", "--model-kwargs", "depth=1"),
    "semantic-segmentation": ("--data", "masks:data", "--model", "fpn_seg_nano", "--crop", "32"),
    "detection": ("--data", "coco:data", "--model", "retinanet_nano"),
    "instance-segmentation": ("--data", "coco:data", "--model", "mask_rcnn_nano"),
    "image-generation": ("--data", "digits", "--model", "sagan_nano", "--img-size", "32"),
    "point-classification": ("--data", "clouds:data", "--model", "pct_cls_nano", "--num-points", "64"),
    "point-segmentation": ("--data", "clouds:data", "--model", "pct_part_nano", "--num-points", "64"),
    "masked-lm": ("--data", "text:data", "--model", "gmlp_text_nano", "--seq-len", "16"),
    "text-classification": ("--data", "csv:data.csv#text,label", "--model", "gmlp_text_nano", "--seq-len", "16"),
    "question-answering": ("--data", "squad:data", "--model", "gmlp_text_nano", "--seq-len", "48", "--doc-stride", "8"),
}
SMALL = "--epochs 1 --max-steps 1 --limit 8 --limit-eval 4 --batch-size 4 --device cpu --threads 1 --out run"
BUDGET = tuple(SMALL.split())
COMPARISON = ("compare", "--mixers", "self", "--data", "digits", *BUDGET[:-2], "--out", "compared")
# Options whose values would be obeyed at length; only values that are always refused are drawn for them.
LONG = {"workers": "-1", "devices": "1000000", "num_nodes": "2", "epochs": "0", "max_steps": "0"}
NOT_DRAWN = {"task", "data", "out", "recipe", "resume", "device", "threads"}
# Values of options whose type does not tell them; where two options need each other, both.
KNOWN = {
    "devices": ("1",),
    "insert": ("none", "external --insert-after *"),
    "insert_after": ("none", "* --insert gating"),
    "insert_kwargs": ("", "num_slots=8 --insert external --insert-after *"),
    "logger": ("none",),
    "max_steps": ("1", "2"),
    "model_kwargs": ("", "drop_path_rate=0.1", "mixer=self"),
    "monitor": ("none", "loss", "accuracy"),
    "num_nodes": ("1",),
    "opt": ("adamw", "sgd", "lamb", "lion", "adafactor", "muon"),
    "swap": ("none", "external", "gating", "less"),
    "swap_drop": ("none", "positions --swap external"),
    "swap_kwargs": ("", "num_slots=8 --swap external"),
    "swap_where": ("*", "*0* --swap external"),
    "train_only": ("all", "mixers --swap external"),
    "workers": ("0", "1"),
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "image-classification": ("folder:data", "wds:shards/train-{0..1}.tar,shards/val-0.tar"),
    "semantic-segmentation": ("masks:data", "voc:voc", "cityscapes:city"),
    "detection": ("coco:data", "voc:voc"),
    "instance-segmentation": ("coco:data",),
    "point-classification": ("clouds:data", "modelnet:meshes"),
    "point-segmentation": ("clouds:data", "shapenet-part:shapes"),
    "masked-lm": ("text:data", "jsonl:data.jsonl#text", "csv:data.csv#text", "parquet:data.parquet#text"),
    "text-classification": (
        "csv:data.csv#text,label",
        "jsonl:data.jsonl#text,label",
        "parquet:data.parquet#text,label",
        "glue:data/SST-2",
    ),
    "question-answering": ("squad:data",),
}
"""Data that each task can be trained on."""
MISFITS: dict[str, tuple[str, ...]] = {
    "image-classification": ("imagefolder:data", "wds:data/x-{000..001}.tar", "folder:/dev/zero"),
    "semantic-segmentation": ("ade20k:data", "voc:data", "cityscapes:data"),
    "point-classification": ("modelnet:data",),
    "point-segmentation": ("shapenet-part:data",),
}
"""Layouts that the data of a task are not in."""


@dataclass(frozen=True)
class Case:
    """Files by their path below the folder of the case, words after `tokenmix`, and changes to copies of a run."""

    words: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    damage: tuple[tuple[str, bytes | None], ...] = ()


@st.composite
def options(draw: Any) -> Case:
    """A small training with one to three options, mostly at values near the defaults, else at wrong ones."""
    task, careless = draw(st.sampled_from(sorted(TASKS))), draw(st.integers(0, 3)) == 0
    words, config = ["train", task, *TASKS[task], *BUDGET], default_config(task)
    hints: dict[str, Any] = {}
    for part in vars(config).values():
        hints |= get_type_hints(type(part), include_extras=True)
    names = sorted(config.flat().keys() - NOT_DRAWN)
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        nearby = KNOWN.get(name) or near(hints[name], config.flat()[name])
        if name == "model":
            nearby = list_models("*_nano", task=task)
        values = (LONG[name],) if name in LONG else HOSTILE
        words += ["--" + name.replace("_", "-"), *draw(st.sampled_from(values if careless else nearby)).split(" ")]
    return Case(tuple(word for word in words if word or careless), small_data(task))


def near(hint: Any, default: Any, allowed: Range | None = None) -> list[str]:
    """Words for an option: all choices of its type, or numbers of its range around its default."""
    first, *rest = get_args(hint) or (hint,)
    if get_origin(hint) is Annotated:
        return near(first, default, next((note for note in rest if isinstance(note, Range)), allowed))
    if get_origin(hint) in (Union, UnionType):
        return ["none", *near(first, default, allowed)]
    if get_origin(hint) is Literal:
        return [str(choice) for choice in (first, *rest)]
    if get_origin(hint) is tuple:
        words = near(first, default[0] if default else None, allowed)
        return words + [f"{word},{words[0]}" for word in words]
    if first not in (int, float):
        return [""] if first is bool else [str(default)] if default else []
    around = [(default or 1 + 7 * (first is int)) * factor for factor in (0, 0.5, 1, 1.5, 2)]
    return [str(first(number)) for number in around if number in (allowed or Range())]


@st.composite
def verbs(draw: Any) -> Case:
    """The other verbs with words that are mostly wrong."""
    small = BUDGET[2:-2]
    shapes = (
        ("list", "W"),
        ("info", "W"),
        ("info", "vit_nano", "--img-size", "W"),
        ("info", "vit_nano", "--model-kwargs", "W"),
        ("cost", "W"),
        ("cost", "self", "--tokens", "W"),
        ("cost", "vit_nano", "--img-size", "W"),
        ("swap", "W", "--to", "W"),
        ("cost", "external", "--dim", "W", "--tokens", "16"),
        ("swap", "vit_nano", "--to", "external", "--where", "W"),
        ("eval", "W"),
        ("predict", "W", "W"),
        ("export", "W"),
        ("inspect", "W", "W"),
        ("data", "get", "W"),
        ("data", "W"),
        ("compare", "--mixers", "W", "--data", "digits", *small, "--out", "c"),
        ("doctor", "W"),
        ("W",),
        ("W", "W"),
        ("train", "W"),
        ("train", "--recipe", "W", *BUDGET),
        ("train", "--resume", "W", *BUDGET),
        ("train-tokenizer", "W", "--out", "t"),
        ("train", "masked-lm", *TASKS["masked-lm"], *BUDGET, "--tokenizer", "W"),
        ("compare", "--merge", "W", "--out", "c"),
        ("--import", "W", "list", "mixers"),
        ("generate", "W"),
        ("info", "vit_nano", "--model-kwargs", "depth=W"),
    )
    words = draw(st.sampled_from(shapes))
    value = st.sampled_from((*HOSTILE, "vit_nano", "digits", "external", "models", "hf-hub:x/y", "local-dir:x", "x:Y"))
    return Case(tuple(word.replace("W", draw(value)) for word in words))


@st.composite
def recipes(draw: Any) -> Case:
    """A recipe whose values, or bytes, are wrong."""
    value = st.sampled_from(
        (
            "-1",
            "0",
            '"2e-3"',
            "true",
            "nan",
            "inf",
            "[]",
            "{}",
            '"zigzag"',
            '"64"',
            "9" * 5000,
            "[" * 3000,
            '"\\u0000"',
            "1979-05-27",
            '"../../x"',
            "[[1]]",
            "1e400",
        )
    )
    lines = ['task = "image-classification"', 'data = "digits"', 'model = "vit_nano"', "max_steps = 1", "limit = 8"]
    lines += ["limit_eval = 4", "batch_size = 4"]
    keys = (
        "task",
        "data",
        "model",
        "lr",
        "schedule",
        "precision",
        "epochs",
        "model_kwargs",
        "mixup",
        "out",
        "resume",
        "x",
    )
    for key in draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True)):
        lines = [line for line in lines if not line.startswith(f"{key} =")] + [f"{key} = {draw(value)}"]
    text = draw(damaged("\n".join(lines).encode())) if draw(st.booleans()) else "\n".join(lines).encode()
    return Case(("train", "--recipe", "r.toml", *BUDGET), {"r.toml": text})


@st.composite
def run_folders(draw: Any, files: dict[str, bytes]) -> Case:
    """A finished or a stopped run, or a comparison, one of whose files is damaged, gone or something else."""
    kind = draw(st.sampled_from(("run", "run", "text", "compared")))
    name = draw(st.sampled_from([name for name in sorted(files) if name.startswith(f"{kind}/")]))
    if name.endswith(".json") and draw(st.booleans()):
        new: bytes | None = draw(changed_json(files[name]))
    else:
        new = draw(st.one_of(st.none(), damaged(files[name])))
    shapes = {
        "run": (
            ("eval", "run"),
            ("train", "--resume", "run"),
            ("export", "run", "--out", "e.pt2"),
            ("predict", "run", "image.png"),
            ("inspect", "run", "image.png", "--out", "i"),
            ("swap", "run", "--to", "external"),
            ("train", "image-classification", "--data", "digits", "--init-from", "run", *BUDGET[:-1], "other"),
        ),
        "text": (
            ("eval", "text"),
            ("predict", "text", "the quick [MASK] fox"),
            ("train", "--resume", "text"),
            ("inspect", "text", "--out", "i"),
        ),
        "compared": (
            COMPARISON,
            ("compare", "--merge", "compared", "--out", "c"),
            ("eval", "compared/runs/self-seed0"),
        ),
    }
    words = draw(st.sampled_from(shapes[kind]))
    return Case(words, {"image.png": picture(8, 8)}, ((name, new),))


@st.composite
def data_files(draw: Any) -> Case:
    """Data of a user's, one of whose files is damaged, in its layout or in another."""
    task = draw(st.sampled_from(sorted(LAYOUTS)))
    layout = draw(st.sampled_from(LAYOUTS[task] + MISFITS.get(task, ())))
    files = small_data(task)
    name = draw(st.sampled_from(sorted(files)))
    if name.endswith((".json", ".jsonl")) and draw(st.booleans()):
        files[name] = draw(changed_json(files[name]))
    else:
        files[name] = draw(damaged(files[name]))
    return Case(training(task, layout), files)


def training(task: str, layout: str) -> tuple[str, ...]:
    """The words of a training on data in this layout."""
    return ("train", task, "--data", layout, *TASKS[task][2:], *BUDGET)


@st.composite
def damaged(draw: Any, data: bytes) -> bytes:
    """The bytes cut, changed, repeated, with numbers made huge, or replaced."""
    kind = draw(st.sampled_from(("cut", "flip", "numbers", "zeros", "empty", "double", "text")))
    at = draw(st.integers(0, max(0, len(data) - 1)))
    if kind == "cut":
        return data[:at]
    if kind == "flip":
        return data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
    if kind == "zeros":
        return data[:at] + bytes(len(data) - at)
    if kind == "numbers":
        number = draw(st.sampled_from((b"1000000000000", b"-1", b"1e400", b"nan", b"9" * 400)))
        digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
        if not digits:
            return data + number
        place = draw(st.sampled_from(digits))
        return data[:place] + number + data[place + 1 :]
    return {"empty": b"", "double": data + data, "text": b"\xff\xfe hello, \x00 world\n"}[kind]


@st.composite
def changed_json(draw: Any, data: bytes) -> bytes:
    """One value of the document, at any depth, replaced by another."""
    head, newline, rest = (
        data.partition(b"\n") if data.count(b"\n") > 1 and not data.startswith(b"{\n") else (data, b"", b"")
    )
    try:
        value = json.loads(head)
    except ValueError:
        return data
    other = draw(st.sampled_from((None, True, -1, 10**400, 3e9, float("inf"), "", "x", [], {}, [None], {"x": 1})))
    if draw(st.integers(0, 9)) == 0:
        return b"[" * 10_000 + newline + rest
    holder, key, node = None, None, value
    while isinstance(node, dict | list) and node and (holder is None or draw(st.booleans())):
        holder, key = node, draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        node = holder[key]
    if holder is None:
        value = other
    elif isinstance(holder, dict) and draw(st.integers(0, 3)) == 0:
        del holder[key]
    else:
        holder[key] = other
    return json.dumps(value).encode() + newline + rest


def small_data(task: str) -> dict[str, bytes]:
    """Whole files that the task can be trained on, in every layout that it reads."""
    make = {"detection": _scenes, "instance-segmentation": _scenes, "semantic-segmentation": _masks}
    return make.get(task, _texts if "text" in task or task in ("masked-lm", "question-answering") else _folders)(task)


def picture(height: int, width: int, mode: str = "L", value: int = 80, *, kind: str = "PNG") -> bytes:
    """An image file."""
    file = io.BytesIO()
    Image.new(mode, (width, height), value if mode in ("L", "P") else (value, 0, 255)).save(file, kind)
    return file.getvalue()


def _folders(task: str) -> dict[str, bytes]:
    files = {}
    for part in ("train", "test"):
        for label in ("a", "b"):
            for i in range(4):
                name = f"data/{part}/{label}/{i}"
                if task == "image-classification":
                    suffix, kind = (("png", "PNG"), ("jpg", "JPEG"), ("tif", "TIFF"), ("webp", "WEBP"))[i]
                    files[f"{name}.{suffix}"] = picture(16, 16, value=40 * i, kind=kind)
                elif task.startswith("point"):
                    suffix = ("ply", "off", "obj", "npz", "xyz")[i] if task == "point-classification" else "npz"
                    files[f"{name}.{suffix}"] = _cloud(suffix, i)
    if task == "image-classification":
        files |= {f"shards/{name}.tar": _shard(name) for name in ("train-0", "train-1", "val-0")}
    elif task == "point-classification":
        for part in ("train", "test"):
            for label in ("bed", "chair"):
                files |= {f"meshes/{label}/{part}/{label}_{i}.off": _cloud("off", i) for i in range(3)}
    elif task == "point-segmentation":
        files["shapes/synsetoffset2category.txt"] = b"Chair\t03001627\nBag\t02773838\n"
        for part in ("train", "val", "test"):
            names = [f"{synset}/{part}{i}" for synset in ("03001627", "02773838") for i in range(2)]
            listed = json.dumps([f"shape_data/{name}" for name in names])
            files[f"shapes/train_test_split/shuffled_{part}_file_list.json"] = listed.encode()
            for i, name in enumerate(names):
                rows = [f"{row} 0 0 1 {(12, 4)[i // 2] + i % 2}" for row in _cloud("xyz", i).decode().split("\n")]
                files[f"shapes/{name}.txt"] = "\n".join(rows).encode()
    return files


def _shard(name: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for i in range(4):
            for suffix, data in (("png", picture(16, 16, value=40 * i)), ("cls", str(i % 2).encode())):
                info = tarfile.TarInfo(f"{name}-{i}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def _cloud(suffix: str, seed: int) -> bytes:
    points = np.random.default_rng(seed).normal(size=(80, 3)).astype("float32")
    rows = "\n".join(" ".join(f"{v:.4f}" for v in row) for row in points)
    if suffix == "ply":
        kinds = "".join(f"property float {axis}\n" for axis in "xyz")
        return (
            f"ply\nformat binary_little_endian 1.0\nelement vertex 80\n{kinds}end_header\n".encode() + points.tobytes()
        )
    if suffix == "npz":
        file = io.BytesIO()
        np.savez(file, points=points, parts=np.arange(80) % 2)
        return file.getvalue()
    faces = "\n".join(f"3 {i} {i + 1} {i + 2}" for i in range(70))
    if suffix == "off":
        return f"OFF\n80 70 0\n{rows}\n{faces}\n".encode()
    if suffix == "obj":
        return "\n".join(
            [*(f"v {row}" for row in rows.split("\n")), *(f"f {i} {i + 1} {i + 2}" for i in range(1, 70))]
        ).encode()
    return rows.encode()


def _masks(_: str) -> dict[str, bytes]:
    files = {}
    for part in ("train", "val"):
        for i in range(4):
            files[f"data/{part}/images/{i}.png"] = picture(40, 40, "RGB", 40 * i)
            files[f"data/{part}/masks/{i}.png"] = picture(40, 40, "L", i % 2)
            place = f"{part}/town/town_000000_00000{i}"
            files[f"city/leftImg8bit/{place}_leftImg8bit.png"] = picture(40, 40, "RGB", 40 * i)
            files[f"city/gtFine/{place}_gtFine_labelIds.png"] = picture(40, 40, "L", 7 + i % 2)
    return files | _voc()


def _voc() -> dict[str, bytes]:
    """Pascal VOC with classes of pixels and boxes."""
    root, files = "voc/VOCdevkit/VOC2012", {}
    for part, names in (("train", "abcd"), ("val", "efgh")):
        for kind in ("Segmentation", "Main"):
            files[f"{root}/ImageSets/{kind}/{part}.txt"] = "\n".join(names).encode()
        for i, name in enumerate(names):
            files[f"{root}/JPEGImages/{name}.jpg"] = picture(64, 64, "RGB", 40 * i, kind="JPEG")
            files[f"{root}/SegmentationClass/{name}.png"] = picture(64, 64, "P", i % 3)
            corners = "<xmin>8</xmin><ymin>8</ymin><xmax>40</xmax><ymax>40</ymax>"
            files[f"{root}/Annotations/{name}.xml"] = (
                "<annotation><size><width>64</width><height>64</height><depth>3</depth></size><object><name>dog</name>"
                f"<bndbox>{corners}</bndbox></object></annotation>"
            ).encode()
    return files


def _scenes(_: str) -> dict[str, bytes]:
    files = {}
    for part in ("train", "val"):
        images = [{"id": i, "file_name": f"{i}.png", "height": 64, "width": 64} for i in range(4)]
        runs = {"size": [64, 64], "counts": [100, 20, 3976]}
        outlines = ([[8, 8, 40, 8, 40, 40, 8, 40]], runs)
        boxes = [
            {
                "id": i + 1,
                "image_id": i,
                "category_id": 1,
                "bbox": [8, 8, 32, 32],
                "area": 1024,
                "iscrowd": i // 3,
                "segmentation": outlines[i // 3],
            }
            for i in range(4)
        ]
        told = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "thing"}]}
        files[f"data/annotations/instances_{part}2017.json"] = json.dumps(told).encode()
        files |= {f"data/{part}2017/{i}.png": picture(64, 64, "RGB", 60 * i) for i in range(4)}
    return files | _voc()


def _texts(_: str) -> dict[str, bytes]:
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "box"]
    lines = [f"{i} " + " ".join(words[(i * k) % len(words)] for k in range(1, 12)) for i in range(1, 300)]
    rows = [{"text": line, "label": "ab"[i % 2]} for i, line in enumerate(lines)]
    context = " ".join(lines[:2])
    asked = [
        {"id": str(i), "question": "who?", "answers": [{"text": "quick", "answer_start": context.find("quick")}]}
        for i in range(8)
    ]
    squad = json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": asked}]}]})
    files = {"data/a.txt": "\n\n".join(lines).encode(), "data/b.txt": "\n\n".join(lines[::-1]).encode()}
    files["data.csv"] = ("text,label\n" + "\n".join(f"{r['text']},{r['label']}" for r in rows)).encode()
    table = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    files["data.parquet"] = table.getvalue()
    files["data.jsonl"] = "\n".join(json.dumps(row) for row in rows).encode()
    tsv = "sentence\tlabel\n" + "\n".join(f"{r['text']}\t{'ab'.index(r['label'])}" for r in rows)
    files |= {f"data/SST-2/{part}.tsv": tsv.encode() for part in ("train", "dev")}
    return files | {f"data/{part}-v1.1.json": squad.encode() for part in ("train", "dev")}
