"""Generative adversarial networks with the attention block passed in: SAGAN, EAGAN, and neither."""

from tokenmix.tasks.generation.models.builder import create_gan
from tokenmix.tasks.generation.models.gan import GAN

__all__ = ["GAN", "create_gan"]
