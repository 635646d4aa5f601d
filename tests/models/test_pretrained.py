"""Weights of others: timm's hub, files in its form, and what is said where there are none."""

from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from huggingface_hub import constants
from torch import Tensor

from tokenmix import UserError, create_model, list_models
from tokenmix.checkpoints import rename
from tokenmix.models import registry as pretrained

IMAGES = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def peer() -> torch.nn.Module:
    """timm's gMLP with weights that all count."""
    torch.manual_seed(0)
    model = timm.create_model("gmlp_s16_224").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.fixture(scope="module")
def file(peer, tmp_path_factory) -> Path:
    """The file that the hub holds, of other numbers."""
    path = tmp_path_factory.mktemp("hub") / "model.safetensors"
    safetensors.torch.save_file(peer.state_dict(), path)
    return path


@torch.no_grad()
def logits(model, images: Tensor = IMAGES) -> Tensor:
    return model.eval()(images)


def test_a_file_in_the_hubs_form_gives_timms_logits(peer, file) -> None:
    ours = create_model("gmlp_small", pretrained=True, pretrained_cfg_overlay={"file": str(file)})
    assert torch.allclose(logits(ours), logits(peer), atol=1e-4)
    assert ours.pretrained_cfg["tag"] == "ra3_in1k"


def test_the_hubs_cache_is_used_without_a_network(peer, file, tmp_path, monkeypatch) -> None:
    revision = "0" * 40
    folder = tmp_path / "models--timm--gmlp_s16_224.ra3_in1k"
    (folder / "snapshots" / revision).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    (folder / "snapshots" / revision / "model.safetensors").symlink_to(file)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ours = timm.create_model("gmlp_small", pretrained=True, cache_dir=tmp_path)
    assert torch.allclose(logits(ours), logits(peer), atol=1e-4)


def test_offline_is_one_line_and_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        create_model("gmlp_small", pretrained=True, cache_dir=tmp_path)
    text = str(caught.value)
    assert "timm/gmlp_s16_224.ra3_in1k on huggingface.co, which cannot be reached" in text
    assert "pretrained_cfg_overlay={'file': FILE}" in text
    assert "\n" not in text


def test_a_backbone_that_cannot_be_fetched(monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(pretrained, "try_to_load_from_cache", lambda *args, **kwargs: None)
    with pytest.raises(UserError, match="weights of resnet50 are in timm/resnet50"):
        create_model("eanet_resnet50", pretrained_backbone=True)


def test_a_backbone_of_the_cache_starts_the_network(tmp_path, monkeypatch) -> None:
    backbone = timm.create_model("resnet18", num_classes=1000).eval()
    real = timm.create_model

    def from_file(name: str, **kwargs):
        safetensors.torch.save_file(backbone.state_dict(), tmp_path / "model.safetensors")
        return real(name, pretrained_cfg_overlay={"file": str(tmp_path / "model.safetensors")}, **kwargs)

    monkeypatch.setattr(pretrained, "try_to_load_from_cache", lambda *args, **kwargs: str(tmp_path))
    monkeypatch.setattr(timm, "create_model", from_file)
    from tokenmix.models import EANet

    images = IMAGES[..., :64, :64]
    model = EANet(backbone="resnet18", pretrained_backbone=True)
    assert torch.equal(logits(model, images), logits(backbone, images))


@pytest.mark.parametrize("name", [n for n in list_models(task="image-classification") if n != "gmlp_small"])
def test_the_others_say_that_there_are_none(name) -> None:
    with pytest.raises(UserError, match=f"{name} has no pretrained weights; .*--init-from FILE, in create_model"):
        create_model(name, pretrained=True)


def test_other_classes_channels_and_sizes(peer, file) -> None:
    torch.manual_seed(0)
    ours = create_model(
        "gmlp_small",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(file)},
        num_classes=7,
        in_chans=1,
        img_size=96,
    )
    assert logits(ours, IMAGES[:, :1, :96, :96]).shape == (1, 7)
    theirs = peer.state_dict()
    assert torch.equal(ours.blocks[3].mixer.proj_in.weight, theirs["blocks.3.mlp_channels.fc1.weight"])
    grey = theirs["stem.proj.weight"].sum(1, keepdim=True)
    assert torch.allclose(ours.stem.proj.weight, grey, atol=1e-5)
    gate, old = ours.blocks[3].mixer.gating.weight, theirs["blocks.3.mlp_channels.gate.proj.weight"]
    assert gate.shape == (36, 36)
    assert gate.mean().item() == pytest.approx(old.mean().item() * 196 / 36, abs=0.01)


def test_features_of_pretrained_weights(peer, file) -> None:
    ours = timm.create_model(
        "gmlp_small", pretrained=True, pretrained_cfg_overlay={"file": str(file)}, features_only=True, out_indices=(2,)
    )
    expected = peer.forward_intermediates(IMAGES, indices=[2], intermediates_only=True)
    assert torch.allclose(logits(ours)[0], expected[0], atol=1e-4)


def test_a_missing_or_broken_file_is_one_line(tmp_path) -> None:
    with pytest.raises(UserError, match="could not be read"):
        create_model("gmlp_nano", pretrained=True, pretrained_cfg_overlay={"file": str(tmp_path / "none.safetensors")})
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not a file of tensors")
    with pytest.raises(UserError, match="could not be read"):
        create_model("gmlp_nano", pretrained=True, pretrained_cfg_overlay={"file": str(broken)})


def test_layouts_are_told_apart(peer) -> None:
    ours = create_model("gmlp_small", device="meta")
    renamed = rename(peer.state_dict(), ours)
    assert renamed.keys() == ours.state_dict().keys()
    assert rename(renamed, ours).keys() == renamed.keys()
