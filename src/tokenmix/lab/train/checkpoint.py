"""Checkpoint folders: model.safetensors, state.pt and meta.json. Nothing is unpickled.

state.pt holds tensors and plain containers and is read with `weights_only=True`. SHA-256 checksums detect damaged files
and files of another checkpoint or run: the weights' is in their own metadata; meta.json has all three.
"""

import hashlib
import io
import json
import os
import sys
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from tokenmix import checkpoints
from tokenmix.errors import UserError, as_user_error
from tokenmix.files import (
    Values,
    latest_complete_checkpoint,
    new_folder,
    open_regular,
    read_bytes,
    read_json,
    replace_file,
    to_json,
    write_bytes,
    write_json,
)
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.store import read_sealed, sealed
from tokenmix.lab.train.distributed import distributed_info, raise_on_all_ranks
from tokenmix.lab.train.folder import RunFolder, sha256_of
from tokenmix.lab.train.plan import Progress

WEIGHTS, STATE, META = "model.safetensors", "state.pt", "meta.json"
# First bytes of files by torch.save or pickle: a zip archive, or pickle protocol 2 and later.
PICKLED = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
# Floating-point types of weights that are read.
READ = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint folder. `run` is the identity of the run folder."""

    weights: dict[str, Tensor]
    state: Values
    progress: Progress
    run: dict[str, str] = field(default_factory=dict)


def save_weights(path: Path, weights: Mapping[str, Tensor], run: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file atomically; `run` as in `Checkpoint`."""
    replace_file(path, _serialized(weights, run)[0])


def _serialized(weights: Mapping[str, Tensor], run: Mapping[str, str] | None) -> tuple[bytes, str]:
    """A safetensors file, and the SHA-256 of its values."""
    # safetensors refuses tensors that share memory, so each tensor is copied.
    tensors = {k: v.detach().cpu().clone().contiguous() for k, v in weights.items()}
    notes = sealed(tensors, run)
    return safetensors.torch.save(tensors, notes), notes["sha256"]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint into a new folder, then replace the previous checkpoint."""
    state = io.BytesIO()
    torch.save(checkpoint.state, state)
    weights, weights_sha256 = _serialized(checkpoint.weights, checkpoint.run)
    with new_folder(folder) as partial:
        write_bytes(partial / WEIGHTS, weights)
        write_bytes(partial / STATE, state.getvalue())
        meta = {
            "format": 1,
            "progress": asdict(checkpoint.progress),
            "run": checkpoint.run,
            "weights_sha256": weights_sha256,
            "state_sha256": hashlib.sha256(state.getbuffer()).hexdigest(),
        }
        meta = json.loads(to_json(meta))
        write_json(partial / META, {**meta, "sha256": sha256_of(meta)})


def copy_checkpoint(source: Path, folder: Path) -> None:
    """Copy a checkpoint; files are hard links if the file system supports them."""
    with new_folder(folder) as partial:
        for file in sorted(source.iterdir()):
            # Checkpoint files never change in place, so two folders can share one.
            try:
                os.link(file, partial / file.name)
            except OSError:
                write_bytes(partial / file.name, read_bytes(file))


def save_run(run: Path, checkpoint: Checkpoint, weights: Mapping[str, Tensor] | None = None) -> None:
    """Save `last`, after `best` and the run's weights if `weights` are given (the best epoch so far).

    Rank 0 writes; all ranks must call this. `last` is written at the end, so a kill before then repeats the epoch.
    """
    last, best = run / "checkpoints" / "last", run / "checkpoints" / "best"
    with raise_on_all_ranks():
        if not distributed_info().first:
            return
        if weights is None:
            save_checkpoint(last, checkpoint)
            return
        save_weights(run / WEIGHTS, weights, checkpoint.run)
        save_checkpoint(best, checkpoint)
        copy_checkpoint(best, last)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint folder; `UserError` if there is none or it is damaged."""
    folder = latest_complete_checkpoint(folder)
    if not (folder / META).is_file():
        raise UserError(f"{folder} holds no checkpoint; start a new run")
    try:
        meta = read_json(folder / META)
        if meta.pop("sha256", None) not in (None, sha256_of(meta)):
            raise UserError(f"{folder / META} is damaged: its values are not those that were written")
        data = read_bytes(folder / STATE)
        if meta.pop("state_sha256", None) not in (None, hashlib.sha256(data).hexdigest()):
            raise UserError(f"{folder / STATE} is damaged: its bytes are not those that were written")
        if any(part.compress_type for part in zipfile.ZipFile(io.BytesIO(data)).infolist()):
            # torch.save never compresses, and a few compressed bytes can expand without limit.
            raise UserError(f"{folder / STATE} is compressed, so torch.save did not write it; put the run's own back")
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        try:
            progress = Progress.from_dict(meta.get("progress"))
        except UserError as error:
            raise UserError(f"{folder / META} is damaged: {error}") from None
        weights, _, sha256 = read_sealed(folder / WEIGHTS)
        if meta.pop("weights_sha256", sha256) != sha256:
            raise UserError(f"{folder / WEIGHTS} is damaged: its values are not those of this checkpoint")
        return Checkpoint(weights, state, progress, meta.get("run", {}))
    except UserError:
        raise
    except Exception as error:  # torch and json raise many types for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"checkpoint {folder} is damaged ({reason[:200]})") from None


