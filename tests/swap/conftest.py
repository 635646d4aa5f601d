"""Tiny models of every library, and an input for each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.models import VisionTransformer as TorchvisionViT

import tokenmix


class Subject(NamedTuple):
    """A model, what goes in, and how many tokens its attention sees."""

    model: nn.Module
    x: Tensor
    num_tokens: int
    known: dict[str, Any]

    def logits(self) -> Tensor:
        """Output of the model as one tensor."""
        out = self.model(self.x)
        return out if isinstance(out, Tensor) else out.logits


def timm_vit(**kwargs: Any) -> VisionTransformer:
    """16 tokens of width 32, and a class token unless overridden."""
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    return VisionTransformer(**{**size, **kwargs})


def _timm() -> Subject:
    return Subject(timm_vit(), torch.randn(4, 3, 16, 16), 17, {})


def _timm_registers() -> Subject:
    return Subject(timm_vit(reg_tokens=2, qkv_bias=False), torch.randn(4, 3, 16, 16), 19, {})


def _torchvision() -> Subject:
    model = TorchvisionViT(16, 4, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # type: ignore[union-attr, arg-type]
    return Subject(model, torch.randn(4, 3, 16, 16), 17, {})


def _transformers() -> Subject:
    transformers = pytest.importorskip("transformers", reason="transformers is optional and not installed")
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    return Subject(transformers.ViTForImageClassification(config), torch.randn(4, 3, 16, 16), 17, {})


def _encoder(*, batch_first: bool) -> Subject:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
    x = torch.randn(4, 9, 32) if batch_first else torch.randn(9, 4, 32)
    return Subject(model, x, 9, {"example_inputs": (x[:1] if batch_first else x[:, :1],)})


def _ours() -> Subject:
    return Subject(tokenmix.create_model("vit_nano", img_size=16), torch.randn(4, 3, 16, 16), 64, {})


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "timm": _timm,
    "timm-registers": _timm_registers,
    "torchvision": _torchvision,
    "transformers": _transformers,
    "encoder": lambda: _encoder(batch_first=True),
    "encoder-seq-first": lambda: _encoder(batch_first=False),
    "tokenmix": _ours,
}


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    """One model of each library."""
    torch.manual_seed(0)
    made = SUBJECTS[request.param]()
    made.model.eval()
    return made


@pytest.fixture
def make() -> Callable[..., Any]:
    """timm's ViT with arguments of one's own."""
    torch.manual_seed(0)
    return timm_vit
