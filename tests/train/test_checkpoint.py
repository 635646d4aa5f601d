"""Checkpoints: whole or not at all, never a pickle, and a clear word about those of another model."""

import errno
import io
import json
import math
import os
import pickle
import resource
import signal
import struct
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from runs import Killed
from tokenmix import files
from tokenmix.errors import UserError
from tokenmix.files import read_json, write_json
from tokenmix.lab.train import checkpoint as checkpoints
from tokenmix.lab.train.checkpoint import (
    Checkpoint,
    copy_checkpoint,
    put_weights,
    read_checkpoint,
    read_weights,
    save_checkpoint,
    save_weights,
)
from tokenmix.lab.train.plan import Progress


def made(value: float) -> Checkpoint:
    weights = {"weight": torch.full((3, 2), value)}
    return Checkpoint(
        weights, {"optimizers": [{"step": torch.tensor(value)}], "scale": value}, Progress(train_seconds=value)
    )


def value_of(folder: Path) -> float:
    """The number that all three files agree on."""
    read = read_checkpoint(folder)
    values = {read.progress.train_seconds, read.state["scale"], read.state["optimizers"][0]["step"].item()}
    values |= set(read.weights["weight"].flatten().tolist())
    assert len(values) == 1, "parts of two checkpoints"
    return values.pop()


def test_round_trip_and_replacement(tmp_path):
    folder = tmp_path / "checkpoints" / "last"
    for value in (1.0, 2.0):
        save_checkpoint(folder, made(value))
        assert value_of(folder) == value
    copy_checkpoint(folder, tmp_path / "checkpoints" / "best")
    save_checkpoint(folder, made(3.0))
    assert value_of(tmp_path / "checkpoints" / "best") == 2.0
    assert sorted(p.name for p in folder.parent.iterdir()) == ["best", "last"], "nothing is left next to"


@pytest.mark.parametrize("call", range(1, 30))
def test_a_kill_at_any_instant_leaves_the_old_or_the_new(tmp_path, monkeypatch, call):
    folder = tmp_path / "last"
    save_checkpoint(folder, made(1.0))
    calls = [0]

    def counted(original):
        def maybe(*args, **kwargs):
            calls[0] += 1
            if calls[0] >= call:  # once killed, clean-up does not happen either
                raise Killed
            return original(*args, **kwargs)

        return maybe

    with monkeypatch.context() as patch:
        for owner, name in ((Path, "rename"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (Path, "open")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        patch.setattr(files.shutil, "rmtree", counted(files.shutil.rmtree))
        killed = False
        try:
            save_checkpoint(folder, made(2.0))
        except Killed:
            killed = True
    assert killed == (call <= calls[0])
    assert value_of(folder) in ((1.0, 2.0) if killed else (2.0,))
    save_checkpoint(folder, made(3.0))
    assert value_of(folder) == 3.0


def test_the_kill_test_reaches_every_instant(tmp_path, monkeypatch):
    """The calls that the test above counts are fewer than its parameters."""
    calls = []
    rmtree = files.shutil.rmtree
    for name in ("rename", "replace", "unlink", "mkdir", "open"):
        original = getattr(Path, name)
        monkeypatch.setattr(Path, name, lambda *a, f=original, **k: (calls.append(1), f(*a, **k))[1])
    monkeypatch.setattr(files.shutil, "rmtree", lambda *a, **k: (calls.append(1), rmtree(*a, **k))[1])
    save_checkpoint(tmp_path / "last", made(1.0))
    calls.clear()
    save_checkpoint(tmp_path / "last", made(2.0))
    assert 5 <= len(calls) < 29


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    folder = tmp_path / "last"
    save_checkpoint(folder, made(1.0))

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(folder, made(2.0))
    assert value_of(folder) == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["last"], "the half-written one gives its space back"


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit on file sizes")
def test_a_file_that_may_not_grow_keeps_the_one_before(tmp_path):
    """The same with the operating system refusing, not a stand-in."""
    path = tmp_path / "model.safetensors"
    save_weights(path, {"weight": torch.ones(10)})
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(OSError) as caught:
            save_weights(path, {"weight": torch.ones(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno in files.DISK_ERRORS
    assert torch.equal(read_weights(path)["weight"], torch.ones(10))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("how", ["torch", "legacy", "pickle"])
def test_a_pickle_is_refused_and_never_read(tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.safetensors"
    if how == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save({"weight": Bomb()}, path, _use_new_zipfile_serialization=how == "torch")
    with pytest.raises(UserError, match=r"is a pickle .* convert it where you trust it"):
        read_weights(path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("shape", [[0, 2**63], [1] * 70])
def test_shapes_that_torch_does_not_have(tmp_path: Path, shape: list[int]):
    numbers = 4 if math.prod(shape) else 0
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, numbers]}}).encode()
    (file := tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(numbers))
    with pytest.raises(UserError):
        put_weights(torch.nn.Linear(2, 2), read_weights(file), file)


def test_weights_in_eight_bits_are_named(tmp_path: Path):
    safetensors.torch.save_file({"w": torch.ones(2).to(torch.float8_e4m3fn)}, file := tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"has w in torch\.float8_e4m3fn; convert it to float32"):
        read_weights(file)


def test_a_header_whose_length_looks_like_a_pickle_is_read(tmp_path):
    """640 is 0x280, with which protocol 2 begins."""
    file, weights = tmp_path / "model.safetensors", {"weight": torch.ones(2)}
    for padding in range(640):
        safetensors.torch.save_file(weights, file, {"note": "x" * padding})
        if file.read_bytes().startswith(b"\x80\x02"):
            break
    assert file.read_bytes().startswith(b"\x80\x02")
    assert torch.equal(read_weights(file)["weight"], weights["weight"])


def test_a_pickle_in_the_place_of_the_state_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "last", made(1.0))
    torch.save({"weight": Bomb()}, tmp_path / "last" / "state.pt")
    with pytest.raises(UserError, match="is damaged"):
        read_checkpoint(tmp_path / "last")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "meta.json"])
