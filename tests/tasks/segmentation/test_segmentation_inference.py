"""Looking at images of any size, and metrics of pixels, against plain computation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import jaccard_score

from tokenmix import create_model
from tokenmix.errors import UserError
from tokenmix.lab.tasks.segmentation import Inference
from tokenmix.lab.tasks.segmentation import task as inference
from tokenmix.lab.tasks.segmentation.task import SemanticSegmentation, pixel_logits
from tokenmix.lab.train.metrics import joined
from tokenmix.lab.train.sources import make_config
from tokenmix.layers import ExternalAttention2d
from tokenmix.profiling.machine import peak_memory

KWARGS = {
    "backbone": "resnet18",
    "backbone_kwargs": {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 8)},
    "width": 8,
    "head_width": 8,
    "num_classes": 3,
    "num_slots": 4,
    "img_size": 32,
}


class Pointwise(torch.nn.Module):
    """Logits of a pixel from that pixel alone: windows, mirrors and chunks must not change them."""

    fixed_size, num_classes, img_size = False, 3, (16, 16)
    context, feature_info = torch.nn.Identity(), ({"reduction": 1},)

    def forward(self, images):
        return images * torch.tensor([1.0, -2.0, 0.5]).view(1, 3, 1, 1)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return create_model("eanet_seg_nano", **KWARGS).eval()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 20), st.data())
def test_windows_cover_every_pixel(height, width, window, data):
    stride = data.draw(st.integers(1, window))
    images = torch.randn(1, 3, height, width)
    how = Inference(way="sliding", window=(window,), stride=(stride,))
    assert torch.allclose(pixel_logits(Pointwise(), images, how), Pointwise()(images), atol=1e-5)


def test_one_window_is_the_whole_image(model):
    images = torch.randn(2, 3, 32, 32)
    whole = pixel_logits(model, images, Inference(way="whole"))
    assert torch.allclose(whole, model(images), atol=1e-6)
    assert torch.allclose(pixel_logits(model, images, Inference(way="sliding")), whole, atol=1e-5)
    apart = pixel_logits(model, images, Inference(way="sliding", window=(16, 32)))
    assert not torch.allclose(apart, whole, atol=1e-3)


def test_chunks_change_nothing_but_memory(model):
    images = torch.randn(1, 3, 70, 45)
    whole = pixel_logits(model, images, Inference(chunk_size=0))
    calls = []
    model.context.register_forward_hook(lambda layer, *_: calls.append(layer.memory.options["chunk_size"]))
    assert torch.allclose(pixel_logits(model, images, Inference(chunk_size=20)), whole, atol=1e-4)
    pixel_logits(model, images, Inference(chunk_size=10_000))
    assert calls == [20, None]
    assert model.context.memory.options["chunk_size"] is None


def test_memory_of_attention_does_not_grow_with_the_image():
    beyond = {}
    for chunk_size in (None, 512):
        memory = ExternalAttention2d(512, chunk_size=chunk_size).eval().memory
        for places in (1024, 4096):
            x = torch.randn(1, 1, places, 512)
            with torch.no_grad():
                peak = peak_memory(lambda x=x, memory=memory: memory(x))
            beyond[chunk_size, places] = peak - x.nbytes
    assert beyond[512, 4096] == beyond[512, 1024]
    # All at once the map is written: 64 slots of float32 for each place.
    assert beyond[None, 4096] - beyond[None, 1024] >= 3072 * 64 * 4


def test_mirrored_looks_agree_with_their_mean(model):
    images = torch.randn(1, 3, 32, 32)
    both = pixel_logits(model, images, Inference(mirror="yes"))
    mean = (model(images).softmax(1) + model(images.flip(-1)).flip(-1).softmax(1)) / 2
    assert torch.allclose(both.exp(), mean, atol=1e-5)
    assert torch.allclose(both.flip(-1), pixel_logits(model, images.flip(-1), Inference(mirror="yes")), atol=1e-4)


def test_several_scales_are_probabilities_of_every_pixel(model):
    logits = pixel_logits(model, torch.randn(1, 3, 33, 50), Inference(scales=(0.5, 1.0, 1.75)))
    assert logits.shape == (1, 3, 33, 50)
    assert torch.allclose(logits.exp().sum(1), torch.ones(()), atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**16), st.integers(2, 5))
def test_metrics_against_plain_counting(seed, classes):
    torch.manual_seed(seed)
    logits = torch.randn(3, classes, 6, 7)
    truth = torch.randint(classes, (3, 6, 7))
    truth[torch.rand(3, 6, 7) < 0.3] = 255
    truth[0, 0, 0] = 0
    config, data = make_config("semantic-segmentation", data="toy"), {"classes": list(range(classes)), "ignore": 255}
    task = SemanticSegmentation(torch.nn.Identity(), config, data)
    rows = joined([task.judged(logits[i : i + 1], truth[i : i + 1], torch.tensor([i])) for i in range(3)])
    scores = {name: metric(rows) for name, metric in task.metrics.items()}
    kept = truth != 255
    answer, right = logits.argmax(1)[kept], truth[kept]
    present = sorted({*answer.tolist(), *right.tolist()})
    each = jaccard_score(right, answer, labels=present, average=None)
    assert scores["miou"] == pytest.approx(each.mean(), abs=1e-6)
    class_iou = torch.tensor(list(scores["class_iou"].values()))
    assert class_iou[present].numpy() == pytest.approx(each, abs=1e-6)
    assert (class_iou == -1).sum() == classes - len(present)
    assert scores["accuracy"] == pytest.approx((answer == right).float().mean().item(), abs=1e-6)
    expected = torch.nn.functional.cross_entropy(logits, truth, ignore_index=255)
    assert scores["loss"] == pytest.approx(expected.item(), abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 3))
def test_tiles_keep_every_pixel_once_and_see_it(height, width, classes):
    model = Pointwise()
    model.num_classes = classes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "WHOLE", (900, 3000))
        patch.setattr(inference, "TILE", 400)
        found = inference.tiles(model, (height, width), Inference())
    count = torch.zeros(height, width, dtype=torch.int64)
    for tile in found:
        count[tile.kept] += 1
        rows, columns = (part.stop - part.start for part in tile.seen)
        assert rows * columns <= 900
        for seen, kept, inner in zip(tile.seen, tile.kept, tile.inner):
            assert 0 <= inner.start < inner.stop == inner.start + kept.stop - kept.start <= seen.stop - seen.start
    assert (count == 1).all()
    assert (len(found) == 1) == (height * width <= min(900, 3000 // classes))


def test_tiles_hold_a_window_and_whole_is_whole(monkeypatch):
    monkeypatch.setattr(inference, "WHOLE", (900, 3000))
    monkeypatch.setattr(inference, "TILE", 400)
    found = inference.tiles(Pointwise(), (100, 100), Inference(way="sliding", window=(40, 50)))
    assert {tuple(part.stop - part.start for part in tile.seen) for tile in found} == {(40, 50)}
    assert len(inference.tiles(Pointwise(), (100, 100), Inference(way="whole"))) == 1
    monkeypatch.setattr(inference, "MOST_WHOLE", 9999)
    with pytest.raises(UserError, match="100 x 100 pixels at once are more than 9,999; omit way=whole"):
        inference.tiles(Pointwise(), (100, 100), Inference(way="whole"))
