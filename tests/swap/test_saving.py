"""A swapped model of transformers is saved and opened by transformers' own functions."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from swap_families import FAMILIES

import tokenmix
from runs import train_by_transformers
from tokenmix.errors import UserError
from tokenmix.layers import ExternalAttention

transformers = pytest.importorskip("transformers", reason="transformers is optional and not installed")

SRC = Path(__file__).parents[2] / "src"
VIT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
BERT = {**VIT, "vocab_size": 40, "max_position_embeddings": 20}
MIXERS = ["external", "less", "gating", "em", "multihead-external", "gating-toeplitz", "token-mlp", "offset", "self"]


@pytest.fixture(autouse=True)
def _registered() -> None:
    import tokenmix.register  # noqa: F401

    torch.manual_seed(0)


def vit() -> Any:
    config = transformers.ViTConfig(**VIT, image_size=16, patch_size=4, num_labels=5)
    return transformers.ViTForImageClassification(config).eval()


def bert(kind: str = "BertForMaskedLM") -> Any:
    return getattr(transformers, kind)(transformers.BertConfig(**BERT)).eval()


def layers(model: Any) -> list[str]:
    return [n for n, m in model.named_modules() if type(m).__name__ in ("ViTAttention", "BertAttention")]


def moved(model: Any) -> Any:
    """Weights that no start has."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("mixer", ["gating", "gating-toeplitz", "token-mlp", "less"])
def test_a_matrix_over_fewer_tokens_than_the_model_takes_comes_back(mixer: str, tmp_path: Path) -> None:
    """`tokenmix distill` swaps at the length of its texts, not at the model's longest."""
    model, ids = bert("BertModel"), torch.arange(16).view(2, 8)
    tokenmix.swap_attention(model, mixer, example_inputs={"input_ids": ids[:1]})
    moved(model).save_pretrained(tmp_path)
    opened = transformers.AutoModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(opened(ids).last_hidden_state, model(ids).last_hidden_state)


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertForMaskedLM", "ViTForImageClassification"])
def test_a_swapped_model_trains_under_transformers_trainer(kind: str, tmp_path: Path) -> None:
    """It hands a number of labels, a tensor, to every layer of a model."""
    model = vit() if kind.startswith("ViT") else bert(kind)
    tokenmix.swap_attention(model, "external")
    given = {"pixel_values": torch.randn(3, 16, 16)} if kind.startswith("ViT") else {"input_ids": torch.arange(8)}
    label: Any = torch.arange(8) if kind == "BertForMaskedLM" else 1
    memory = next(m for m in model.modules() if isinstance(m, ExternalAttention)).memory.key_memory
    before = memory.detach().clone()
    samples = [{**given, "labels": label}] * 4
    train_by_transformers(model, samples, tmp_path, max_steps=2, per_device_train_batch_size=2)
    assert not torch.equal(memory, before)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_vit_comes_back(mixer: str, tmp_path: Path) -> None:
    model, x = vit(), torch.randn(2, 3, 16, 16)
    kwargs = {"num_slots": 5} if mixer == "external" else {}
    tokenmix.swap_attention(model, mixer, layers(model)[1:], mixer_kwargs=kwargs)
    moved(model).save_pretrained(tmp_path)
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert type(again) is transformers.ViTForImageClassification
    assert isinstance(again.config, transformers.ViTConfig)
    assert torch.equal(again(x).logits, model(x).logits)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(base) is transformers.ViTModel
    assert torch.equal(base(x).last_hidden_state, model.base_model(x).last_hidden_state)


@pytest.mark.parametrize("mixer", ["external", "gating"])
def test_a_bert_comes_back_again_and_again(mixer: str, tmp_path: Path) -> None:
    model, ids = bert(), torch.randint(1, 40, (2, 9))
    tokenmix.swap_attention(model, mixer, layers(model)[:1], num_tokens=20)
    tokenmix.swap_attention(model, "em", layers(model), mixer_kwargs={"num_slots": 3})
    moved(model).save_pretrained(tmp_path / "one")
    once = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "one")
    once.save_pretrained(tmp_path / "two")
    twice = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "two")
    assert torch.equal(twice(ids).logits, model(ids).logits)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "two", num_labels=3)
    assert classifier(ids).logits.shape == (2, 3)
    assert torch.equal(classifier.base_model(ids).last_hidden_state, twice.base_model(ids).last_hidden_state)