def read_latest_checkpoint(run: Path) -> Checkpoint:
    """The run's last checkpoint. If it is damaged: its best checkpoint, and a message on standard error."""
    try:
        return read_checkpoint(run / "checkpoints" / "last")
    except UserError as damage:
        try:
            checkpoint = read_checkpoint(run / "checkpoints" / "best")
        except UserError:
            raise UserError(f"{damage}, and there is no other; start a new run") from None
        log(f"{damage}; continuing from the best checkpoint, of step {checkpoint.progress.step}")
        return checkpoint


def read_weights(source: Path | RunFolder) -> dict[str, Tensor]:
    """Tensors of a safetensors file or a folder's model.safetensors; `UserError` for damage, or another run's file.

    A pickle is refused without reading it.
    """
    if isinstance(source, RunFolder):
        folder, path = source, source.path / WEIGHTS
    elif source.is_dir():
        folder, path = RunFolder.of_weights(source), source / WEIGHTS
    else:
        folder, path = None, source
    if not path.exists():
        raise UserError(f"no weights at {path}; give a .safetensors file or a run folder with {WEIGHTS}")
    try:
        weights, notes, _ = read_sealed(path)
    except UserError:
        with open_regular(path) as file:
            start = file.read(9)
        # A safetensors file begins with the header's length in eight bytes, which may be 640 = 0x280, and a bracket.
        if start.startswith(PICKLED) and start[4:] != b"\0\0\0\0{":
            raise UserError(
                f"{path} is a pickle (torch.save), which can run code when read; "
                "convert it where you trust it: safetensors.torch.save_file(state_dict, 'model.safetensors')"
            ) from None
        raise
    if strange := next((n for n, v in weights.items() if v.is_floating_point() and v.dtype not in READ), None):
        raise UserError(f"{path} has {strange} in {weights[strange].dtype}; convert it to float32, float16 or bfloat16")
    broken = next((name for name, value in weights.items() if not value.flatten().isfinite().all()), None)
    if broken is not None:
        raise UserError(f"{path} has values in {broken} that are NaN or infinite; give other weights")
    if folder is not None:
        folder.check_identity(notes, path)
    return weights


def put_weights(
    model: nn.Module, weights: Mapping[str, Tensor], source: Path, types: Collection[torch.dtype] = ()
) -> None:
    """Load weights into a model; arguments and errors as in `check_weights`."""
    check_weights(model, weights, source, types)
    model.load_state_dict(dict(weights))


def check_weights(
    model: nn.Module, weights: Mapping[str, Tensor], source: Path, types: Collection[torch.dtype] = ()
) -> None:
    """Raise `UserError` unless names, shapes and types match the model; the message has three keys of each kind.

    The model may be on the meta device. Floating-point weights may also have one of the further `types`.
    """
    own = model.state_dict()
    shared = {k: (weights[k], v) for k, v in own.items() if k in weights}
    problems = {
        "missing": [k for k in own if k not in weights],
        "unexpected": [k for k in weights if k not in own],
        "other shape": [
            f"{k} {tuple(value.shape)} for {tuple(v.shape)}"
            for k, (value, v) in shared.items()
            if value.shape != v.shape
        ],
        "other type": [
            f"{k} {value.dtype} for {v.dtype}"
            for k, (value, v) in shared.items()
            if value.dtype != v.dtype and not (v.is_floating_point() and value.dtype in types)
        ],
    }
    found = [
        f"{kind}: {', '.join(keys[:3])}" + f" and {len(keys) - 3} more" * (len(keys) > 3)
        for kind, keys in problems.items()
        if keys
    ]
    if found:
        what = "; ".join(found)
        raise UserError(f"{source} is for another model than this {type(model).__name__}, give its own ({what})")


def initial_weights(source: Path, model: Any) -> dict[str, Tensor]:
    """Weights of a safetensors file or run folder, fitted to the model.

    Weights over tokens are interpolated to the model's image size. Other differences are left for `put_weights` to
    reject.
    """
    folder = RunFolder.of_weights(source)
    description = {} if folder is None else folder.description
    theirs = description.get("channels")
    ours = getattr(model, "in_chans", theirs)
    if theirs is not None and theirs != ours:
        raise UserError(
            f"{source} was trained on images of {theirs} channel(s) and this data has {ours}; "
            f"start from a run with {ours}, or without --init-from, or read images so with --in-chans {theirs}"
        )
    weights = checkpoints.rename(read_weights(source), model)
    size = description.get("img_size")
    trained = (size[0], size[1]) if isinstance(size, list) else None
    try:
        if hasattr(model, "starting_weights"):
            # The model's own rule: a detector also takes a classifier's weights.
            weights, line = model.starting_weights(weights, trained)
            if line is not None and distributed_info().first:
                log(f"{source}: {line}")
            return weights
        if hasattr(model, "set_input_size") and not hasattr(model, "img_size"):
            # timm models: their family's rule, if any, fits the positional embedding.
            own, rule = model.state_dict(), getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
            other = any(weights[k].shape != own[k].shape for k in ("pos_embed",) if k in weights and k in own)
            remedy = "; give the run's own model, or start without --init-from"
            with as_user_error(f"its weights are of another model than {type(model).__name__}: ", remedy):
                weights = dict(rule(weights, model)) if rule is not None and other else weights
        elif hasattr(model, "set_input_size") and hasattr(model, "feature_info"):
            weights = checkpoints.resize(weights, model, img_size=trained)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return weights
