"""Export of a run's model to ONNX, torch.export and the libraries of the hub, with a check of the outputs."""

import io
import logging
import math
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import EvalResult, HfApi, ModelCardData
from torch import Tensor, nn
from torch.export import Dim

from tokenmix.errors import UserError, as_user_error, needs, one_line, printable
from tokenmix.files import (
    Values,
    check_new,
    make_folder,
    new_folder,
    open_regular,
    replace_file,
    replacing,
    user_path,
    write_bytes,
)
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.programs import HubForm
from tokenmix.lab.train.task import TaskModule, input_sizes, size_note
from tokenmix.registry import is_elsewhere, is_foreign, is_transformers

TOLERANCE = 1e-4


def export(
    run: str | Path | RunFolder, file_format: Literal["onnx", "torch-export"], out: str | Path | None = None
) -> Path:
    """Write the model of a run folder with a dynamic batch size, and compare its outputs with PyTorch's.

    They may differ by 1e-4, of numbers above 1 by 1e-4 of the largest in their column.

    Raises:
        UserError: onnxruntime is not installed, `out` cannot be written, or the exported model's outputs differ.
    """
    folder = RunFolder.of(run)
    task = load_task(folder)
    model, example = task.inference_module().eval().cpu(), task.example()
    ending = {"onnx": ".onnx", "torch-export": ".pt2"}[file_format]
    out = user_path(out) if out else folder.path / f"model{ending}"
    if out.is_dir():
        raise UserError(f"{out} is a folder; give a file to write by --out, for example {out / 'model.onnx'}")
    if out.exists() and out.suffix != ending:
        raise UserError(f"{out} exists and is no {ending} file; give another file by --out")
    make_folder(out.parent)
    # The check uses another batch size than the trace.
    three = {name: torch.cat([value, value[:1]]) for name, value in example.items()}
    write = _write_onnx if file_format == "onnx" else _write_torch
    with replacing(out) as partial:
        try:
            answer = write(model, example, three, partial)
        except Exception as error:
            if isinstance(error, OSError | UserError) or not is_elsewhere(task.config.model.model):
                raise
            raise UserError(
                f"{task.config.model.model} cannot be exported to {file_format} ({one_line(error)}); it must run with "
                "any batch size: take that from x.shape[0], not len(x)"
            ) from error
        with torch.no_grad():
            wanted = model(*three.values())
        # Relative to columns of large outputs, such as boxes in pixels, of which float32 has seven digits.
        largest = wanted.abs().flatten(0, -2).amax(0).clamp(min=1)
        error = ((answer - wanted).abs() / largest).max().item()
        if not error <= TOLERANCE:
            raise UserError(
                f"the exported model differs from PyTorch's by {error:.1e} (at most {TOLERANCE:.0e} is allowed); "
                "nothing was written: give the other --format"
            )
    return out


def _dynamic(example: Mapping[str, Tensor]) -> tuple[dict[int, Dim], ...]:
    return ({0: Dim("batch", min=1, max=65536)},) * len(example)


def _write_torch(model: nn.Module, example: Mapping[str, Tensor], tried: Mapping[str, Tensor], partial: Path) -> Tensor:
    program = torch.export.export(model, tuple(example.values()), dynamic_shapes=_dynamic(example))
    # Saved in memory first: if torch wrote the file itself, a full disk would end the process.
    whole = io.BytesIO()
    with warnings.catch_warnings():
        # The warning is about channels-last weights, which are written completely.
        warnings.filterwarnings("ignore", message="No complete tensor found")
        torch.export.save(program, whole)
    write_bytes(partial, whole.getvalue())
    with open_regular(partial) as file, torch.no_grad():
        return torch.export.load(file).module()(*tried.values())


def _write_onnx(model: nn.Module, example: Mapping[str, Tensor], tried: Mapping[str, Tensor], partial: Path) -> Tensor:
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
    (logits,) = session.run(None, {name: value.numpy() for name, value in tried.items()})
    return torch.from_numpy(logits)


# Placeholder in the model card while the repository is unknown.
REPOSITORY = "OWNER/NAME"


