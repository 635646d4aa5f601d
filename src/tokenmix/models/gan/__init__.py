"""Generative adversarial networks with the attention block passed in: SAGAN, EAGAN, and neither."""

from tokenmix.models.gan.gan import GAN
from tokenmix.models.gan.presets import GANS, create_gan, list_gans

__all__ = ["GAN", "GANS", "create_gan", "list_gans"]
