"""Image generation by GANs."""

from tokenmix.registry import TASKS, TaskEntry
from tokenmix.tasks.generation import presets

__all__ = ["presets"]

TASKS.register(
    TaskEntry(
        name="image-generation",
        about="images of a class from noise, by a GAN; Fréchet distance",
        task="tokenmix.tasks.generation.task:ImageGeneration",
        options="tokenmix.tasks.generation.options:GenerationOptions",
        optim="tokenmix.tasks.generation.options:AdversarialOptim",
        defaults={"model": "eagan_nano", "data": "fashion-mnist"},
    ),
)
