"""Functions and constructors have few parameters, and a network's own numbers are flat arguments all the same."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest
import timm

import tokenmix
from tokenmix import UserError
from tokenmix.models import GMLP, Architecture, GMLPArchitecture
from tokenmix.models.architecture import flat_arguments, make_network

SOURCE = Path(__file__).parents[1] / "src" / "tokenmix"
MOST = 12


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    named = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [*named, *(one.arg for one in (given.vararg, given.kwarg) if one is not None)]


def too_wide(source: str) -> list[str]:
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [f.name for f in functions if len([p for p in parameters(f) if p not in ("self", "cls")]) > MOST]


def test_the_rule_counts_every_kind_of_parameter() -> None:
    twelve = "a, b, /, c, d, e, f, g, h, *rest, i, j, **more"
    assert too_wide(f"class A:\n    def __init__(self, {twelve}): ...") == []
    assert too_wide(f"class A:\n    def __init__(self, z, {twelve}): ...") == ["__init__"]


def test_no_signature_is_wide() -> None:
    # A Triton kernel takes pointers, strides and sizes as scalars, and so do the device functions that it calls.
    files = [path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE / "kernels"]
    found = {(path.relative_to(SOURCE).as_posix(), name) for path in files for name in too_wide(path.read_text())}
    assert found == set()


@dataclass(frozen=True, kw_only=True)
class Numbers(Architecture):
    depth: int
    width: int = 8


def build(numbers: Numbers, *, num_classes: int = 10) -> tuple[Numbers, int]:
    return numbers, num_classes


def test_fields_are_arguments_beside_the_parameters() -> None:
    assert make_network(build, depth=2, num_classes=3) == (Numbers(depth=2), 3)
    assert set(flat_arguments(build)) == {"depth", "width", "num_classes"}
    assert flat_arguments(build)["width"] == 8
    with pytest.raises(TypeError, match="unexpected keyword argument 'height'"):
        make_network(build, depth=2, height=3)


def test_by_name_as_from_an_architecture() -> None:
    given = {"depth": 2, "embed_dim": 16}
    direct = GMLP(GMLPArchitecture(**given), img_size=32, num_classes=3, device="meta")
    shapes = {key: value.shape for key, value in direct.state_dict().items()}
    for create in (tokenmix.create_model, timm.create_model):
        named = create("gmlp_tiny", img_size=32, num_classes=3, device="meta", **given)
        assert {key: value.shape for key, value in named.state_dict().items()} == shapes


def test_an_unknown_argument_is_named_with_those_that_exist() -> None:
    with pytest.raises(UserError, match=r"has no argument 'wide'; it takes attention_dim, .*depth, .*num_classes"):
        tokenmix.create_model("gmlp_tiny", wide=1)
    with pytest.raises(UserError, match="has no argument 'architecture'"):
        tokenmix.create_model("gmlp_tiny", architecture=GMLPArchitecture())
