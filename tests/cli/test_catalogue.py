"""What is written down of each model is what its name builds."""

from typing import Any

import pytest
import torch

from tokenmix.cli.catalogue import MODELS, Row
from tokenmix.cli.listing import count_parameters
from tokenmix.models.families import build_model, list_all_models, task_of
from tokenmix.text import GMLPModel, create_config, describe, list_configs


def test_every_model_is_in_it_in_order() -> None:
    assert [row.name for row in MODELS] == [*list_all_models(), *list_configs()]


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row.name)
def test_a_row_is_what_is_built(row: Row) -> None:
    if row.name in list_configs():
        told = describe(row.name)
        assert row == (row.name, "text", told["parameters"], told["mixer"])
    else:
        model: Any = build_model(row.name, device="meta")
        assert row == (row.name, task_of(row.name), count_parameters(model), model.mixer_name)


@pytest.mark.parametrize("name", [row.name for row in MODELS])
def test_built_on_a_default_device(name: str) -> None:
    with torch.device("meta"):
        model = GMLPModel(create_config(name)) if name in list_configs() else build_model(name)
    elsewhere = [key for key, tensor in [*model.named_parameters(), *model.named_buffers()] if not tensor.is_meta]
    assert elsewhere == []
