"""Semantic segmentation from the data to the files that it writes, on small scenes whose classes are their colours."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor
from torch import nn

from predictions import check_predictions
from tokenmix.errors import UserError
from tokenmix.lab.compare.baselines import fit_baselines
from tokenmix.lab.data.scenes import Scene, SceneData, Scenes
from tokenmix.lab.inspect import inspect
from tokenmix.lab.tasks.segmentation import task as inference
from tokenmix.lab.tasks.segmentation import task as semantic_segmentation
from tokenmix.lab.train import trainer
from tokenmix.lab.train.checkpoint import read_weights
from tokenmix.lab.train.export import export
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.run import evaluate, predict, train
from tokenmix.lab.train.sources import make_config

NAMES = ["water", "wood", "sand"]
COLOURS = torch.tensor([[30, 60, 200], [20, 140, 40], [230, 200, 120]], dtype=torch.uint8)
IGNORE = 255
MEAN, STD = (0.4, 0.5, 0.5), (0.3, 0.3, 0.3)


class Fields(Scenes):
    """Two fields side by side, of sizes that differ; a strip of pixels at the top is of no class."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"field {index}"

    def scene(self, index: int) -> Scene:
        draw = np.random.default_rng([self.seed, index])
        height, width = 24 + 4 * (index % 2), 32
        classes = torch.full((height, width), int(draw.integers(3)))
        classes[:, int(draw.integers(8, 24)) :] = int(draw.integers(3))
        image = COLOURS[classes].permute(2, 0, 1).int() + torch.from_numpy(draw.integers(-20, 20, (3, height, width)))
        classes[:2] = IGNORE
        return Scene(image.clamp(0, 255).byte(), self.name(index), classes)


class Unlabelled(Fields):
    """The same without any class."""

    def scene(self, index: int) -> Scene:
        scene = super().scene(index)
        assert scene.classes is not None
        return dataclasses.replace(scene, classes=torch.full_like(scene.classes, IGNORE))


def fields(spec: str, **_: object) -> SceneData:
    return SceneData(
        spec=spec,
        train=Fields(16, 0),
        test=Fields(5, 1),
        classes=NAMES,
        ignore=IGNORE,
        palette=[tuple(colour) for colour in COLOURS.tolist()],
        mean=MEAN,
        std=STD,
        crop=(24, 24),
        source="made here",
    )


T8 = {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}
CONFIG = make_config(
    task="semantic-segmentation",
    data="fields",
    model="eanet_seg_nano",
    batch_size=4,
    epochs=4,
    lr=1e-2,
    threads=1,
    device="cpu",
    log_every=4,
    checkpoint_every=3,
    model_kwargs={"backbone": "resnet18", "backbone_kwargs": T8, "width": 16, "head_width": 16, "num_slots": 8},
)


@pytest.fixture(autouse=True)
def _data(monkeypatch):
    monkeypatch.setattr(semantic_segmentation, "load_scenes", fields)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(semantic_segmentation, "load_scenes", fields)
        return train(CONFIG.replace(out=tmp_path_factory.mktemp("seg") / "run"), quiet=True)


