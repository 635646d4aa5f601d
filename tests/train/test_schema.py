"""Options: what fits is taken, what does not is one line, whichever way it comes in."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from tokenmix.errors import UserError
from tokenmix.lab.registry import list_tasks
from tokenmix.lab.train.config import default_config
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.schema import BaseConfig, Range, Section
from tokenmix.lab.train.sources import load_recipe, make_config


@dataclass(frozen=True, kw_only=True)
class Some(Section):
    crop: Annotated[int | None, Range(least=1)] = None
    rate: Annotated[float, Range(above=0)] = 0.5
    share: Annotated[float, Range(least=0, below=1)] = 0.0
    scales: Annotated[tuple[float, ...], Range(above=0)] = (1.0,)
    form: Literal["none", "hinge"] = "hinge"
    flip: bool = False
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Whole(BaseConfig):
    some: Some = Some()
    name: str = "x"


def test_values_are_fitted_to_their_type() -> None:
    made = Some(rate=2, scales=[1, 0.5], folder="a", crop="none", form="none")  # type: ignore[arg-type]
    assert made == Some(rate=2.0, scales=(1.0, 0.5), folder=Path("a"), crop=None, form="none")
    assert isinstance(made.rate, float)
    assert Some(scales=2).scales == (2.0,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"crop": 1.5}, "crop=1.5 must be a whole number"),
        ({"crop": True}, "crop=True must be a whole number"),
        ({"crop": 0}, "crop must be at least 1, or none; got 0"),
        ({"rate": "fast"}, "rate='fast' must be a number"),
        ({"rate": True}, "rate=True must be a number"),
        ({"rate": 0}, "rate must be a positive number, got 0.0"),
        ({"rate": float("nan")}, "rate must be a finite number, got nan"),
        ({"rate": float("inf")}, "rate must be a finite number, got inf"),
        ({"share": 1.0}, r"share must be in \[0, 1\), got 1.0"),
        ({"flip": 1}, "flip=1 must be true or false"),
        ({"scales": ("a",)}, "scales='a' must be a number"),
        ({"scales": (1, -1)}, "scales must be a positive number, got -1.0"),
        ({"form": "other"}, "form='other' is not valid; give one of none, hinge"),
        ({"folder": 3}, "folder=3 must be a path"),
        ({"crops": 1}, "unknown option 'crops'; did you mean crop"),
        ({"some": {"crops": 1}}, "unknown option 'crops'; did you mean crop"),
    ],
)
def test_what_does_not_fit_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Whole().replace(**given)


def test_leaves_by_name_and_by_part_are_the_same() -> None:
    assert Whole().replace(crop=3, name="y") == Whole().replace(some={"crop": 3}, name="y")
    assert Whole().replace(crop=3).flat() == {**Whole().flat(), "crop": 3}


@pytest.mark.parametrize("task", list_tasks())
def test_the_names_of_a_tasks_options_are_unique_and_each_is_explained(task: str) -> None:
    config = default_config(task)
    parts = [getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "task"]
    names = [field.name for part in parts for field in dataclasses.fields(part)]
    assert len(names) == len(set(names))
    assert make_config(**dataclasses.asdict(config)) == config, "the nested form is read as well"


def test_a_task_refuses_what_it_does_not_have() -> None:
    assert make_config("semantic-segmentation", crop=513).options.crop == (513,)
    with pytest.raises(UserError, match="image-generation 'lr'; did you mean lr_"):
        make_config("image-generation", lr=0.1)
    with pytest.raises(UserError, match="masked-lm has no option mixup, which is one of image-classification"):
        make_config("masked-lm", mixup=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = 'fast'", "mine.toml: lr='fast' must be a number"),
        ("clip_grad = true", "mine.toml: clip_grad=True must be a number"),
        (f"lr = 1{'0' * 400}", "mine.toml: lr=10*0 must be a number"),
        ("[optim]\nlrr = 1", "mine.toml: unknown option of image-classification 'lrr'; did you mean lr"),
        ("task = 3", "mine.toml is damaged"),
    ],
)
def test_a_recipe_is_checked_like_the_command_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_recipe(str(tmp_path / "mine"))
    assert "\n" not in str(caught.value)


def test_none_in_a_recipe_is_no_value_unless_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('clip_grad = "none"\naugment = "none"\n')
    config = load_recipe(str(tmp_path / "mine"))
    assert (config.optim.clip_grad, config.options.augment) == (None, "none")


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ("{", "config.json is damaged"),
        ("[]", "config.json is damaged"),
        ("{}", "config.json is damaged"),
        (json.dumps({"config": {"task": "detection", "optim": {"lrr": 1}}}), "config.json: unknown option .*'lrr'"),
        (json.dumps({"config": {"task": "detection", "optim": {"lr": "x"}}}), "config.json: lr='x' must be a number"),
        (
            json.dumps({"config": {"task": "detektion"}}),
            "config.json: unknown task 'detektion'; did you mean detection",
        ),
    ],
)
def test_a_damaged_config_is_one_line(tmp_path: Path, saved: str, message: str) -> None:
    (tmp_path / "config.json").write_text(saved)
    with pytest.raises(UserError, match=message) as caught:
        RunFolder(tmp_path).config  # noqa: B018
    assert "\n" not in str(caught.value)