FAST = ("bert", "clip", "patchtst")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in FAMILIES])
@torch.no_grad()
def test_every_family_comes_back(name: str, tmp_path: Path) -> None:
    model, inputs = FAMILIES[name].build(), FAMILIES[name].inputs()
    tokenmix.swap_attention(model, "external", drop="positions", example_inputs=inputs)
    moved(model).save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(again) is type(model)
    torch.testing.assert_close(again(**inputs)[0], model(**inputs)[0], rtol=1e-10, atol=1e-10)


def test_positions_are_dropped_again(tmp_path: Path) -> None:
    model, ids = transformers.MPNetModel(transformers.MPNetConfig(**BERT)).eval(), torch.randint(2, 40, (2, 9))
    tokenmix.swap_attention(model, "external", drop="positions")
    moved(model).save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)


def test_what_was_swapped_in_a_base_model_opens_with_a_head(tmp_path: Path) -> None:
    model, ids = bert("BertModel"), torch.randint(1, 40, (2, 9))
    tokenmix.swap_attention(model, "external", layers(model))
    moved(model).save_pretrained(tmp_path)
    headed = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(headed.bert(ids).last_hidden_state, model(ids).last_hidden_state)


def test_models_inside_a_model_note_their_part_of_the_swap(tmp_path: Path) -> None:
    pair = torch.nn.ModuleDict({"question": bert("BertModel"), "answer": bert(), "plain": bert()})
    names = [f"question.{layers(pair['question'])[0]}", *(f"answer.{name}" for name in layers(pair["answer"])[1:])]
    tokenmix.swap_attention(pair, "external", names)
    ids, pair = torch.randint(1, 40, (2, 9)), moved(pair)
    assert "tokenmix_swap" not in pair["plain"].config.to_dict()
    for name, opener in (("question", transformers.AutoModel), ("answer", transformers.AutoModelForMaskedLM)):
        pair[name].save_pretrained(tmp_path / name)
        assert torch.equal(opener.from_pretrained(tmp_path / name)(ids)[0], pair[name](ids)[0])


def test_the_config_says_what_was_swapped(tmp_path: Path) -> None:
    model = bert()
    shared, before = model.config, json.dumps(model.config.to_dict(), default=str)
    names = layers(model)
    tokenmix.swap_attention(model, "external", names[1:], mixer_kwargs={"num_slots": 5})
    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["model_type"] == "tokenmix-swapped"
    assert said["swapped_type"] == "bert"
    assert said["hidden_size"] == 32
    where = [name.removeprefix("bert.") for name in names[1:]]
    row = {"mixer": "external", "where": where, "num_tokens": 20, "mixer_kwargs": {"num_slots": 5}, "drop": None}
    assert said["tokenmix_swap"] == [row]
    assert json.dumps(shared.to_dict(), default=str) == before, "another model may have the same config"
    assert all(m.config is model.config for m in model.modules() if hasattr(m, "config"))


def test_copies_and_pickles_keep_the_swap(tmp_path: Path) -> None:
    model, ids = bert(), torch.randint(1, 40, (2, 9))
    tokenmix.swap_attention(model, "external")
    for i, other in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        other.save_pretrained(tmp_path / str(i))
        again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / str(i))
        assert torch.equal(again(ids).logits, model(ids).logits)
    empty = transformers.AutoModelForMaskedLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path / "0"))
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty.eval()(ids).logits, model(ids).logits)


