"""Shorter sequences and padded batches have the answers that each sequence has alone."""

import pytest
import torch
import torch.nn.functional as F

from tokenmix import UserError
from tokenmix.text import GMLPForMaskedLM, GMLPForQuestionAnswering, GMLPForSequenceClassification, GMLPModel
from tokenmix.text.blocks import rotate

KINDS = ["gmlp", "gmlp-fft", "gmlp-dense", "amlp", "amlp-dense", "self", "self-relative"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_nothing(build, ids, kind, side, causal):
    model = build(GMLPModel, kind, causal=causal).double()
    before, after = {"right": (0, 3), "left": (3, 0), "both": (1, 2)}[side]
    mask = F.pad(torch.ones_like(ids), (before, after))
    padded = F.pad(ids, (before, after), value=7)
    alone = model(ids, output_hidden_states=True, output_attentions=True)
    out = model(padded, attention_mask=mask, output_hidden_states=True, output_attentions=True)
    tokens = slice(before, before + 6)
    torch.testing.assert_close(out.last_hidden_state[:, tokens], alone.last_hidden_state)
    torch.testing.assert_close(out.pooler_output, alone.pooler_output)
    for state, wanted in zip(out.hidden_states, alone.hidden_states):
        torch.testing.assert_close(state[:, tokens], wanted)
    for attention, wanted in zip(out.attentions or (), alone.attentions or ()):
        torch.testing.assert_close(attention[:, :, tokens, tokens], wanted)
    # Without a mask the padding is text.
    assert not torch.allclose(model(padded).last_hidden_state[:, tokens], alone.last_hidden_state) or (
        causal and side == "right"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_several_lengths(build, ids, kind):
    model = build(GMLPForSequenceClassification, kind).double()
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]])
    out = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(out[:1], model(ids[:1, :3]).logits)
    torch.testing.assert_close(out[1:], model(ids[1:, 1:]).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_alone_is_the_one_in_a_padded_batch_of_losses(build, ids, kind):
    model = build(GMLPForMaskedLM, kind).double()
    labels = torch.where(torch.arange(6) % 2 == 0, ids, -100)
    padded, mask = F.pad(ids, (0, 2)), F.pad(torch.ones_like(ids), (0, 2))
    loss = model(padded, attention_mask=mask, labels=F.pad(labels, (0, 2), value=-100)).loss
    torch.testing.assert_close(loss, model(ids, labels=labels).loss)


def test_a_row_of_padding_only_is_finite(build, ids):
    model = build(GMLPForQuestionAnswering, "amlp")
    mask = torch.ones_like(ids)
    mask[0] = 0
    out = model(ids, attention_mask=mask)
    assert torch.isfinite(out.start_logits).all()
    out.start_logits.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", ["gmlp", "amlp"])
def test_unmasked_as_in_the_paper(build, ids, kind):
    paper = build(GMLPModel, kind, padding="unmasked")
    mask = torch.ones_like(ids)
    mask[:, 4:] = 0
    assert torch.equal(paper(ids, attention_mask=mask).last_hidden_state, paper(ids).last_hidden_state)
    masked = build(GMLPModel, kind)
    assert not torch.allclose(masked(ids, attention_mask=mask).last_hidden_state[:, :4], paper(ids)[0][:, :4])


def test_segments_and_places_follow_the_padding(build, ids):
    model = build(GMLPModel, "self").double()
    segments = torch.tensor([0, 0, 0, 1, 1, 1]).expand(2, 6)
    places = torch.tensor([[0, 1, 2, 0, 1, 2]])
    alone = model(ids, token_type_ids=segments, position_ids=places).last_hidden_state
    out = model(
        F.pad(ids, (2, 0)),
        attention_mask=F.pad(torch.ones_like(ids), (2, 0)),
        token_type_ids=F.pad(segments, (2, 0)),
        position_ids=F.pad(places, (2, 0)),
    ).last_hidden_state
    torch.testing.assert_close(out[:, 2:], alone)
    assert not torch.allclose(model(ids).last_hidden_state, alone)


def test_embeddings_in_place_of_words(build, ids):
    model = build(GMLPModel, "amlp").double()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    words = model.get_input_embeddings()(ids)
    out = model(inputs_embeds=words, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(out, model(ids, attention_mask=mask).last_hidden_state)


def test_rotate_is_a_roll_of_each_row():
    x = torch.arange(24.0).view(2, 6, 2)
    turned = rotate(x, torch.tensor([2, 5]))
    assert torch.equal(turned, torch.stack([x[0].roll(-2, 0), x[1].roll(-5, 0)]))
    assert torch.equal(rotate(turned, -torch.tensor([2, 5])), x)


def test_causal_models_do_not_see_the_future(build, ids):
    for kind in ("gmlp", "gmlp-dense", "amlp", "self"):
        model = build(GMLPModel, kind, causal=True)
        changed = ids.clone()
        changed[:, 4:] = 1
        assert torch.allclose(model(ids)[0][:, :4], model(changed)[0][:, :4], atol=1e-6)
        assert not torch.allclose(model(ids)[0][:, 4:], model(changed)[0][:, 4:])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"attention_mask": torch.ones(2, 5, dtype=torch.long)}, r"must be \(B, N\) = \(2, 6\), got \(2, 5\)"),
        ({"attention_mask": torch.ones(2, 1, 6, 6, dtype=torch.long)}, "masks of pairs"),
        ({"attention_mask": torch.zeros(2, 6)}, "float32; use"),
        ({"position_ids": torch.arange(6)[None]}, "positions='learned'"),
        ({"inputs_embeds": torch.ones(2, 6, 8)}, "one of the two"),
        (
            {"input_ids": torch.tensor([[1, 30]])},
            "token 30 for a model with a vocabulary of 30.*resize_token_embeddings",
        ),
        ({"token_type_ids": torch.tensor([[0, 7]])}, "segment 7 for a model of 2 segments; correct the type_id"),
        ({"input_ids": torch.ones(2, 0, dtype=torch.long)}, "at least one token"),
        ({"past_key_values": None}, "no argument 'past_key_values'"),
    ],
)
def test_what_cannot_be_heeded_is_said(build, ids, arguments, said):
    with pytest.raises(UserError, match=said):
        build(GMLPForMaskedLM)(**{"input_ids": ids, **arguments})


def test_segments_for_a_model_without(build, ids):
    with pytest.raises(UserError, match="type_vocab_size=0"):
        build(GMLPModel, type_vocab_size=0)(ids, token_type_ids=torch.zeros_like(ids))
