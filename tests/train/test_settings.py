"""Settings of one task: what fits is taken, what does not is one line."""

from dataclasses import dataclass
from typing import Literal

import pytest

from tokenmix.errors import UserError
from tokenmix.train.settings import NoSettings, make_settings


@dataclass(frozen=True)
class Some:
    crop: int | None = None
    rate: float = 0.5
    scales: tuple[float, ...] = (1.0,)
    form: Literal["hinge", "wasserstein"] = "hinge"
    flip: bool = False


def test_values_are_taken_by_name_and_fitted_to_their_type() -> None:
    made = make_settings(Some, {"crop": 513, "rate": 2, "scales": [1, 0.5], "form": "wasserstein", "flip": True}, "t")
    assert made == Some(513, 2.0, (1.0, 0.5), "wasserstein", True)
    assert isinstance(made.rate, float)
    assert make_settings(Some, {"scales": 2, "crop": None}, "t") == Some(None, scales=(2.0,))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"crops": 1}, "unknown setting of t 'crops'.*crop"),
        ({"crop": 1.5}, "t: crop=1.5 must be int"),
        ({"crop": True}, "crop=True must be int"),
        ({"flip": 1}, "flip=1 must be bool"),
        ({"scales": ("a",)}, "scales=.* must be float"),
        ({"form": "other"}, "give one of hinge, wasserstein"),
    ],
)
def test_what_does_not_fit_is_named(given: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_settings(Some, given, "t")


def test_a_task_without_settings_says_so() -> None:
    assert make_settings(NoSettings, {}, "t") == NoSettings()
    with pytest.raises(UserError, match="no settings"):
        make_settings(NoSettings, {"a": 1}, "t")
