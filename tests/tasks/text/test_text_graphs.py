"""Compiled, exported and in half precision, the models say the same."""

import pytest
import torch

from tokenmix.text import GMLPForMaskedLM, GMLPForQuestionAnswering, GMLPForSequenceClassification


@pytest.mark.one_fast
@pytest.mark.parametrize("kind", ["gmlp", "amlp", "self", "self-relative"])
def test_compiled_as_one_graph(build, ids, kind):
    model = build(GMLPForMaskedLM, kind)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    wanted = model(ids, attention_mask=mask, labels=ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = compiled(ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(out.logits, wanted.logits)
    torch.testing.assert_close(out.loss, wanted.loss)
    out.loss.backward()


@pytest.mark.one_fast
@pytest.mark.parametrize("kind", ["gmlp", "gmlp-dense", "amlp", "self", "self-relative"])
def test_exported_for_any_length(build, ids, kind):
    model = build(GMLPForSequenceClassification, kind)
    mask = torch.ones_like(ids)
    length, size = torch.export.Dim("length", min=2, max=10), torch.export.Dim("size", min=1, max=64)
    shapes = {"input_ids": {0: size, 1: length}, "attention_mask": {0: size, 1: length}}
    exported = torch.export.export(
        model, (), {"input_ids": ids, "attention_mask": mask}, dynamic_shapes=shapes, strict=False
    ).module()
    for n in (3, 10):
        words = torch.arange(1, n + 1).expand(3, n).contiguous()
        padding = torch.arange(n).expand(3, n) >= torch.arange(3)[:, None] % 2
        wanted = model(words, attention_mask=padding.long()).logits
        torch.testing.assert_close(exported(input_ids=words, attention_mask=padding.long()).logits, wanted)


@pytest.mark.parametrize("kind", ["gmlp", "amlp", "self", "self-relative"])
def test_bfloat16(build, ids, kind, tmp_path):
    model = build(GMLPForQuestionAnswering, kind)
    wanted = model(ids).start_logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(model(ids).start_logits.float(), wanted, atol=0.1, rtol=0.1)
    model.save_pretrained(tmp_path)
    half = GMLPForQuestionAnswering.from_pretrained(tmp_path, dtype=torch.bfloat16)
    out = half(ids, attention_mask=torch.ones_like(ids), start_positions=ids[:, 0] % 6, end_positions=ids[:, 0] % 6)
    assert out.start_logits.dtype == torch.bfloat16
    assert torch.allclose(out.start_logits.float(), wanted, atol=0.1, rtol=0.1)
    out.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in half.parameters() if p.grad is not None)
