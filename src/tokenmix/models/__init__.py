"""Models: one skeleton per family with its mixer passed in, registered with timm under our names."""

from tokenmix.models import mixer_net as _mixer_net  # noqa: F401  (importing a family registers its presets)
from tokenmix.models.isotropic import BlockMap, IsotropicNet, MixerBlock
from tokenmix.models.mixer_net import MixerNet
from tokenmix.models.registry import create_model, list_models

__all__ = ["BlockMap", "IsotropicNet", "MixerBlock", "MixerNet", "create_model", "list_models"]
