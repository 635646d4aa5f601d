"""Generative adversarial networks with the attention block passed in: SAGAN, EAGAN, and neither."""

from tokenmix.models.generation.gan import GAN, create_gan

__all__ = ["GAN", "create_gan"]
