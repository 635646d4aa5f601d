"""Export of a run's model to ONNX or torch.export, checked to give the same outputs there."""

import io
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError, needs
from tokenmix.files import make_folder, open_regular, replacing, write_bytes
from tokenmix.lab.train.load import load_task

TOLERANCE = 1e-4


def export(run: Path, file_format: Literal["onnx", "torch-export"], out: Path | None = None) -> Path:
    """Write the model of a run folder, with a dynamic batch, and compare its logits with PyTorch's to 1e-4.

    Raises:
        UserError: onnxruntime is not installed, `out` cannot be written, or the written model gives other outputs.
    """
    task, _, _ = load_task(run)
    model, example = task.answering().eval().cpu(), task.example()
    out = out or run / {"onnx": "model.onnx", "torch-export": "model.pt2"}[file_format]
    if out.is_dir():
        raise UserError(f"{out} is a folder; give a file to write by --out, for example {out / 'model.onnx'}")
    make_folder(out.parent)
    write = _write_onnx if file_format == "onnx" else _write_torch
    with replacing(out) as partial:
        answer = write(model, example, partial)
        with torch.no_grad():
            expected = model(*_three(example).values())
        error = (answer - expected).abs().max().item()
        if not error <= TOLERANCE:
            raise UserError(
                f"the exported model differs from PyTorch's by {error:.1e} (at most {TOLERANCE:.0e} is allowed)"
            )
    return out


def _dynamic(example: Mapping[str, Tensor]) -> tuple[Any, ...]:
    return ({0: torch.export.Dim("batch", min=1, max=65536)},) * len(example)


def _three(example: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch of another size than the model was traced with."""
    return {name: torch.cat([value, value[:1]]) for name, value in example.items()}


def _write_torch(model: nn.Module, example: Mapping[str, Tensor], partial: Path) -> Tensor:
    program = torch.export.export(model, tuple(example.values()), dynamic_shapes=_dynamic(example))
    # Written by torch itself, a full disk would end the process.
    whole = io.BytesIO()
    with warnings.catch_warnings():
        # Of weights whose channels lie last, which are written whole.
        warnings.filterwarnings("ignore", message="No complete tensor found")
        torch.export.save(program, whole)
    write_bytes(partial, whole.getvalue())
    with open_regular(partial) as file, torch.no_grad():
        return torch.export.load(file).module()(*_three(example).values())


def _write_onnx(model: nn.Module, example: Mapping[str, Tensor], partial: Path) -> Tensor:
    with needs("ONNX export"):
        import onnxruntime
        import onnxscript  # noqa: F401  (torch's exporter needs it)
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            tuple(example.values()),
            dynamo=True,
            verbose=False,
            input_names=list(example),
            output_names=["logits"],
            dynamic_shapes=_dynamic(example),
        )
    assert program is not None
    program.save(str(partial), external_data=False)
    session = onnxruntime.InferenceSession(str(partial), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {name: value.numpy() for name, value in _three(example).items()})
    return torch.from_numpy(logits)