@pytest.fixture
def pictures(tmp_path):
    files = [tmp_path / "small.png", tmp_path / "large.png"]
    for file, size in zip(files, ((17, 23), (61, 50)), strict=True):
        classes = torch.zeros(size, dtype=torch.long)
        classes[:, size[1] // 2 :] = 2
        Image.fromarray(COLOURS[classes].numpy()).save(file)
    return files


def test_learns_and_evaluates_again_the_same(run):
    result = json.loads((run / "result.json").read_text())
    # One class everywhere has a mean IoU of a third at most.
    assert result["metrics"]["miou"] > 0.6
    assert list(result["metrics"]["class_iou"]) == json.loads((run / "data.json").read_text())["classes"]
    assert "class_iou" not in (run / "metrics.csv").read_text().splitlines()[0]
    again = evaluate(run, device="cpu")
    for name in ("miou", "accuracy", "loss"):
        assert again[name] == pytest.approx(result["metrics"][name], abs=1e-6)
    assert again["samples"] == 5


def test_a_forest_on_colours_is_a_control(run):
    task = load_task(run)
    data = type(task).load_data(task.config, like=task.data)
    scores = fit_baselines(task, data)
    assert list(scores) == ["majority", "random forest"]
    assert scores["majority"] < 0.5
    assert scores["random forest"] > 0.9, "colours tell the classes, but for the noise"
    # Ignored pixels are neither learned nor counted.
    counts = task.plain_answers(data)["random forest"]["counts"]
    assert (counts[:, 1].sum(1) < 60_000).all()


def test_settings_may_differ_for_an_evaluation(run):
    whole = evaluate(run, device="cpu")
    sliding = evaluate(run, device="cpu", options={"way": "sliding", "window": 16, "stride": 8})
    several = evaluate(run, device="cpu", options={"scales": (1, 1.5), "mirror": "yes"})
    assert len({whole["loss"], sliding["loss"], several["loss"]}) == 3
    assert min(sliding["miou"], several["miou"]) > 0.5
    with pytest.raises(UserError, match=r"option of evaluating a run of .* 'windo'; did you mean window"):
        evaluate(run, options={"windo": 16})
    with pytest.raises(UserError, match="leaves gaps"):
        evaluate(run, options={"way": "sliding", "window": 16, "stride": 17})


def test_stopped_and_resumed_is_bit_equal(run, tmp_path, monkeypatch):
    step = trainer.TrainingLoop.start_batch

    def killed(self, *args):
        if self.progress.step == 10:
            raise KeyError("killed")
        step(self, *args)

    again = tmp_path / "again"
    with monkeypatch.context() as patch:
        patch.setattr(trainer.TrainingLoop, "start_batch", killed)
        with pytest.raises(KeyError):
            train(CONFIG.replace(out=again), quiet=True)
    train(make_config(resume=again), quiet=True)
    weights, expected = (read_weights(folder / "checkpoints" / "last") for folder in (again, run))
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


def test_answers_for_images_of_any_size(run, pictures):
    small, large = predict(run, pictures)
    assert (small["size"], large["size"]) == ([17, 23], [61, 50])
    assert sum(large["shares"].values()) == pytest.approx(1, abs=1e-5)
    assert large["shares"]["water"] + large["shares"]["sand"] > 0.9


def test_files_that_a_prediction_writes(run, pictures, tmp_path):
    mask_of = pytest.importorskip("pycocotools.mask")
    out = tmp_path / "answers"
    answers = predict(run, pictures, out)
    told = json.loads((out / "large.json").read_text())
    assert told["shares"] == answers[1]["shares"]
    mask = Image.open(out / "large-mask.png")
    classes = np.asarray(mask)
    assert mask.mode == "P"
    assert np.array_equal(np.asarray(mask.convert("RGB")), COLOURS.numpy()[classes])
    assert set(told["colors"]) == set(told["shares"])
    for entry in told["masks"]:
        assert ImageColor.getrgb(told["colors"][entry["category"]]) == tuple(COLOURS[entry["category_id"]].tolist())
        assert np.array_equal(mask_of.decode(entry["segmentation"]) == 1, classes == entry["category_id"])
        assert entry["area"] / classes.size == pytest.approx(told["shares"][entry["category"]], abs=1e-5)
    assert Image.open(out / "large-overlay.png").size == (50, 61)
    with pytest.raises(UserError, match=r"small\.png and .*small\.png have the same name"):
        predict(run, [pictures[0], pictures[0]], out)


class ByColour(nn.Module):
    """Logits of each pixel by how near its colour is to those of the classes."""

    def forward(self, images):
        colours = (COLOURS / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
        return -(images[:, None] - colours[..., None, None]).square().sum(2)


WAYS = [{}, {"way": "sliding", "window": 16}, {"scales": (1, 1.5), "mirror": "yes"}]


@pytest.mark.parametrize("options", WAYS)
def test_tiles_and_windows_are_put_where_they_were(run, tmp_path, monkeypatch, options):
    """A segmenter that needs no neighbours answers in tiles as it does for the whole."""
    known = property(lambda task: inference.ForeignSegmenter(ByColour(), len(NAMES), tuple(task.data["img_size"])))
    monkeypatch.setattr(semantic_segmentation.SemanticSegmentation, "segmenter", known)
    classes, sure = np.zeros((61, 50), dtype=np.uint8), np.ones((61, 50), dtype=bool)
    classes[30:, :25], classes[:30, 25:] = 1, 2
    # Resizing mixes the colours of neighbours.
    sure[28:32] = sure[:, 23:27] = False
    Image.fromarray(COLOURS.numpy()[classes]).save(tmp_path / "large.png")
    for name, limits in {"whole": inference.WHOLE, "tiled": (600, 10_000)}.items():
        monkeypatch.setattr(inference, "WHOLE", limits)
        monkeypatch.setattr(inference, "TILE", 576)
        predict(run, [tmp_path / "large.png"], tmp_path / name, options=options)
        found = np.asarray(Image.open(tmp_path / name / "large-mask.png"))
        assert np.array_equal(found[sure], classes[sure])
        assert evaluate(run, device="cpu", options=options)["miou"] > 0.8


@pytest.mark.parametrize("options", WAYS)
def test_large_images_are_answered_in_tiles(run, pictures, tmp_path, monkeypatch, options):
    (whole,) = predict(run, pictures[1:], options=options)
    monkeypatch.setattr(inference, "WHOLE", (1000, 10_000))
    monkeypatch.setattr(inference, "TILE", 576)
    seen = []
    original = inference.pixel_logits
    looked = lambda model, images, *more: seen.append(images.shape[2:]) or original(model, images, *more)  # noqa: E731
    monkeypatch.setattr(semantic_segmentation, "pixel_logits", looked)
    (tiled,) = predict(run, pictures[1:], tmp_path / "tiled", options=options)
    assert len(seen) > 4
    assert max(shape.numel() for shape in seen) <= 576
    assert tiled["size"] == whole["size"]
    picture, mask = Image.open(pictures[1]), Image.open(tmp_path / "tiled" / "large-mask.png")
    blended = Image.blend(picture, mask.convert("RGB"), semantic_segmentation.VEIL)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "tiled" / "large-overlay.png")), np.asarray(blended))
    seen.clear()
    evaluate(run, device="cpu", options=options)
    assert max(shape.numel() for shape in seen) <= 1000


