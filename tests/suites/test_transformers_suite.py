"""transformers' own tests of models, from its source distribution, over our text models in six configurations.

Its tests of pipelines, export, generation and configurations need files that the source distribution does not hold.
Generation is nothing that these models do; the others are tested in tests/tasks/text. The pipeline tests of a 4.57.3
checkout were run by hand under 5.23 on 2026-11-23: feature extraction, fill mask, text classification and zero-shot
classification pass in all six configurations; 5.x has no question-answering pipeline any more.
"""

import importlib
import unittest
from typing import Any

import pytest
import torch
from source_distributions import package, unpacked

from tokenmix.text import (
    GMLPConfig,
    GMLPForMaskedLM,
    GMLPForQuestionAnswering,
    GMLPForSequenceClassification,
    GMLPModel,
)

pytestmark = pytest.mark.slow

ROOT = unpacked("transformers")
# Pattern of a test's name: why it cannot hold of ours.
EXPECTED: dict[str, str] = {}

# Of what lies next to them the source distribution has none.
package("transformers_tests", ROOT / "tests")
package("transformers_tests.exporters")
package("transformers_tests.exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
package("transformers_tests.generation")
package("transformers_tests.generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
models = importlib.import_module("transformers_tests.test_modeling_common")
training = importlib.import_module("transformers_tests.test_training_mixin")

# Their tests know a head, and the labels that it takes, by the name of its class in these tables.
TABLES = {
    "MODEL_MAPPING_NAMES": GMLPModel,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": GMLPForMaskedLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": GMLPForSequenceClassification,
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": GMLPForQuestionAnswering,
}
their_values = models.get_values


def get_values(table: Any) -> list[str]:
    return [*their_values(table), *(kind.__name__ for name, kind in TABLES.items() if getattr(models, name) is table)]


vars(models)["get_values"] = get_values

KINDS: dict[str, dict[str, Any]] = {
    "Dense": {"gate": "dense"},
    "Toeplitz": {},
    "FFT": {"gate": "toeplitz-fft"},
    "AMLP": {"tiny_attention_dim": 8},
    "Self": {"mixer": "self", "num_attention_heads": 4},
    "SelfRelative": {"mixer": "self", "num_attention_heads": 4, "positions": "relative"},
}


class Small:
    """What their tests ask of a model's author: a small configuration, and inputs for it."""

    batch_size, seq_length, hidden_size, num_hidden_layers, is_training = 3, 7, 32, 2, True

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        # The map of an aMLP is that of tiny attention's one head.
        self.num_attention_heads = fields.get("num_attention_heads", 1)
        self.sequence_classification_class = None

    def get_config(self) -> GMLPConfig:
        return GMLPConfig(
            vocab_size=99,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            intermediate_size=48,
            max_position_embeddings=64,
            type_vocab_size=2,
            **self.fields,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[GMLPConfig, dict[str, torch.Tensor]]:
        ids = models.ids_tensor([self.batch_size, self.seq_length], 99).clamp(min=1)
        mask = torch.ones_like(ids)
        mask[1, 5:] = 0
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class Suite(models.ModelTesterMixin, training.TrainingTesterMixin):
    """Their tests over the model and its heads."""

    fields: dict[str, Any]
    all_model_classes = (GMLPModel, GMLPForMaskedLM, GMLPForSequenceClassification, GMLPForQuestionAnswering)
    test_can_init_all_missing_weights_before_2023 = True
    model_tester = None

    def setUp(self) -> None:
        self.model_tester = Small(self.fields)
        self.has_attentions = self.fields.keys() & {"tiny_attention_dim", "mixer"} != set()
        # Learned ones; there is no other table of positions.
        self.test_resize_position_embeddings = self.model_tester.get_config().positions == "learned"

    def _get_trainable_model_class(self) -> type[GMLPForMaskedLM]:
        return GMLPForMaskedLM


for kind, fields in KINDS.items():
    globals()[f"Test{kind}"] = type(f"Test{kind}", (Suite, unittest.TestCase), {"fields": fields})