def export_to_hub(run: Path | RunFolder, out: Path | None = None, push: str | None = None) -> str:
    """Write config.json, model.safetensors, the library's other files and a model card; optionally upload them.

    The library loads the written model, whose outputs are compared with those of the run's own model. The folder is
    `hub` in the run folder by default. Returns it, or the address of the repository `push`, OWNER/NAME.

    `UserError` if no hub library loads the model, the run has not finished, or the upload failed.
    """
    folder = RunFolder.of(run)
    task, run = load_task(folder), folder.path
    form = task.hub
    other = task.config.swap.swap or task.config.swap.insert
    name = task.config.model.model
    theirs = is_foreign(name) or (is_transformers(name) and form is not None and form.library != "transformers")
    if form is None or other is not None or theirs:
        what = task.config.task if form is None else name + f" with {other} swapped in or inserted" * bool(other)
        raise UserError(
            f"no library of the hub loads a model of {what}; upload the run folder itself: hf upload "
            f"{push or REPOSITORY} {shlex.quote(str(run))} --exclude 'checkpoints/*'; tokenmix predict takes what hf "
            "download leaves"
        )
    if not folder.is_finished:
        raise UserError(f"{run} has not finished, but a model card needs results; {folder.to_continue}")
    out = out or run / "hub"
    check_new(out)
    lacking = f"result.json or config.json in {run} lacks what a model card needs ("
    kinds = AttributeError, LookupError, StopIteration, TypeError, ValueError
    with as_user_error(lacking, "); restore them from a copy", *kinds):
        card = _card(task, form, folder.result, folder.setup["command"], push)
    with new_folder(out) as partial:
        loaded, example = task.save_for_hub(partial), task.example().values()
        with torch.no_grad():
            error = (loaded.eval()(*example) - task.inference_module().eval().cpu()(*example)).abs().max().item()
        if not error <= TOLERANCE:
            raise UserError(
                f"{name} as loaded from the written folder differs from the run's by {error:.1e}; the library has "
                "no form for this model"
            )
        replace_file(partial / "README.md", card.encode())
    if push is None:
        return str(out)
    api = HfApi(library_name="tokenmix")
    remedy = f"give OWNER/NAME, log in with hf auth login, and upload it: hf upload {push} {shlex.quote(str(out))}"
    # Errors of the hub, of HTTP, of the network: they have no common class.
    with as_user_error(f"{out} was written but could not be uploaded to {push} (", f"); {remedy}"):
        address = api.create_repo(push, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=out, commit_message="Model by tokenmix export")
    return str(address)


def _without_markup(value: Any) -> Any:
    """JSON values, which may come from a downloaded run, without characters that Markdown or HTML read."""
    if isinstance(value, Mapping):
        return {_without_markup(key): _without_markup(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_markup(one) for one in value]
    return printable(re.sub(r"[`<>|\[\]\s]+", " ", value)) if isinstance(value, str) else value


def _card(task: TaskModule, form: HubForm, result: Values, command: Sequence[str], repo: str | None) -> str:
    program, *words = _without_markup(list(command))
    result = _without_markup(result)
    data, name, measured = task.data, result["data"], result["environment"]
    unit = next(key.removesuffix("_per_second") for key in result if key.endswith("_per_second"))
    numbers = {key: result["metrics"][key] for key in task.numbers()}
    cells = {key: "not defined" if value is None else f"{value:.4g}" for key, value in numbers.items()}
    rows = "".join(f"| {key} | {cell} |\n" for key, cell in cells.items())
    sizes, held = input_sizes(task.model, data.get("img_size")), data.get("validation", 0)
    chosen = f"the best by {result['monitor']} on {held:,} {unit} held out of training" if held else "the last"
    about = (
        f"`{result['model']}` of tokenmix for {result['task']}: {result['parameters']:,} parameters, trained on "
        f"{data['train']:,} {unit} of `{name}` for {result['epochs']} epoch{'s' * (result['epochs'] != 1)}."
    )
    about += f" The input is {size_note(sizes)}." if sizes else ""
    where = f"Measured on {data['test']:,} test {unit} of `{name}`, after epoch {result['best_epoch']}, {chosen}"
    versions, commit = measured["versions"], measured.get("commit") or "not known"
    # The hub reads library, task and results from the card's metadata.
    results = [
        EvalResult(
            task_type=form.pipeline,
            dataset_type=name,
            dataset_name=name,
            dataset_split="test",
            metric_type=key,
            metric_value=value,
        )
        for key, value in numbers.items()
        if value is not None and math.isfinite(value)
    ]
    header = ModelCardData(
        library_name=form.library,
        pipeline_tag=form.pipeline,
        tags=["tokenmix", form.library],
        model_name=(repo or result["model"]).rpartition("/")[2],
        eval_results=results or None,
    )
    return f"""\
---
{header.to_yaml()}
---
# {result["model"]}

{about}

{where}:

| | |
|---|---:|
{rows}
Made by

```console
{shlex.join([Path(program).name.replace("__main__.py", "tokenmix"), *words])}
```

with tokenmix {versions.get("tokenmix")} (commit {commit}), PyTorch {versions.get("torch")}, seed {result["seed"]}, \
in {result["seconds"]:,.0f} s of training on {", ".join(measured["gpus"]) or measured["cpu"]}.

## Use

`pip install 'tokenmix[{form.extra}]'`

```python
{form.code.format(repo=repo or REPOSITORY)}
```
"""
