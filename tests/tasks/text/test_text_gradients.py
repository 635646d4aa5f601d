"""Hidden states and attentions that a model returns are what its result was made of: gradients reach them."""

import pytest
import torch
import torch.nn.functional as F

from tokenmix.text import GMLPForMaskedLM, GMLPForSequenceClassification

KINDS = ["gmlp", "gmlp-fft", "gmlp-dense", "amlp", "amlp-dense", "self", "self-relative"]
MASKS = {
    "none": None,
    "right": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
    "left": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
}


@pytest.mark.parametrize("padding", ["masked", "unmasked"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("model", [GMLPForMaskedLM, GMLPForSequenceClassification])
def test_gradients_reach_states_and_attentions(build, ids, model, kind, mask, padding, checkpointed):
    built = build(model, kind, padding=padding).train()
    if checkpointed:
        getattr(built, "activation_checkpointing_enable", built.gradient_checkpointing_enable)()
    labels = ids if model is GMLPForMaskedLM else ids[:, 0] % 2
    out = built(ids, attention_mask=MASKS[mask], labels=labels, output_hidden_states=True, output_attentions=True)
    kept = (*out.hidden_states, *(out.attentions or ()))
    assert len(kept) == (3 if kind.startswith("gmlp") else 5)
    for tensor in kept:
        tensor.retain_grad()
    out.loss.backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in kept)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_asking_changes_neither_the_result_nor_its_gradients(build, ids, kind, mask, causal):
    results = []
    for asked in (False, True):
        model = build(GMLPForMaskedLM, kind, causal=causal).double()
        out = model(ids, attention_mask=MASKS[mask], labels=ids, output_hidden_states=asked, output_attentions=asked)
        out.loss.backward()
        results.append([out.logits, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0])


def test_a_gradient_of_a_state_is_that_of_its_place(build, ids):
    """What reaches the embeddings' state from a padded text is what reaches it alone, at the text's places."""
    gradients = []
    for before in (0, 2):
        model = build(GMLPForSequenceClassification, "amlp").double()
        mask = F.pad(torch.ones_like(ids), (before, 0))
        out = model(F.pad(ids, (before, 0)), attention_mask=mask, output_hidden_states=True, output_attentions=True)
        for tensor in (out.hidden_states[0], out.attentions[0]):
            tensor.retain_grad()
        out.logits.sum().backward()
        gradients.append((out.hidden_states[0].grad[:, before:], out.attentions[0].grad[..., before:, before:]))
    torch.testing.assert_close(gradients[1], gradients[0])
