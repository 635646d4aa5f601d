"""Checkpoints: a folder with model.safetensors, state.pt and meta.json. Nothing is ever unpickled.

state.pt is a torch.save of tensors and plain containers, and is read with `weights_only=True`. A byte that changed on
the disk is found: weights carry a SHA-256 of their tensors in the file's own metadata, meta.json that of state.pt and
of itself.
"""

import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.files import (
    latest_complete_checkpoint,
    read_json,
    replace_file,
    replace_folder,
    write_bytes,
    write_json,
)
from tokenmix.train.distributed import distributed_info, raise_on_all_ranks
from tokenmix.train.plan import Progress

WEIGHTS, STATE, META = "model.safetensors", "state.pt", "meta.json"
# How files begin that torch.save or pickle wrote: a zip archive, or protocol 2 and later.
PICKLED = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint folder holds."""

    weights: dict[str, Tensor]
    state: dict[str, Any]
    meta: dict[str, Any]


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write one safetensors file, atomically."""
    replace_file(path, _serialized(weights))


def _serialized(weights: Mapping[str, Tensor]) -> bytes:
    # safetensors refuses tensors that share memory; each is written as if it stood alone.
    tensors = {k: v.detach().cpu().clone().contiguous() for k, v in weights.items()}
    return safetensors.torch.save(tensors, {"format": "pt", "sha256": _digest(tensors)})


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint into another folder, then put it in place of the one before."""
    state = io.BytesIO()
    torch.save(checkpoint.state, state)
    with _beside(folder) as beside:
        write_bytes(beside / WEIGHTS, _serialized(checkpoint.weights))
        write_bytes(beside / STATE, state.getvalue())
        meta = {**checkpoint.meta, "state_sha256": hashlib.sha256(state.getbuffer()).hexdigest()}
        write_json(beside / META, {**meta, "sha256": _digest_of_meta(meta)})


def _digest_of_meta(meta: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True, default=str).encode()).hexdigest()


def copy_checkpoint(source: Path, folder: Path) -> None:
    """Give a checkpoint a second name, without a second copy on the disk where the file system can do that."""
    with _beside(folder) as beside:
        for file in sorted(source.iterdir()):
            # No file of a checkpoint is ever changed in place, so two folders may share one.
            try:
                os.link(file, beside / file.name)
            except OSError:
                write_bytes(beside / file.name, file.read_bytes())


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """An empty folder that takes this one's place once the block has filled it."""
    beside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        replace_folder(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def save_run(run: Path, checkpoint: Checkpoint, weights: Mapping[str, Tensor] | None = None) -> None:
    """Save `last`; before that, at the end of the best epoch so far, its `weights` as the run's own, and `best`.

    The first process writes, and all must call this. `last` comes at the end: a kill before it repeats the epoch and
    writes the others once more.
    """
    last, best = run / "checkpoints" / "last", run / "checkpoints" / "best"
    with raise_on_all_ranks():
        if not distributed_info().first:
            return
        if weights is None:
            save_checkpoint(last, checkpoint)
            return
        save_weights(run / WEIGHTS, weights)
        save_checkpoint(best, checkpoint)
        copy_checkpoint(best, last)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint folder; `UserError` if there is none or it is damaged."""
    folder = latest_complete_checkpoint(folder)
    if not (folder / META).is_file():
        raise UserError(f"{folder} holds no checkpoint; start a new run")
    try:
        meta = read_json(folder / META)
        if meta.pop("sha256", None) not in (None, _digest_of_meta(meta)):
            raise UserError(f"{folder / META} is damaged: its values are not those that were written")
        data = (folder / STATE).read_bytes()
        if meta.pop("state_sha256", None) not in (None, hashlib.sha256(data).hexdigest()):
            raise UserError(f"{folder / STATE} is damaged: its bytes are not those that were written")
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return Checkpoint(read_weights(folder / WEIGHTS), state, meta)
    except UserError:
        raise
    except Exception as error:  # torch and json raise many types for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"checkpoint {folder} is damaged ({reason[:200]})") from None


def read_latest_checkpoint(run: Path) -> Checkpoint:
    """The run's last checkpoint; if it is damaged, its best one, and a line on standard error that says so.

    Raises:
        UserError: neither is whole.
    """
    folders = [run / "checkpoints" / name for name in ("last", "best")]
    try:
        return _of_run(folders[0])
    except UserError as error:
        damage = error
    try:
        checkpoint = _of_run(folders[1])
    except UserError:
        raise UserError(f"{damage}, and there is no other; start a new run") from None
    step = checkpoint.meta["progress"]["step"]
    print(f"tokenmix: {damage}; continuing from the best checkpoint, of step {step}", file=sys.stderr)
    return checkpoint


def _of_run(folder: Path) -> Checkpoint:
    """A checkpoint with the position of its run."""
    checkpoint = read_checkpoint(folder)
    try:
        Progress.from_dict(checkpoint.meta.get("progress"))
    except UserError as error:
        raise UserError(f"{folder / META} is damaged: {error}") from None
    return checkpoint


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, or of a folder that holds `model.safetensors`; a pickle is refused unread."""
    path = path / WEIGHTS if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"no weights at {path}; give a .safetensors file or a run folder with {WEIGHTS}")
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith(PICKLED):
        raise UserError(
            f"{path} is a pickle (torch.save), which can run code when read; "
            "convert it where you trust it: safetensors.torch.save_file(state_dict, 'model.safetensors')"
        )
    try:
        with safe_open(path, "pt") as opened:
            written = (opened.metadata() or {}).get("sha256")
        weights = safetensors.torch.load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}); give another") from None
    if written is not None and written != _digest(weights):
        raise UserError(f"{path} is damaged: its values are not those that were written; give another")
    return weights


def put_weights(model: nn.Module, weights: Mapping[str, Tensor], source: Path) -> None:
    """Load weights into a model; `UserError` naming up to three keys if they are those of another model."""
    own = model.state_dict()
    problems = {
        "missing": [k for k in own if k not in weights],
        "unexpected": [k for k in weights if k not in own],
        "other shape": [
            f"{k} {tuple(weights[k].shape)} for {tuple(v.shape)}"
            for k, v in own.items()
            if k in weights and weights[k].shape != v.shape
        ],
    }
    found = [f"{kind}: {_three(keys)}" for kind, keys in problems.items() if keys]
    if found:
        raise UserError(f"{source} is for another model than this {type(model).__name__}; {'; '.join(found)}")
    model.load_state_dict(dict(weights))


def _three(keys: Iterable[str]) -> str:
    keys = list(keys)
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
