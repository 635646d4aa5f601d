"""What a transformers model must do: be saved, loaded, found by its config, resized, trained and put in a pipeline."""

import json
from contextlib import nullcontext

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

from runs import train_by_transformers
from tokenmix import UserError
from tokenmix.text import (
    GMLPConfig,
    GMLPForMaskedLM,
    GMLPForQuestionAnswering,
    GMLPForSequenceClassification,
    GMLPModel,
)

AUTO = {
    AutoModel: GMLPModel,
    AutoModelForMaskedLM: GMLPForMaskedLM,
    AutoModelForSequenceClassification: GMLPForSequenceClassification,
    AutoModelForQuestionAnswering: GMLPForQuestionAnswering,
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "gate", "multiplies", "the", "tokens"]


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {
        name: f"[{name[:-6].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    }
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


@pytest.mark.parametrize("auto", AUTO, ids=lambda c: c.__name__)
@pytest.mark.parametrize("kind", ["gmlp", "amlp-dense", "self", "self-relative"])
def test_saved_loaded_and_found(build, ids, auto, kind, tmp_path):
    model = build(AUTO[auto], kind, num_labels=3, gate_variant="linear" if kind == "gmlp" else "split")
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gmlp"
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, GMLPConfig)
    assert config.num_labels == 3
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is AUTO[auto]
    assert not loaded.training
    first, second = model(ids), loaded(ids)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_pretrained_body_under_another_head(build, ids, tmp_path):
    build(GMLPForMaskedLM, "amlp").save_pretrained(tmp_path)
    body = GMLPForMaskedLM.from_pretrained(tmp_path).gmlp
    model, info = GMLPForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {
        "gmlp.pooler.weight",
        "gmlp.pooler.bias",
        "classifier.weight",
        "classifier.bias",
    }
    assert torch.equal(model.gmlp(ids)[0], body(ids)[0])
    assert model.classifier.weight.std() < 0.1


def test_the_head_is_tied(build):
    model = build(GMLPForMaskedLM)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.get_output_embeddings() is model.lm_head
    untied = build(GMLPForMaskedLM, tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.get_input_embeddings().weight


def test_how_a_model_starts():
    for fields in ({}, {"tiny_attention_dim": 4}, {"gate": "dense"}):
        sizes = {"vocab_size": 300, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 12}
        model = GMLPForMaskedLM(GMLPConfig(**sizes, max_position_embeddings=6, **fields))
        branch = model.gmlp.layers[0].mixer
        x = torch.randn(2, 6, 8)
        first, _ = branch.act(branch.proj_in(x)).chunk(2, -1)
        assert torch.allclose(branch(x), branch.proj_out(first), atol=1e-4)
        words = model.get_input_embeddings().weight.detach()
        assert words[0].abs().sum() == 0
        assert words[1:].std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("size", [25, 40])
def test_another_vocabulary(build, ids, size, tmp_path):
    model = build(GMLPForMaskedLM)
    known = ids % 25
    with torch.no_grad():  # transformers resizes in place, which a recorded graph would not know
        before = model(known).logits
    model.resize_token_embeddings(size, mean_resizing=False)
    assert model.config.vocab_size == size
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.allclose(model(known).logits[..., :25], before[..., :25], atol=1e-6)
    model(known, labels=known).loss.backward()
    model.save_pretrained(tmp_path)
    assert GMLPForMaskedLM.from_pretrained(tmp_path)(known).logits.shape == (2, 6, size)


def test_in_the_pipeline(build):
    model = build(GMLPForMaskedLM, "amlp", vocab_size=len(WORDS), type_vocab_size=0)
    words = tokenizer()
    # A tokenizer of BERT's kind sends segments, which this model does not have.
    words.model_input_names = ["input_ids", "attention_mask"]
    fill = pipeline("fill-mask", model=model, tokenizer=words, top_k=2)
    answers = fill("a gate [MASK] the tokens")
    logits = model(**words("a gate [MASK] the tokens", return_tensors="pt")).logits[0, 3]
    assert [answer["token"] for answer in answers] == logits.topk(2).indices.tolist()
    # Of two texts together the shorter is padded.
    assert fill(["a gate [MASK] the tokens", "the [MASK]"], batch_size=2)[1][0]["score"] == pytest.approx(
        fill("the [MASK]")[0]["score"], rel=1e-4
    )


@pytest.mark.parametrize("kind", ["gmlp", "amlp", "self", "self-relative"])
def test_under_transformers_trainer(build, ids, kind, tmp_path):
    model = build(GMLPForMaskedLM, kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = [{"input_ids": row, "labels": row} for row in ids.repeat(4, 1)]
    steps = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    train_by_transformers(model, rows, tmp_path, **steps)
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]


@pytest.mark.parametrize(
    "labels", [2, torch.tensor([0.5]), torch.tensor([1.0, 0.0])], ids=["class", "number", "several"]
)
def test_accumulated_gradients_are_those_of_the_whole_batch(build, ids, labels, tmp_path):
    """The losses of numbers and of several labels take no number of items, so the trainer must divide."""
    plain = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    found = []
    for size in (8, 2):
        model = build(GMLPForSequenceClassification, num_labels=3 if isinstance(labels, int) else len(labels))
        before = model.classifier.weight.detach().clone()
        steps = {"max_steps": 1, "per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        rows = [{"input_ids": row, "labels": labels} for row in ids.repeat(4, 1)]
        train_by_transformers(model, rows, tmp_path, **steps, **plain)
        found.append(model.classifier.weight.detach() - before)
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["amlp", "self"])
def test_checkpointed_gradients_are_the_same(build, ids, kind):
    gradients = []
    for checkpointed in (False, True):
        model = build(GMLPForMaskedLM, kind).train()
        if checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
            assert all(layer.gradient_checkpointing for layer in model.gmlp.layers)
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients))