def test_a_grey_picture_is_answered(run, tmp_path):
    Image.new("L", (30, 20), 90).save(tmp_path / "grey.png")
    predict(run, [tmp_path / "grey.png"], tmp_path / "out")
    assert Image.open(tmp_path / "out" / "grey-overlay.png").mode == "RGB"


def test_training_images_of_one_class_are_named(tmp_path, monkeypatch, capsys):
    def alone(spec, **_):
        data = fields(spec)
        shown = [i for i in range(16) if len(set(data.train.scene(i).classes.unique().tolist()) - {IGNORE}) == 1]
        return dataclasses.replace(data, train=data.train.subset(torch.tensor(shown[:1])))

    monkeypatch.setattr(semantic_segmentation, "load_scenes", alone)
    train(CONFIG.replace(out=tmp_path / "run", epochs=1, batch_size=1, validation=0), quiet=True)
    assert "the training images of fields show no class but" in capsys.readouterr().err


def test_inspect_lays_slots_over_the_image(run, pictures, tmp_path):
    out = inspect(run, pictures[1]).write(tmp_path / "maps")
    told = json.loads((out / "numbers.json").read_text())
    assert [block["kind"] for block in told["blocks"]] == ["slots"]
    assert sum(told["answer"]["shares"].values()) == pytest.approx(1, abs=1e-5)
    assert (out / "block-00.png").stat().st_size > 5000
    # All of the image, not the crop of training: so its shares are those that `predict` tells.
    (answer,) = predict(run, pictures[1:])
    assert told["answer"]["shares"] == pytest.approx(answer["shares"], abs=1e-3)


def test_nothing_to_measure(run, monkeypatch):
    def unlabelled(spec, **_):
        return dataclasses.replace(fields(spec), test=Unlabelled(3, 1))

    monkeypatch.setattr(semantic_segmentation, "load_scenes", unlabelled)
    with pytest.raises(UserError, match="every pixel of the test images of 'fields' has the ignored class 255"):
        evaluate(run, device="cpu")


