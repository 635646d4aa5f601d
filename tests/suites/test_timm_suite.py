"""timm's own tests of models, from its source distribution, over every image classifier of ours."""

import importlib.util
from typing import Any

import pytest
import timm
from source_distributions import unpacked

import tokenmix.register  # noqa: F401
from tokenmix import list_models

pytestmark = pytest.mark.slow

OURS = set(list_models(task="image-classification"))
FILE = unpacked("timm") / "tests" / "test_models.py"
OF_TOKENS = ("amlp_*", "eamlp_*", "lavit_*")
# Pattern of a test's name: why it cannot hold of ours.
EXPECTED: dict[str, str] = {
    "test_model_default_cfgs_non_std*eamlp_*": "the stem unfolds pixels: there is no first convolution to name",
    "test_model_default_cfgs[[]*eanet_*": "a linear head without pooling is refused when made, not when called",
    "test_model_forward_torchscript*": "no TorchScript, which torch.export replaces: docs/guides/export.md",
    "test_model_forward_fx_torchscript*": "what torch.fx takes as one call, a mixer, is none of TorchScript's",
}


def ours(of: Any) -> Any:
    """timm's list of names with ours alone, of whichever modules; none whose weights it would fetch.

    Its lists of patterns for models of tokens know some of our names (`gmlp_*`), and are reported the others.
    """

    def listed(filter: Any = "", *, module: Any = "", pretrained: bool = False, **kwargs: Any) -> list[str]:
        excluded = list(kwargs.pop("exclude_filters", []))
        filter, excluded = (
            [*patterns, *OF_TOKENS] if "vit_*" in patterns else patterns for patterns in (filter, excluded)
        )
        names = of(filter, exclude_filters=excluded, **kwargs)
        return [] if pretrained else [name for name in names if name.split(".")[0] in OURS]

    return listed


with pytest.MonkeyPatch.context() as patch:
    patch.setattr(timm, "list_models", ours(timm.list_models))
    spec = importlib.util.spec_from_file_location("timms_test_models", FILE)
    assert spec is not None
    assert spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)


def over_ours(test: Any) -> bool:
    """Whether the test runs over names of models that were listed, and not over some of timm's."""
    names = [mark.args[1] for mark in getattr(test, "pytestmark", []) if mark.args[:1] == ("model_name",)]
    return any(given and all(name in NAMES for name in given) for given in names)


NAMES = {*theirs.list_models(), *theirs.list_models(include_tags=True)}
assert NAMES >= OURS, "timm does not list our models"
cfg_device = theirs.cfg_device
globals().update({name: test for name, test in vars(theirs).items() if name.startswith("test_") and over_ours(test)})