def test_a_model_that_is_not_swapped_is_saved_as_before(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "bert"


def test_a_swap_that_fails_leaves_the_config(tmp_path: Path) -> None:
    model = bert()
    before = model.config
    with pytest.raises(UserError):
        tokenmix.swap_attention(model, "gating", mixer_kwargs={"nothing": 1})
    assert model.config is before


def test_without_tokenmix_it_is_refused(tmp_path: Path) -> None:
    """transformers by itself would leave the mixers' weights out."""
    model = bert()
    tokenmix.swap_attention(model, "external")
    model.save_pretrained(tmp_path)
    code = "import sys; from transformers import AutoModel; AutoModel.from_pretrained(sys.argv[1])"
    for first, ends in (("", 1), ("import tokenmix.register; ", 0)):
        done = subprocess.run(
            [sys.executable, "-c", first + code, str(tmp_path)],
            env={"PYTHONPATH": str(SRC), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == ends, done.stderr
        assert ("tokenmix-swapped" in done.stderr) is (ends == 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swapped_type": "os"}, "unknown model type of transformers"),
        ({"swapped_type": "tokenmix-swapped"}, "unknown model type of transformers"),
        ({"tokenmix_swap": "external"}, "tokenmix_swap of config.json is not a list of swaps"),
        ({"tokenmix_swap": [{"mixer": "external"}]}, "tokenmix_swap of config.json is not a list of swaps"),
        ({"mixer": "extrnal"}, "unknown mixer 'extrnal'; did you mean external"),
        ({"mixer": "evil_layers:X"}, "a file names code, evil_layers:X, which is not imported"),
        ({"where": ["encoder.layer.9.attention"]}, "unknown attention of the model"),
        ({"mixer_kwargs": {"nothing": 1}}, "has no argument 'nothing'"),
    ],
)
def test_a_file_is_data(changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_layers.py").write_text(f"open({str(tmp_path / 'MARK')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = bert()
    tokenmix.swap_attention(model, "external")
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model/config.json"
    said = json.loads(file.read_text())
    for key, value in changes.items():
        (said if key in said else said["tokenmix_swap"][0])[key] = value
    file.write_text(json.dumps(said))
    with pytest.raises(UserError, match=message):
        transformers.AutoModel.from_pretrained(tmp_path / "model")
    assert not (tmp_path / "MARK").exists()


def test_a_class_of_ones_own_is_named_and_opens_where_it_is_imported(tmp_path: Path) -> None:
    class Mine(ExternalAttention):
        """One's own."""

    model, ids = bert(), torch.randint(1, 40, (2, 9))
    tokenmix.swap_attention(model, Mine)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError):
        transformers.AutoModel.from_pretrained(tmp_path)
    tokenmix.swap_attention(model, ExternalAttention)
    assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize("name", ["LayoutLM", "Splinter", "MarkupLM", "Bert"])
def test_layers_with_a_norm_of_their_own_are_the_same_as_self(name: str) -> None:
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**BERT)).eval()
    ids = torch.randint(1, 40, (2, 7))
    expected = model(ids)[0]
    report = tokenmix.swap_attention(model, "self")
    assert all(row.whole for row in report.rows)
    torch.testing.assert_close(model(ids)[0], expected, rtol=1e-4, atol=1e-5)


def test_other_heads_come_back_by_their_auto_classes(tmp_path: Path) -> None:
    config = transformers.YolosConfig(**VIT, image_size=[16, 16], patch_size=4, num_detection_tokens=3)
    model, x = transformers.YolosForObjectDetection(config).eval(), torch.randn(1, 3, 16, 16)
    tokenmix.swap_attention(model, "external")
    moved(model).save_pretrained(tmp_path)
    again = transformers.AutoModelForObjectDetection.from_pretrained(tmp_path).eval()
    assert torch.equal(again(x).logits, model(x).logits)


def test_attentions_of_the_other_layers_alone_are_refused() -> None:
    model = bert("BertModel")
    model.set_attn_implementation("eager")
    tokenmix.swap_attention(model, "external", layers(model)[1:])
    ids = torch.ones(1, 5, dtype=torch.long)
    model(ids)
    with pytest.raises(UserError, match="output_attentions=True"):
        model(ids, output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(UserError, match="output_attentions=True"):
        copy.deepcopy(model)(ids)


def test_a_decoder_above_the_base_model_comes_back(tmp_path: Path) -> None:
    """As in MAE, whose decoder is not of the base model."""
    decoder = {f"decoder_{name}": value for name, value in VIT.items()}
    model = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**VIT, **decoder, image_size=16, patch_size=4))
    tokenmix.swap_attention(model, "external")
    moved(model.eval()).save_pretrained(tmp_path)
    again = transformers.AutoModelForPreTraining.from_pretrained(tmp_path)
    x, noise = torch.randn(2, 3, 16, 16), torch.rand(2, 16)
    assert torch.equal(again(x, noise=noise).logits, model(x, noise=noise).logits)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    wanted = model.vit(x, noise=noise).last_hidden_state
    assert torch.equal(base(x, noise=noise).last_hidden_state, wanted)


def test_a_swap_before_the_first_call_records_each_state_once() -> None:
    """transformers registers its recording hooks in the first call, which was that of the swap."""
    model = bert("BertModel")
    model.config.output_hidden_states = True
    tokenmix.swap_attention(model, "self")
    states = model(input_ids=torch.ones(1, 4, dtype=torch.long)).hidden_states
    assert len(states) == 1 + model.config.num_hidden_layers


def test_positions_that_attention_does_not_read_are_taken() -> None:
    model, ids = bert("BertModel"), torch.ones(1, 4, dtype=torch.long)
    expected = model(input_ids=ids, position_ids=torch.arange(4)[None]).last_hidden_state
    tokenmix.swap_attention(model, "self")
    got = model(input_ids=ids, position_ids=torch.arange(4)[None]).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
