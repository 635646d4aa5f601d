"""What a user writes after --data, where it names files of their own."""

from pathlib import Path

__all__ = ["located", "short_name"]

LOCAL = (
    "folder",
    "imagefolder",
    "wds",
    "text",
    "jsonl",
    "csv",
    "parquet",
    "glue",
    "squad",
    "voc",
    "ade20k",
    "cityscapes",
    "coco",
    "masks",
    "clouds",
    "modelnet",
    "shapenet-part",
)


def located(spec: str) -> str:
    """The same with full paths, so that a run can be evaluated from anywhere."""
    kind, colon, rest = spec.partition(":")
    if not (colon and rest and kind in LOCAL):
        return spec
    # Shards are two patterns: for training, and for testing.
    paths = rest.split(",") if kind == "wds" else [rest]
    return f"{kind}:{','.join(str(Path(path).expanduser().absolute()) for path in paths)}"


def short_name(spec: str) -> str:
    """The data in a word or two, fit for the name of a folder."""
    kind, _, rest = spec.partition(":")
    if not rest:
        return kind
    # Columns of a table stand behind its path.
    path = Path(rest.partition("#")[0].split(",")[0]).expanduser().absolute()
    return f"{kind}-{path.parent.name if kind == 'wds' else path.name}"
