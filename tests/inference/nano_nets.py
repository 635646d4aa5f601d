"""Nets of nano size with weights that hide nothing, and images for them."""

from typing import Any

import torch
from torch import Tensor, nn

import tokenmix

NANO = ("gmlp_nano", "amlp_nano", "eamlp_nano", "lavit_nano", "vit_nano", "t2t_vit_nano")


def nano_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = tokenmix.create_model(name, in_chans=1, num_classes=10, img_size=28).eval()
    for parameter in model.parameters():
        # Gates that start as the identity would hide a wrong product over tokens.
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model


def nano_images(count: int, size: int = 28) -> Tensor:
    return torch.randn(count, 1, size, size, generator=torch.Generator().manual_seed(1))


def to_int8(model: nn.Module, example: Any) -> Any:
    return tokenmix.optimize(model, example, dtype="int8", measure=False)
