"""Models: one skeleton per family with its mixer passed in, registered with timm under our names."""

from tokenmix.models import mixer_net as _mixer_net  # noqa: F401  (importing a family registers its presets)
from tokenmix.models.mixer_net import MixerBlock, MixerNet
from tokenmix.models.registry import create_model, list_models

__all__ = ["MixerBlock", "MixerNet", "create_model", "list_models"]
