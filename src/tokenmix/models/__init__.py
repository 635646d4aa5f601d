"""Models: one class per family, with the mixer as an argument. Importing this registers the classifiers with timm."""

from tokenmix.errors import needs

with needs("tokenmix.models"):
    from tokenmix.models.eamlp import EAMLP
    from tokenmix.models.eanet import EANet
    from tokenmix.models.gmlp import GMLP
    from tokenmix.models.interface import BlockMap
    from tokenmix.models.isotropic import IsotropicNet, MixerBlock
    from tokenmix.models.lavit import LaViT
    from tokenmix.models.mixer_net import MixerNet
    from tokenmix.models.registry import create_model, register_with_timm
    from tokenmix.registry import MODELS, list_models

__all__ = [
    "EAMLP",
    "GMLP",
    "BlockMap",
    "EANet",
    "IsotropicNet",
    "LaViT",
    "MixerBlock",
    "MixerNet",
    "create_model",
    "list_models",
    "register_with_timm",
]

for entry in MODELS:
    register_with_timm(entry)
