"""Image generation by GANs."""

from tokenmix.lab.registry import TASKS, TaskEntry

TASKS.register(
    TaskEntry(
        name="image-generation",
        about="images of a class from noise, by a GAN; Fréchet distance",
        task="tokenmix.lab.tasks.generation.task:ImageGeneration",
        options="tokenmix.lab.tasks.generation.options:GenerationOptions",
        optim="tokenmix.lab.tasks.generation.options:AdversarialOptim",
        defaults={"model": "eagan_nano", "data": "fashion-mnist"},
    ),
)