def test_a_damaged_checkpoint_is_named(tmp_path, name):
    save_checkpoint(tmp_path / "last", made(1.0))
    file = tmp_path / "last" / name
    file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(UserError, match=r"last.*(damaged|not a whole safetensors file)"):
        read_checkpoint(tmp_path / "last")


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(UserError, match="no weights at"):
        read_weights(tmp_path / "none.safetensors")
    with pytest.raises(UserError, match="no weights at"):
        read_weights(tmp_path)


def test_the_keys_of_another_model_are_named_three_at_most(tmp_path):
    small, large = nn.Sequential(nn.Linear(4, 2)), nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    with pytest.raises(UserError) as caught:
        put_weights(small, large.state_dict(), tmp_path)
    assert "unexpected: 1.weight, 1.bias, 2.weight and 1 more" in str(caught.value)
    assert "0.weight (4, 4) for (2, 4)" in str(caught.value)
    with pytest.raises(UserError, match=r"missing: 1\.weight, 1\.bias, 2\.weight and 1 more"):
        put_weights(large, small.state_dict(), tmp_path)


def test_tied_weights_are_saved_and_loaded(tmp_path):
    model = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    model["two"].weight = model["one"].weight
    save_weights(tmp_path / "model.safetensors", model.state_dict())
    other = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    other["two"].weight = other["one"].weight
    put_weights(other, read_weights(tmp_path), tmp_path)
    assert torch.equal(other["two"].weight, model["one"].weight)
    assert other["two"].weight is other["one"].weight


def test_a_compressed_state_is_refused_unread(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "last", Checkpoint({"a": torch.zeros(2)}, {"s": torch.zeros(4)}, Progress()))
    held = read_json(tmp_path / "last/meta.json")
    write_json(tmp_path / "last/meta.json", {key: value for key, value in held.items() if "sha256" not in key})
    whole = (tmp_path / "last/state.pt").read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(tmp_path / "last/state.pt", "w") as new:
        for part in old.infolist():
            new.writestr(part.filename, old.read(part), zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match=r"state\.pt is compressed"):
        read_checkpoint(tmp_path / "last")
