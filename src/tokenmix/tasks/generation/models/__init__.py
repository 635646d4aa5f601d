"""Generative adversarial networks with the attention block passed in: SAGAN, EAGAN, and neither."""

from tokenmix.tasks.generation.models.gan import GAN
from tokenmix.tasks.generation.models.presets import GANS, create_gan, list_gans

__all__ = ["GAN", "GANS", "create_gan", "list_gans"]
