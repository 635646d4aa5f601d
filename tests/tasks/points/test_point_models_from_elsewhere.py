"""Point networks of a user's function: trained, compared, opened again; mistakes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_point_tasks import config, written

import tokenmix
from tokenmix.errors import UserError
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.run import evaluate, predict, train
from tokenmix.models.foreign import create_foreign_points
from tokenmix.trust import typed


@pytest.fixture(autouse=True)
def _made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "plugins")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("clouds"), 12, 6)


def theirs(folder: Path, out: Path, name: str, **changes: Any) -> Any:
    task = "point-segmentation" if name == "Parts" else "point-classification"
    return config(folder, task, out, model=f"toy_points:{name}", model_kwargs={}, **changes)


@pytest.mark.parametrize("name", ["Attending", "Masked", "Parts"])
def test_a_model_trains_and_opens_again(name: str, folder: Path, tmp_path: Path) -> None:
    with typed(f"toy_points:{name}"):
        run = train(theirs(folder, tmp_path / "run", name), quiet=True)
    tokenmix.registry.load_plugin("toy_points")
    metrics = evaluate(run)
    assert metrics["samples"] == 12
    assert "embed.weight" in load_task(run).model.state_dict() or name == "Parts"
    answer = predict(run, [folder / "test/ball/0.npz"])[0]
    assert answer["file"].endswith("0.npz")


def test_a_network_without_batch_norm_trains_on_one_cloud_at_a_time(folder: Path, tmp_path: Path) -> None:
    with typed("toy_points:Attending"):
        train(theirs(folder, tmp_path / "run", "Attending", batch_size=1, max_steps=2), quiet=True)


def test_attention_is_swapped_and_blocks_are_inserted(folder: Path, tmp_path: Path) -> None:
    shared: dict[str, Any] = {
        "data": f"clouds:{folder}",
        "num_points": 48,
        "epochs": 1,
        "batch_size": 6,
        "device": "cpu",
        "threads": 1,
        "jobs": 1,
        "mixers": ["external"],
        "quiet": True,
    }
    swapped = tokenmix.compare(
        task="point-classification", model="toy_points:Attending", out=tmp_path / "swap", **shared
    )
    macs = {variant.name: variant.macs for variant in swapped.results.variants}
    assert 0 < macs["identity"] < macs["external"]  # type: ignore[operator]
    inserted = tokenmix.compare(
        task="point-segmentation", model="toy_points:Parts", insert_after="mix", out=tmp_path / "insert", **shared
    )
    assert {variant.name for variant in inserted.results.variants} >= {"external", "none"}


def test_without_a_mask_points_are_repeated() -> None:
    with typed("toy_points:Parts"):
        model = create_foreign_points(
            "toy_points:Parts",
            in_chans=3,
            num_points=8,
            outputs={"num_classes": 3, "num_categories": 2},
            per_point=True,
        ).eval()
    points, mask = torch.randn(2, 8, 3), torch.arange(8) < torch.tensor([[8], [3]])
    category = torch.tensor([0, 1])
    found = model(points, category, mask)
    torch.testing.assert_close(found[0], model(points[:1], category[:1], None)[0])
    torch.testing.assert_close(found[1, :3], model(points[1:, :3], category[1:], None)[0])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("toy_points:Transposed", r"does not run on points \(2, 48, 3\)"),
        ("toy_points:Parts", "does not run on points|return logits|not logits|fails with"),
        ("torchvision:resnet18", "is a model of images"),
    ],
)
def test_mistakes_are_one_line(name: str, said: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said), typed(name):
        train(config(folder, "point-classification", tmp_path / "run", model=name, model_kwargs={}), quiet=True)
    assert not (tmp_path / "run").exists()
