"""timm's own tests of models, from its source distribution, over every image classifier of ours."""

import importlib.util
from typing import Any

import pytest
import timm
from source_distributions import unpacked

from tokenmix import list_models

pytestmark = pytest.mark.slow

OURS = set(list_models(task="image-classification"))
FILE = unpacked("timm") / "tests" / "test_models.py"
# Pattern of a test's name: why it cannot hold of ours.
EXPECTED: dict[str, str] = {
    "test_model_forward_torchscript*": "no TorchScript, which torch.export replaces: docs/guides/numerics.md",
    "test_model_forward_fx_torchscript*": "what torch.fx takes as one call, a mixer, is none of TorchScript's",
}


def ours(of: Any) -> Any:
    """timm's list of names with ours alone, of whichever modules; none whose weights it would fetch."""

    def listed(*args: Any, module: Any = "", pretrained: bool = False, **kwargs: Any) -> list[str]:
        return [] if pretrained else [name for name in of(*args, **kwargs) if name.split(".")[0] in OURS]

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


NAMES = {name for name in timm.list_models(include_tags=True) if name.split(".")[0] in OURS} | OURS
cfg_device = theirs.cfg_device
globals().update({name: test for name, test in vars(theirs).items() if name.startswith("test_") and over_ours(test)})
