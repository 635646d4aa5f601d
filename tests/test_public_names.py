"""The public names: what is promised is there, and nothing becomes public unnoticed."""

import importlib
import inspect
from pathlib import Path

import pytest

import tokenmix

NAMES: dict[str, list[str]] = {
    "tokenmix": [
        "UserError",
        "__version__",
        "compare",
        "cost",
        "create_mixer",
        "create_model",
        "distill",
        "insert",
        "inspect",
        "list_mixers",
        "list_models",
        "list_tasks",
        "optimize",
        "probe",
        "rank_layers",
        "register_mixer",
        "swap_attention",
        "train",
    ],
    "tokenmix.ops": [
        "Scores",
        "attention",
        "attention_from_scores",
        "attention_probabilities",
        "attention_residual",
        "double_normalize",
        "external_attention",
        "external_attention_map",
        "next_scores",
        "resize_gate",
        "resize_score_transform",
        "sharded_external_attention",
        "slot_offset",
        "spatial_gate",
        "toeplitz_matrix",
        "transform_factored",
        "transform_scores",
    ],
    "tokenmix.losses": [
        "diagonality_loss",
    ],
    "tokenmix.inference": [
        "FoldedExternalAttention",
        "FoldedT2TStem",
        "FusedLinear",
        "Int8ExternalAttention",
        "Int8Linear",
        "TOLERANCES",
        "keep_freed_memory",
        "load_quantized",
        "optimize",
        "save_quantized",
    ],
    "tokenmix.distillation": [
        "CurvePoint",
        "DistillReport",
        "Fidelity",
        "FrontierPoint",
        "LayerRanking",
        "RankedLayer",
        "distill",
        "rank_layers",
    ],
    "tokenmix.swap": [
        "Affine",
        "AttentionAdapter",
        "AttentionLayout",
        "AttentionWeights",
        "InsertReport",
        "InsertRow",
        "InsertedBlock",
        "ObservedCall",
        "SkippedAttention",
        "SwapError",
        "SwapReport",
        "SwapRow",
        "insert",
        "register_adapter",
        "remove_inserted",
        "set_input_size",
        "swap_attention",
    ],
    "tokenmix.parallel": ["TokenParallel"],
    "tokenmix.text": [
        "GMLPClassifierOutput",
        "GMLPConfig",
        "GMLPForMaskedLM",
        "GMLPForQuestionAnswering",
        "GMLPForSequenceClassification",
        "GMLPMaskedLMOutput",
        "GMLPModel",
        "GMLPModelOutput",
        "GMLPQuestionAnsweringOutput",
        "create_config",
        "describe",
    ],
    "tokenmix.testing": [
        "Advice",
        "Build",
        "Builder",
        "NotApplicable",
        "PROPERTIES",
        "Property",
        "PropertyFailure",
    ],
}

PROMISED = {
    "tokenmix.layers": {
        "SelfAttention": ["dim", "num_heads"],
        "SimplifiedSelfAttention": ["dim"],
        "SAGANAttention2d": ["dim", "variant"],
        "ExternalAttention": ["dim", "num_slots", "tie"],
        "ExternalAttention2d": ["dim", "num_slots", "tie"],
        "MultiHeadExternalAttention": ["dim", "num_heads", "expansion", "num_slots"],
        "SpatialGatingUnit": ["dim", "num_tokens"],
        "TinyAttention": ["dim"],
        "LessAttention": ["dim", "num_tokens"],
        "AttentionResidual": [],
    },
    "tokenmix.ops": {
        "double_normalize": ["logits", "mask"],
        "external_attention": ["query", "key_memory", "value_memory", "mask", "chunk_size"],
        "spatial_gate": [],
        "transform_scores": ["scores"],
        "transform_factored": [],
    },
    "tokenmix": {"swap_attention": ["model", "mixer", "where"]},
    "tokenmix.losses": {"diagonality_loss": ["scores", "form", "margin"]},
    "tokenmix.text": {
        "GMLPConfig": [
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "intermediate_size",
            "max_position_embeddings",
        ],
        "GMLPModel": ["config"],
        "GMLPForMaskedLM": ["config"],
        "GMLPForSequenceClassification": ["config"],
        "GMLPForQuestionAnswering": ["config"],
        "create_config": ["name"],
    },
}
"""Names and arguments that users were promised; they may gain arguments, never lose one."""


def test_only_what_users_import_from_has_an_inventory() -> None:
    source = Path(tokenmix.__file__).parent
    lists = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if "__all__ =" in path.read_text()}
    assert {name for name in lists if not name.endswith("__init__.py")} == {
        "checkpoints.py",
        "losses.py",
        "parallel.py",
    }


@pytest.mark.parametrize("module", NAMES)
def test_the_inventory_is_complete(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == NAMES[module]


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_there_and_documented(module: str) -> None:
    home = importlib.import_module(module)
    for name in home.__all__:
        value = getattr(home, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{module}.{name} has no docstring"


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in PROMISED.items() for n in names])
def test_what_was_promised_is_there(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    accepted = inspect.signature(value).parameters
    assert set(PROMISED[module][name]) <= set(accepted)


def test_mixers_that_were_promised() -> None:
    promised = {"self", "simplified", "sagan", "external", "multihead-external", "gating", "gating-attention", "less"}
    assert promised <= set(tokenmix.list_mixers())


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'list_everything'"):
        _ = tokenmix.list_everything


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("create_mixer", None, "a mixer is built by its name, .* got None"),
        ("create_model", None, "a model is built by its name, .* got None"),
        ("train", {"lr": 1}, "train takes a task by name, .* a TrainConfig as config; got {'lr': 1}; for example"),
        ("compare", {"lr": 1}, "compare takes a task by name, .* a CompareConfig as config; got {'lr': 1}; for"),
    ],
)
def test_a_value_of_another_kind_is_one_line(name: str, value: object, message: str) -> None:
    more = (8,) if name == "create_mixer" else ()
    with pytest.raises(tokenmix.UserError, match=message):
        getattr(tokenmix, name)(value, *more)
