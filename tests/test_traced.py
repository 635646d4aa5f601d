"""Traced with a mask that leaves nothing out, a graph heeds the masks that it meets afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, VARIANTS, builder, example
from tokenmix import list_models
from tokenmix.testing.harness import awake, to_tokens
from tokenmix.text import (
    GMLPForMaskedLM,
    GMLPForQuestionAnswering,
    GMLPForSequenceClassification,
    GMLPModel,
    create_config,
)

pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
HEADS = [GMLPModel, GMLPForMaskedLM, GMLPForQuestionAnswering, GMLPForSequenceClassification]


def padded(size: int, length: int) -> Tensor:
    """Padding at the end of the first row, at both ends of the second, none in the others."""
    mask = torch.ones(size, length, dtype=torch.bool)
    mask[0, -3:] = False
    mask[1, :2] = mask[1, -1:] = False
    return mask


def check(model: nn.Module, inputs: tuple[Tensor, ...], mask: Tensor) -> None:
    """`mask` is the last argument."""
    full = torch.ones_like(mask)
    with torch.no_grad():
        traced: Any = torch.jit.trace(model, (*inputs, full), check_trace=False)
        answer, wanted = traced(*inputs, mask), model(*inputs, mask)
        assert not torch.allclose(first(wanted), first(model(*inputs, full)), atol=1e-3)
    torch.testing.assert_close(first(answer), first(wanted), atol=1e-4, rtol=1e-4)


def first(answer: Any) -> Tensor:
    return answer if isinstance(answer, Tensor) else answer[0]


@pytest.mark.parametrize("name", [*CASES, *VARIANTS])
def test_mixers(name: str) -> None:
    case = {**CASES, **VARIANTS}[name]
    x = example(case)
    check(awake(builder(case)), (x,), padded(len(x), to_tokens(x).shape[1]))


def text_model(head: Any, name: str) -> nn.Module:
    torch.manual_seed(0)
    model = head(create_config(name, vocab_size=30, num_hidden_layers=2, return_dict=False)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def words() -> Tensor:
    return torch.randint(1, 30, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
@pytest.mark.parametrize("name", list_models("*_nano", task="masked-lm"))
def test_text_models(name: str, head: Any) -> None:
    check(text_model(head, name), (words(),), padded(3, 9).long())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_onnx_by_tracing(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, ids, mask = text_model(GMLPForSequenceClassification, "amlp_text_nano"), words(), padded(3, 9).long()
    file, names = str(tmp_path / "model.onnx"), ["ids", "mask"]
    torch.onnx.export(model, (ids, torch.ones_like(mask)), file, dynamo=False, input_names=names)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), model(ids, mask)[0], atol=1e-5, rtol=1e-4)