def test_nothing_to_learn(tmp_path, monkeypatch):
    """With the loss of no pixel at 0, training would end without a word."""

    def unlabelled(spec, **_):
        return dataclasses.replace(fields(spec), train=Unlabelled(3, 0))

    monkeypatch.setattr(semantic_segmentation, "load_scenes", unlabelled)
    with pytest.raises(UserError, match=r"every pixel of the training images of 'fields' .* nothing can be learned"):
        train(CONFIG.replace(limit=2, out=tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_exports(run, tmp_path):
    pytest.importorskip("onnxruntime")
    assert export(run, "onnx", tmp_path / "model.onnx").stat().st_size > 10_000
    program = torch.export.load(export(run, "torch-export", tmp_path / "model.pt2"))
    logits = program.module()(torch.zeros(3, 3, 24, 24))
    assert logits.shape == (3, 3, 24, 24)


def test_starts_from_another_run_with_other_classes(run, tmp_path, monkeypatch, capsys):
    wider = dataclasses.replace(
        fields("fields"), classes=[*NAMES, "snow"], palette=[*map(tuple, COLOURS.tolist()), (1, 1, 1)]
    )
    monkeypatch.setattr(semantic_segmentation, "load_scenes", lambda *_, **__: wider)
    second = train(CONFIG.replace(max_steps=1, init_from=run, lr=1e-9, out=tmp_path / "second"), quiet=True)
    assert "the head starts fresh" in capsys.readouterr().err
    before, after = read_weights(run), read_weights(second)
    assert torch.allclose(before["reduce.0.weight"], after["reduce.0.weight"], atol=1e-6)
    assert after["classifier.weight"].shape[0] == 4
    with pytest.raises(UserError, match=r"has the classes water, wood, sand, .* the run was trained on"):
        evaluate(run)


def test_biases_have_a_rate_of_their_own(run):
    config = CONFIG.replace(opt="momentum", weight_decay=1e-4, bias_lr=2.0)
    task = load_task(run)
    description = task.data
    task = type(task)(task.model, config, description)
    task.total_steps = 10
    groups = task.configure_optimizers()["optimizer"].param_groups
    weights, norms, biases = groups
    assert [group["weight_decay"] for group in groups] == [1e-4, 0.0, 0.0]
    assert biases["initial_lr"] == 2 * weights["initial_lr"] == 2 * norms["initial_lr"]
    total = sum(p.numel() for group in groups for p in group["params"])
    assert total == sum(p.numel() for p in task.model.parameters())
    assert all(p.dim() > 1 for p in weights["params"])
    name, table = next((name, p) for name, p in task.model.named_parameters() if p.dim() > 1)
    task.model.no_weight_decay = lambda: {name}
    decays = {id(p): group["weight_decay"] for group in task.parameter_groups() for p in group["params"]}
    assert decays[id(table)] == 0
    del task.model.no_weight_decay


def test_the_validation_images_are_a_tenth_of_the_images_used(monkeypatch):
    many = dataclasses.replace(fields("fields"), train=Fields(200, 0))
    monkeypatch.setattr(semantic_segmentation, "load_scenes", lambda *_, **__: many)
    for limit, validation in [(None, 20), (8, 0), (150, 15)]:
        data = semantic_segmentation.SemanticSegmentation.load_data(CONFIG.replace(limit=limit))
        assert len(data.validation or ()) == validation


def test_ignored_pixels_are_not_learnt(run):
    task = load_task(run)
    batch = {"image": torch.randn(2, 3, 24, 24), "classes": torch.randint(3, (2, 24, 24))}
    batch["classes"][:, 12:] = IGNORE
    loss, _ = task.loss(batch)
    logits = task.model(batch["image"]).permute(0, 2, 3, 1)[:, :12].flatten(0, 2)
    expected = torch.nn.functional.cross_entropy(logits, batch["classes"][:, :12].flatten())
    assert torch.allclose(loss, expected, atol=1e-5)
    batch["classes"][:] = IGNORE
    assert task.loss(batch)[0] == 0


def test_a_backbone_of_one_size_is_evaluated_in_windows(tmp_path, pictures):
    kwargs = {"backbone": "lavit_nano", "width": 8, "head_width": 8}
    config = CONFIG.replace(model="fpn_seg_nano", model_kwargs=kwargs, max_steps=1, out=tmp_path / "run")
    run = train(config, quiet=True)
    assert 0 <= evaluate(run, device="cpu")["miou"] <= 1
    assert predict(run, pictures)[1]["size"] == [61, 50]
    with pytest.raises(UserError, match="takes images of 24 x 24 only"):
        predict(run, pictures, options={"way": "whole"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gmlp_nano"}, "gmlp_nano is a model of image-classification.*eanet_seg_nano"),
        ({"img_size": 64}, "has no option img_size, which is one of image-classification"),
        ({"augment": "rand-m9"}, "augment='rand-m9' is not valid; give one of none, light"),
        ({"mixup": 0.2}, "has no option mixup, which is one of image-classification"),
        ({"crop": "x"}, "crop='x' must be a whole number"),
        ({"crop": (1, 2, 3)}, "crop must be a side"),
        ({"scales": 0.0}, "scales must be a positive number, got 0.0"),
        ({"way": "both"}, "give one of auto, whole, sliding"),
        ({"test_batch": 0}, "test_batch must be at least 1, got 0"),
        ({"crops": 0}, "crops must be at least 1, got 0"),
        ({"iou_loss": -1.0}, "iou_loss must be at least 0, got -1.0"),
        ({"bias_lr": float("inf")}, "bias_lr must be a finite number, got inf"),
        ({"window": (1, 2, 3)}, "window must be a side"),
        ({"chunk_size": -1}, "chunk_size must be at least 0, got -1"),
        ({"model_kwargs": {"num_classes": 3}}, "set elsewhere"),
        ({"model_kwargs": {"slots": 3}}, "has no argument 'slots'"),
    ],
)
def test_mistakes(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(CONFIG.replace(out=tmp_path / "run", **changes), quiet=True)
    assert not (tmp_path / "run").exists()


def test_too_few_values_for_batch_norm_are_one_line(tmp_path):
    config = CONFIG.replace(model="fpn_seg_nano", crop=32, batch_size=1, max_steps=1, out=tmp_path / "run")
    with pytest.raises(UserError, match="BatchNorm needs more than one value per channel in training; raise --batch-"):
        train(config.replace(model_kwargs={}), quiet=True)


def test_a_file_that_is_no_image(run, tmp_path):
    file = tmp_path / "torn.png"
    file.write_bytes(b"\x89PNG")
    with pytest.raises(UserError, match=r"torn\.png .*give a readable PNG"):
        predict(run, [file])


def test_an_epoch_takes_several_crops_of_an_image() -> None:
    config = CONFIG.replace(crops=3, crop=16)
    data = semantic_segmentation.SemanticSegmentation.load_data(config)
    assert (len(data.train), len(data.test)) == (48, 5)
    first, again = (data.train.read(torch.tensor([6, 8]), 0)["image"] for _ in range(2))
    assert torch.equal(first, again)
    # Of one image, at different places.
    assert not torch.equal(first[0], first[1])


def test_a_limit_beside_several_crops_keeps_images_of_all_places() -> None:
    config = CONFIG.replace(limit=8, augment="none", crops=8)
    data = semantic_segmentation.SemanticSegmentation.load_data(config)
    images = data.train.read(torch.arange(8), 0)["image"]
    assert len(torch.unique(images.flatten(1), dim=0)) == 8


def test_the_soft_iou_is_learnt_beside_the_entropy() -> None:
    config = CONFIG.replace(iou_loss=2.0)
    task = semantic_segmentation.SemanticSegmentation
    data = task.load_data(config)
    batch = data.train.read(torch.arange(4), 0)
    model = task.build_model(config, data.describe()).eval()
    total, parts = task(model, config, data.describe()).loss(batch)
    torch.testing.assert_close(total, parts["cross_entropy"] + 2 * parts["iou_loss"])
    assert 0 < parts["iou_loss"] < 1


def test_a_run_with_an_inserted_block(run, pictures, tmp_path):
    block = {"insert": "external", "insert_after": "backbone.layer3", "insert_kwargs": {"num_slots": 4}}
    start = CONFIG.replace(**block, init_from=run, train_only="mixers", out=tmp_path / "run", epochs=1)
    inserted = train(start, quiet=True)
    before, after = read_weights(run), read_weights(inserted)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(".layer3.inserted." in name for name in after.keys() - before.keys())
    result = json.loads((inserted / "result.json").read_text())
    assert evaluate(inserted, device="cpu")["loss"] == pytest.approx(result["metrics"]["loss"], abs=1e-6)
    assert len(predict(inserted, pictures)) == 2
    assert export(inserted, "onnx", tmp_path / "model.onnx").is_file()


def test_predictions_are_kept(run):
    check_predictions(run, {"miou", "accuracy", "loss"})
