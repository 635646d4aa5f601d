"""Random erasing as a function of (seed, epoch, index of the image) alone."""

from timm.data.random_erasing import RandomErasing
from torch import Tensor

from tokenmix.data.images.augment import hash_indices
from tokenmix.data.seeded import restored_random_state, seed_all
from tokenmix.errors import UserError

__all__ = ["Erase"]

PURPOSE = 2


class Erase:
    """timm's random erasing: with probability `reprob` a box of an image becomes normal noise.

    Paper: Random Erasing Data Augmentation, arXiv:1708.04896. The box has 2 % to a third of the image.
    """

    def __init__(self, reprob: float, seed: int) -> None:
        if not 0 <= reprob <= 1:
            raise UserError(f"reprob is a probability in [0, 1], got {reprob}")
        self.seed, self.erase = seed, RandomErasing(reprob, mode="pixel", device="cpu")

    def __call__(self, images: Tensor, epoch: int, indices: Tensor) -> None:
        """Erase in normalised images (B, C, H, W), in place."""
        with restored_random_state():
            for image, bits in zip(images, hash_indices(self.seed, epoch, indices, PURPOSE)):
                seed_all(int(bits))
                self.erase(image)
