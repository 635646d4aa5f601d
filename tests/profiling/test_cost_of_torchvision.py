"""The cost of a model of torchvision, named as in `train` and `compare`."""

import pytest

from tokenmix.errors import UserError
from tokenmix.profiling.target import are_mixers, check_is_model, model_with_image


def test_a_classifier_of_torchvision_is_counted() -> None:
    assert not are_mixers({"torchvision:resnet18": "torchvision:resnet18"})
    assert model_with_image("torchvision:resnet18", 64, device="meta").counts()["parameters"] == 11_689_512


def test_what_is_no_classifier_is_one_line() -> None:
    with pytest.raises(UserError, match="did you mean resnet50"):
        check_is_model("torchvision:fcn_resnet50")
    with pytest.raises(UserError, match="'self' is a mixer and 'torchvision:resnet18' a model"):
        are_mixers({name: name for name in ("self", "torchvision:resnet18")})
