"""The cost of a model of torchvision, named as in `train` and `compare`."""

import pytest
import torch

from tokenmix.errors import UserError
from tokenmix.profiling.model_target import ModelTarget, check_is_model
from tokenmix.profiling.target import are_mixers


def test_a_classifier_of_torchvision_is_counted() -> None:
    assert not are_mixers(["torchvision:resnet18"])
    target = ModelTarget("torchvision:resnet18", torch.device("cpu"), torch.float32)
    assert target.default_sizes() == [224]
    assert sum(p.numel() for p in target.outline(64).module.parameters()) == 11_689_512


def test_what_is_no_classifier_is_one_line() -> None:
    with pytest.raises(UserError, match="did you mean resnet50"):
        check_is_model("torchvision:fcn_resnet50")
    with pytest.raises(UserError, match="'self' is a mixer and 'torchvision:resnet18' a model"):
        are_mixers(["self", "torchvision:resnet18"])