def test_an_older_name_for_checkpointing_works_as_well(build, ids):
    model = build(GMLPForMaskedLM).train()
    newer = hasattr(model, "activation_checkpointing_enable")
    with pytest.warns(FutureWarning) if newer else nullcontext():
        model.gradient_checkpointing_enable()
    assert all(layer.gradient_checkpointing for layer in model.gmlp.layers)


def test_states_maps_and_gates(build, ids):
    for kind, attention, gates in [("gmlp", None, True), ("amlp", 1, True), ("self", 2, False)]:
        model = build(GMLPForMaskedLM, kind)
        out = model(ids, output_hidden_states=True, output_attentions=True)
        assert len(out.hidden_states) == 3
        states = model(ids, output_hidden_states=True).hidden_states
        assert torch.equal(states[-1], model.gmlp(ids)[0])
        # With attentions the maps are written, and the result made from them, not in a fused kernel.
        torch.testing.assert_close(out.hidden_states, states)
        if attention is None:
            assert out.attentions is None
        else:
            assert [tuple(a.shape) for a in out.attentions] == [(2, attention, 6, 6)] * 2
            assert torch.allclose(out.attentions[0].sum(-1), torch.ones(2, attention, 6))
        assert (out.gates is not None) == gates
        for gate, layer in zip(out.gates or (), model.gmlp.layers):
            assert gate[4, 1] == layer.mixer.gating.weight[9 + 4 - 1]
        bare = model(ids)
        assert {"hidden_states", "attentions", "gates"}.isdisjoint(bare.keys())


def test_tuples_and_flags_of_the_config(build, ids):
    model = build(GMLPForMaskedLM, "amlp", output_hidden_states=True)
    out = model(ids, labels=ids, return_dict=False)
    assert isinstance(out, tuple)
    assert torch.equal(out[1], model(ids).logits)
    assert len(out[2]) == 3


def test_config_says_what_it_cannot_be():
    for fields, said in [
        ({"mixer": "selv"}, "did you mean self"),
        ({"gate": "circulant"}, "unknown gate 'circulant'"),
        ({"mixer": "self"}, "needs num_attention_heads that divides"),
        ({"positions": "relative"}, "which mixer='gating' does not have"),
        ({"mixer": "self", "num_attention_heads": 7}, "divides hidden_size 512, got 7"),
        ({"mixer": "self", "num_attention_heads": 8, "gate": "dense"}, "gate='dense' only applies to mixer='gating'"),
        ({"num_attention_heads": 8}, "for aMLP give tiny_attention_dim"),
        ({"intermediate_size": 7}, "make it even"),
        ({"pad_token_id": 32_000}, "one of the 32000 tokens"),
        ({"num_hidden_layers": 0}, "at least 1, got 0"),
        ({"type_vocab_size": -1}, "at least 0, got -1"),
    ]:
        with pytest.raises(UserError, match=said):
            GMLPConfig(**fields)
