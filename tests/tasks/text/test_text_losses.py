"""The losses of the heads, against the plain formula."""

import pytest
import torch
import torch.nn.functional as F

from tokenmix import UserError
from tokenmix.text import GMLPForMaskedLM, GMLPForQuestionAnswering, GMLPForSequenceClassification


def test_masked_words(build, ids):
    model = build(GMLPForMaskedLM)
    labels = torch.where(torch.arange(6) < 2, ids, -100)
    out = model(ids, labels=labels)
    assert out.logits.shape == (2, 6, 30)
    wanted = F.cross_entropy(out.logits[:, :2].flatten(0, 1), ids[:, :2].flatten())
    torch.testing.assert_close(out.loss, wanted)
    # What the trainer counts over several batches takes the place of the mean.
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=8).loss, wanted / 2)


def test_the_head_on_labelled_places_only(build, ids):
    every, few = build(GMLPForMaskedLM), build(GMLPForMaskedLM, predict="labelled")
    labels = torch.where(torch.arange(6) % 3 == 1, ids, -100)
    wanted, out = every(ids, labels=labels), few(ids, labels=labels)
    torch.testing.assert_close(out.logits, wanted.logits[labels != -100])
    torch.testing.assert_close(out.loss, wanted.loss)
    assert few(ids).logits.shape == (2, 6, 30)
    for out in (every(ids, labels=labels), few(ids, labels=labels)):
        out.loss.backward()
    pairs = zip(every.parameters(), few.parameters())
    assert all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize(
    ("labels", "num_labels", "kind"),
    [
        (torch.tensor([0, 2]), 3, "single_label_classification"),
        (torch.tensor([0.5, 2.0]), 1, "regression"),
        (torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), 3, "multi_label_classification"),
    ],
)
def test_one_label_a_text(build, ids, labels, num_labels, kind):
    model = build(GMLPForSequenceClassification, "amlp", num_labels=num_labels)
    out = model(ids, labels=labels)
    assert model.config.problem_type == kind
    wanted = {
        "single_label_classification": lambda: F.cross_entropy(out.logits, labels),
        "regression": lambda: F.mse_loss(out.logits[:, 0], labels),
        "multi_label_classification": lambda: F.binary_cross_entropy_with_logits(out.logits, labels),
    }[kind]()
    torch.testing.assert_close(out.loss, wanted)


def test_the_pooled_token_is_the_first(build, ids):
    model = build(GMLPForSequenceClassification, "gmlp")
    hidden = model.gmlp(ids).last_hidden_state
    wanted = model.classifier(torch.tanh(model.gmlp.pooler(hidden[:, 0])))
    torch.testing.assert_close(model(ids).logits, wanted)


def test_spans(build, ids):
    model = build(GMLPForQuestionAnswering)
    start, end = torch.tensor([1, 2]), torch.tensor([3, 5])
    out = model(ids, start_positions=start, end_positions=end)
    wanted = (F.cross_entropy(out.start_logits, start) + F.cross_entropy(out.end_logits, end)) / 2
    torch.testing.assert_close(out.loss, wanted)
    # An answer that was cut off with the text is left out.
    cut = model(ids, start_positions=torch.tensor([1, 60]), end_positions=torch.tensor([3, 60]))
    first = F.cross_entropy(out.start_logits[:1], start[:1]) + F.cross_entropy(out.end_logits[:1], end[:1])
    torch.testing.assert_close(cut.loss, first / 2)
    with pytest.raises(UserError, match="both or neither"):
        model(ids, start_positions=start)
