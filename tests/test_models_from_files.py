"""A model that a file describes is built from that file's own folder: no connection, no other file, no code."""

import ast
import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertModel

from tokenmix.errors import UserError
from tokenmix.lab.swapping import open_folder
from tokenmix.lab.tasks.classification.task import ImageClassification
from tokenmix.lab.tasks.foreign import build_theirs
from tokenmix.lab.tasks.text.tokenizer import save_tokenizer, train_tokenizer
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.load import load_run, make_model
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import make_config
from tokenmix.layers.local import IdentityMixer
from tokenmix.trust import typed
from verbs import refused

EVIL = """
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

open({mark!r}, "w")


class C(BertConfig):
    model_type = "evil"


class M(BertModel):
    config_class = C


class T(PreTrainedTokenizerFast):
    pass
"""
CODE = {"AutoConfig": "evil.C", "AutoModel": "evil.M", "AutoBackbone": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
DATA = {"classes": ["a", "b"], "channels": 3, "img_size": [32, 32], "mean": [0.5] * 3, "std": [0.5] * 3}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A connection fails the test, questions are answered with yes, and no module evil is imported."""

    def forbidden(event: str) -> Callable[..., None]:
        def connect(*args: Any, **_: Any) -> None:
            sys.audit(event, *args)  # as the replaced function does
            pytest.fail(f"{event} {args[0]}")

        return connect

    monkeypatch.setattr("_socket.getaddrinfo", forbidden("socket.getaddrinfo"))
    monkeypatch.setattr(socket.socket, "connect", forbidden("socket.connect"))
    monkeypatch.setattr("builtins.input", lambda *_: sys.audit("builtins.input", "") or "yes")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    # transformers copies a folder's code there.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.chdir(tmp_path)
    Path("ld").mkdir()
    Path("ld/config.json").write_text(json.dumps({"architecture": "resnet10t", "num_classes": 2, "pretrained_cfg": {}}))
    Path("ld/evil.py").write_text(EVIL.format(mark=str(tmp_path / "MARK")))
    save_file({"a": torch.zeros(1)}, "w.safetensors")
    yield
    assert not Path("MARK").exists()
    assert not [name for name in sys.modules if name.rpartition(".")[2] == "evil"]


@pytest.mark.parametrize(
    ("auto", "architecture"),
    [
        ("ImageClassification", {"model_type": "timm_wrapper", "architecture": "hf-hub:me/net"}),
        ("ImageClassification", {"model_type": "timm_wrapper", "architecture": "local-dir:ld"}),
        pytest.param(
            "ImageClassification",
            {"model_type": "timm_wrapper", "architecture": "local-dir:/proc/self/cwd/ld"},
            marks=pytest.mark.skipif(sys.platform != "linux", reason="no /proc"),
        ),
        (
            "ImageClassification",
            {
                "model_type": "timm_wrapper",
                "architecture": "resnet10t",
                "model_args": {"checkpoint_path": "w.safetensors"},
            },
        ),
        ("SemanticSegmentation", {"model_type": "upernet", "backbone": "me/net", "use_pretrained_backbone": True}),
        ("SemanticSegmentation", {"model_type": "dpt", "backbone": "resnet50", "is_hybrid": True}),
        (
            "SemanticSegmentation",
            {"model_type": "upernet", "backbone_config": {"model_type": "timm_backbone", "backbone": "local-dir:ld"}},
        ),
    ],
)
def test_an_architecture_names_no_source(auto: str, architecture: dict[str, Any]) -> None:
    config = make_config(model="transformers:theirs")
    with pytest.raises(UserError, match=r"(file|model) names a "):
        build_theirs(config, {**DATA, "architecture": architecture}, f"AutoModelFor{auto}")


@pytest.mark.parametrize("mapped", ["evil.M", "ld--evil.M", "me/net--evil.M"])
def test_an_architecture_names_no_code(mapped: str) -> None:
    auto = "AutoModelForSequenceClassification"
    architecture = {"model_type": "bert", **SMALL, "auto_map": {auto: mapped}, "name_or_path": "ld"}
    model = build_theirs(make_config(model="transformers:theirs"), {**DATA, "architecture": architecture}, auto)
    assert type(model).__module__.startswith("transformers.models.bert")


@pytest.mark.parametrize("mapped", ["evil.M", "ld--evil.M", "me/net--evil.M"])
def test_a_nested_architecture_names_no_code(mapped: str) -> None:
    backbone = {"model_type": "bert", **SMALL, "auto_map": {"AutoBackbone": mapped}, "_name_or_path": "ld"}
    architecture = {"model_type": "upernet", "backbone_config": backbone}
    with pytest.raises(UserError, match="cannot be built by transformers"):
        build_theirs(
            make_config(model="transformers:theirs"),
            {**DATA, "architecture": architecture},
            "AutoModelForSemanticSegmentation",
        )


def test_a_class_may_have_the_name_of_a_file() -> None:
    Path("a").touch()
    data = {**DATA, "architecture": {"model_type": "vit", **SMALL}}
    assert isinstance(build_theirs(make_config(), data, "AutoModelForImageClassification"), nn.Module)


@pytest.mark.parametrize("kind", ["evil", "swapped", "bert"])
def test_a_folder_names_no_code(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("theirs")
    save_tokenizer(train_tokenizer(["a small text"], vocab_size=300), folder)
    BertModel(BertConfig(**SMALL, vocab_size=300)).save_pretrained(folder)
    Path("ld/evil.py").rename(folder / "evil.py")
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text()) | {"auto_map": CODE}
        (folder / name).write_text(json.dumps(values | ({"model_type": kind} if name == "config.json" else {})))
    if kind == "bert":
        assert all(type(part).__module__.startswith("transformers.") for part in open_folder(folder))
    else:
        assert "theirs cannot be opened by transformers" in refused(capsys, "swap", "theirs", "--to", "external")


def test_a_run_opens_without_the_weights_that_it_started_with(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data": "digits", "limit": 16, "limit_eval": 16, "batch_size": 8, "max_steps": 1}
    model = "torchvision:shufflenet_v2_x0_5"
    run = train(make_config(model=model, out=tmp_path / "run", img_size=32, device="cpu", **settings), quiet=True)
    config = json.loads((run / "config.json").read_text())
    config["config"]["model"]["model_kwargs"] = {"weights": "DEFAULT"}
    (run / "config.json").write_text(json.dumps(config))
    assert isinstance(load_run(run)[0], nn.Module)


@pytest.mark.parametrize(
    ("model", "kwargs"),
    [
        ("torchvision:lraspp_mobilenet_v3_large", {"weights_backbone": "DEFAULT"}),
        ("torchvision:deeplabv3_mobilenet_v3_large", {"weights_backbone": "IMAGENET1K_V1"}),
        ("fpn_seg_resnet50", {"backbone": "resnet10t", "backbone_kwargs": {"pretrained": True}}),
    ],
)
def test_a_run_fetches_no_weights_for_a_backbone(model: str, kwargs: dict[str, Any]) -> None:
    config = make_config(task="semantic-segmentation", model=model, model_kwargs=kwargs)
    with pytest.raises(UserError, match=r"names a source: building it reads \S+\.\S+, which .*--model module:function"):
        make_model(config, DATA)


def own(num_classes: int, place: str) -> nn.Module:
    Path(place).read_text()
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))


def test_a_users_own_function_reads_what_it_likes() -> None:
    config = make_config(model=f"{__name__}:own", model_kwargs={"place": "ld/config.json"})
    with typed(config):
        assert isinstance(make_model(config, DATA), nn.Sequential)


class OwnTask(ImageClassification):
    @classmethod
    def build_model(cls, config: TrainConfig, data: Any) -> nn.Module:
        return own(len(data["classes"]), "ld/config.json")


def own_net(pretrained: bool = False, num_classes: int = 2, **_: Any) -> nn.Module:
    return own(num_classes, "ld/config.json")


class OwnMixer(IdentityMixer):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        Path("ld/config.json").read_text()


def test_a_users_own_mixer_reads_what_it_likes() -> None:
    config = make_config(model="mixer_nano", model_kwargs={"mixer": f"{__name__}:OwnMixer"})
    with typed(config):
        assert isinstance(make_model(config, DATA), nn.Module)


def test_a_users_own_task_and_own_model_of_timm_read_what_they_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timm.models._registry._model_entrypoints, "own_net", own_net)
    monkeypatch.setitem(timm.models._registry._model_to_module, "own_net", __name__)
    assert isinstance(make_model(make_config(model="own_net"), DATA), nn.Sequential)
    monkeypatch.setattr(TrainConfig, "task_class", OwnTask)
    assert isinstance(make_model(make_config(model="vit_nano"), DATA), nn.Sequential)


def test_every_call_of_transformers_refuses_code() -> None:
    calls = [
        call
        for file in (Path(__file__).parents[1] / "src").rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(call.func) != "nn.Embedding.from_pretrained"
    ]
    assert len(calls) == 2
    assert all("trust_remote_code=False" in ast.unparse(call) for call in calls)
