"""A researcher's mixer, in a package outside the repository, in every verb by module:Class and by a registered name."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

import tokenmix
from runs import Killed, stopped_at
from tokenmix.errors import UserError
from tokenmix.lab.cli import main
from tokenmix.layers import create_mixer
from tokenmix.profiling.target import mixer_with_input
from tokenmix.testing.doctor import doctor
from verbs import printed, refused

PACKAGE = '''
import torch
from torch import nn

import tokenmix
from tokenmix.layers import Capabilities, Mixer


class Shift(Mixer):
    """The token before, through a linear layer; it has no map, and no arguments for device and type."""

    capabilities = Capabilities(map=None, mask=False, equivariant=False, linear=True, causal=False)

    def __init__(self, dim):
        super().__init__()
        self.dim, self.value = dim, nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        return self.value(x.roll(1, dims=1))

    def macs(self, num_tokens):
        return num_tokens * self.dim**2


class Mean(Shift):
    """The mean of all tokens, with its map."""

    capabilities = Capabilities(map="tokens", mask=False)

    def forward(self, x, mask=None):
        return self.attention_map(x)[:, 0] @ self.value(x)

    def attention_map(self, x, mask=None):
        return x.new_full((len(x), 1, x.shape[1], x.shape[1]), 1 / x.shape[1])

    def macs(self, num_tokens):
        return num_tokens * self.dim**2 + num_tokens**2 * self.dim


class Narrowless(Shift):
    def __init__(self, dim):
        super().__init__(dim)
        del self.dim


class Uncounted(Shift):
    macs = Mixer.macs


class Countless(Shift):
    def macs(self, num_tokens):
        return None


class Unmapped(Shift):
    capabilities = Capabilities(map="tokens", mask=False)


class Pooled(Shift):
    def forward(self, x, mask=None):
        return self.value(x).mean(1, keepdim=True)


class Pair(Shift):
    def forward(self, x, mask=None):
        return self.value(x), mask


class Maskless(Shift):
    def forward(self, x):
        return self.value(x)


class Wide(Shift):
    def forward(self, x, mask=None):
        return self.value(x.repeat(1, 1, 2))


class Unbuilt(Shift):
    def __init__(self, dim, window):
        super().__init__(dim)


class Raising(Shift):
    def __init__(self, dim):
        raise KeyError("window")


class Open(Shift):
    def __init__(self, dim, **options):
        super().__init__(dim)
        self.options = options


class Stated(Shift):
    capabilities = {"map": None}


tokenmix.register_mixer("mean", Mean)
'''
TINY = [
    "--data",
    "digits",
    "--max-steps",
    "2",
    "--batch-size",
    "16",
    "--limit",
    "64",
    "--limit-eval",
    "16",
    "--device",
    "cpu",
    "--threads",
    "1",
]
NARROW = ["depth=2", "embed_dim=16", "num_heads=2"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_names: None) -> Iterator[Path]:
    (tmp_path / "toy_layers").mkdir()
    (tmp_path / "toy_layers" / "__init__.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("toy_layers", None)


@pytest.mark.parametrize("mixer", ["toy_layers:Shift", "mean"])
def test_it_is_trained_swapped_in_and_looked_into(package: Path, capsys, mixer: str) -> None:
    first = ["--import", "toy_layers"] if mixer == "mean" else []
    Image.new("L", (8, 8), 90).save("grey.png")
    words = ["train", "image-classification", "--model", "mixer_nano", *TINY, "--model-kwargs", *NARROW]
    printed(capsys, *first, *words, f"mixer={mixer}", "--out", "own")
    assert 0 <= json.loads(printed(capsys, *first, "eval", "own", "--json"))["accuracy"] <= 1
    if mixer == "mean":
        printed(capsys, *first, "inspect", "own", "grey.png", "--out", "maps")
        assert [b["kind"] for b in json.loads(Path("maps/numbers.json").read_text())["blocks"]] == ["tokens", "tokens"]
    else:
        assert "no token mixer with a map" in refused(capsys, "inspect", "own", "grey.png", "--out", "maps")
    printed(capsys, *first, *words, "mixer=self", "--out", "plain")
    report = json.loads(printed(capsys, *first, "swap", "plain", "--to", mixer, "--json"))
    assert [row["macs_after"] for row in report["rows"]] == [create_mixer(mixer, 16).macs(16)] * 2
    assert printed(capsys, *first, "swap", "vit_nano", "--to", mixer)
    start = ["train", "image-classification", *TINY, "--init-from", "plain", "--out", "swapped"]
    printed(capsys, *first, *start, "--swap", mixer, "--swap-where", "blocks.1.*")
    assert len(json.loads(printed(capsys, *first, "predict", "swapped", "grey.png", "--json"))) == 1


def test_a_run_does_not_continue_with_other_code(package: Path, capsys) -> None:
    words = ["train", "image-classification", "--model", "mixer_nano", *TINY, "--checkpoint-every", "1", "--out", "own"]
    with stopped_at(2), pytest.raises(Killed):
        main([*words, "--model-kwargs", *NARROW, "mixer=toy_layers:Shift"])
    (package / "toy_layers" / "__init__.py").write_text(PACKAGE.replace("x.roll(1", "x.roll(2"))
    resume = ["--import", "toy_layers", "train", "--resume", "own"]
    assert "the module toy_layers changed since" in refused(capsys, *resume)
    (package / "toy_layers" / "__init__.py").write_text(PACKAGE)
    printed(capsys, *resume)


@pytest.mark.slow
def test_it_is_compared(package: Path, capsys) -> None:
    printed(capsys, "compare", "--mixers", "self,toy_layers:Shift,toy_layers:Mean", *TINY, "--out", "out")
    results = json.loads(Path("out/results.json").read_text())
    assert [v["name"] for v in results["variants"]] == ["self", "toy_layers:Shift", "toy_layers:Mean", "identity"]
    assert all(run["status"] == "finished" for variant in results["variants"] for run in variant["runs"])


def test_the_doctor_skips_the_map_that_it_does_not_have(package: Path) -> None:
    only = {"shape", "map-shape", "map-rows", "map-used", "macs"}
    report = doctor("toy_layers:Shift", only=only)
    assert {v.property: v.detail for v in report.verdicts if v.status == "skipped"} == dict.fromkeys(
        ("map-shape", "map-rows", "map-used"), "its capabilities say map=None"
    )
    assert set(report.named("pass")) == {"shape", "macs"}
    assert set(doctor("mean", only=only).named("pass")) == only
    assert tokenmix.list_mixers()[-1] == "mean"


def test_a_missing_method_is_named(package: Path, capsys) -> None:
    found = {v.property: v.detail for v in doctor("toy_layers:Uncounted", only={"macs", "shape"}).verdicts}
    assert found["macs"] == "MissingMethod: Uncounted has no method macs(num_tokens); write it"
    found = {v.property: v.detail for v in doctor("toy_layers:Unmapped", only={"map-shape"}).verdicts}
    assert "Unmapped has no method attention_map(x, mask=None); write it, or state map=None" in found["map-shape"]
    with pytest.raises(UserError, match="Shift has no map"):
        create_mixer("toy_layers:Shift", 8).attention_map(torch.zeros(1, 4, 8))
    words = ["train", "image-classification", "--model", "mixer_nano", *TINY, "--out", "own", "--model-kwargs", *NARROW]
    assert "Uncounted has no method macs(num_tokens)" in refused(capsys, *words, "mixer=toy_layers:Uncounted")
    assert not Path("own").exists()


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        ("Pooled", "Pooled turns (2, 16, 16) into (2, 1, 16); return a tensor of the shape"),
        ("Pair", "Pair turns (2, 16, 16) into tuple"),
        (
            "Maskless",
            "forward of 'toy_layers:Maskless' cannot be called with x and mask; write forward(self, x, mask=None)",
        ),
        ("Wide", "does not run with Wide: RuntimeError: mat1 and mat2"),
        ("Narrowless", "has no self.dim; set self.dim = dim in its constructor"),
        ("Unmapped", "Unmapped has no method attention_map(x, mask=None)"),
        ("Uncounted", "Uncounted has no method macs(num_tokens)"),
        ("Countless", "macs of Countless returned None; return a whole number"),
        ("Unbuilt", "cannot be built with these arguments: TypeError: Unbuilt.__init__() missing 1 required"),
        ("Raising", "cannot be built with these arguments: KeyError: 'window'"),
        ("Stated", "is not a mixer: derive its class from tokenmix.layers.Mixer and state its capabilities"),
    ],
)
def test_a_mistake_is_one_line_before_any_training(package: Path, capsys, mixer: str, message: str) -> None:
    words = ["train", "image-classification", "--model", "mixer_nano", *TINY, "--out", "own", "--model-kwargs", *NARROW]
    assert message in refused(capsys, *words, f"mixer=toy_layers:{mixer}")
    compared = ["compare", "--mixers", f"self,toy_layers:{mixer}", *TINY, "--model-kwargs", "depth=2", "embed_dim=16"]
    assert message in refused(capsys, *compared, "--out", "out")
    assert not list(Path().glob("*/*.json"))
    # Of other shapes and widths there.
    message = message.partition(" (2, 16, 16)")[0].removesuffix("mat1 and mat2")
    assert message in refused(capsys, "swap", "vit_nano", "--to", f"toy_layers:{mixer}")
    assert message in refused(capsys, "cost", f"toy_layers:{mixer}", "--tokens", "16", "--dim", "16")


def test_arguments_of_any_name_and_costs_in_half_precision(package: Path) -> None:
    assert create_mixer("toy_layers:Open", 8, window=3).options == {"window": 3}
    built = create_mixer("toy_layers:Shift", 8, device="meta", dtype=torch.float64)
    assert built.value.weight.is_meta
    assert built.value.weight.dtype == torch.float64
    with pytest.raises(UserError, match="has no argument 'window'; it takes none but dim"):
        create_mixer("toy_layers:Shift", 8, window=3)
    target = mixer_with_input("toy_layers:Shift", 8, 4, device="cpu", dtype=torch.bfloat16)
    assert target.forward().dtype == torch.bfloat16


def test_a_file_that_names_it_does_not_import_it(package: Path, capsys) -> None:
    words = ["train", "image-classification", "--model", "mixer_nano", *TINY, "--model-kwargs", *NARROW]
    printed(capsys, *words, "mixer=toy_layers:Shift", "--out", "own")
    Path("own.toml").write_text('model = "mixer_nano"\nmodel_kwargs = {mixer = "toy_layers:Shift"}\n')
    reading = (
        ["eval", "own"],
        ["train", "image-classification", "--recipe", "own.toml"],
        ["swap", "own", "--to", "self"],
    )
    for verb in reading:
        module = sys.modules.pop("toy_layers")
        assert "names code, toy_layers:Shift, which is not imported" in refused(capsys, *verb)
        assert "toy_layers" not in sys.modules
        sys.modules["toy_layers"] = module
    printed(capsys, "eval", "own")


def test_in_the_current_folder(package: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is searched, as for `python -m`."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(package))])
    report = json.loads(printed(capsys, "swap", "vit_nano", "--to", "toy_layers:Shift", "--json"))
    assert report["mixer"] == "toy_layers:Shift"
