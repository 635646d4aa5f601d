"""LaViT: the pyramid against plain equations, its scores and maps, other image sizes, training, one graph."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers.drop import DropPath

from tokenmix import UserError, create_model
from tokenmix.checkpoints import resize
from tokenmix.layers import AttentionResidual, LessAttention
from tokenmix.losses import diagonality_loss
from tokenmix.models.lavit import ReducedAttention
from tokenmix.ops import Scores, resize_score_transform


def nano(seed: int = 0, **kwargs):
    torch.manual_seed(seed)
    return create_model("lavit_nano", **kwargs)


def stirred(model, scale: float = 0.05):
    """Every weight moved, so that none is 0, 1 or the identity any more."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return model


def less_layers(model) -> list[LessAttention]:
    return [m for m in model.modules() if isinstance(m, LessAttention)]


def reference(state: dict[str, torch.Tensor], x: torch.Tensor, model) -> torch.Tensor:
    """The network in plain equations on dense maps, from a state dict; sides must divide."""
    scores = None
    for i, stage in enumerate(model.stages):
        key, spec, before = f"stages.{i}", stage.spec, x.shape[-2:]

        def norm(y, name, key=key):
            return F.layer_norm(y, y.shape[-1:], state[f"{key}.{name}.weight"], state[f"{key}.{name}.bias"])

        def linear(y, name, key=key):
            return F.linear(y, state[f"{key}.{name}.weight"], state[f"{key}.{name}.bias"])

        def heads(y, count=spec.num_heads):
            return y.unflatten(-1, (count, -1)).transpose(1, 2)

        x = F.conv2d(x, state[f"{key}.embed.weight"], state[f"{key}.embed.bias"], stride=stage.stride)
        grid, x = x.shape[-2:], x.flatten(2).mT
        x = norm(x, "norm") + state[f"{key}.pos_embed"]
        added = 0.0 if scores is None else bridge(state, f"{key}.residual", scores, before)
        for j in range(spec.depth):
            b = f"blocks.{j}"
            h = norm(x, f"{b}.norm1")
            if j >= spec.num_vanilla:
                psi, theta = state[f"{key}.{b}.mixer.psi"], state[f"{key}.{b}.mixer.theta"]
                first = scores @ theta.mT + state[f"{key}.{b}.mixer.theta_bias"]
                scores = (first.mT @ psi.mT + state[f"{key}.{b}.mixer.psi_bias"]).mT
                v = heads(linear(h, f"{b}.mixer.v"))
            else:
                if spec.key_reduction > 1:
                    q = linear(h, f"{b}.mixer.q")
                    image = h.mT.unflatten(2, grid)
                    weight, bias = state[f"{key}.{b}.mixer.reduce.weight"], state[f"{key}.{b}.mixer.reduce.bias"]
                    blocks = F.conv2d(image, weight, bias, stride=spec.key_reduction, groups=spec.dim)
                    k, v = linear(norm(blocks.flatten(2).mT, f"{b}.mixer.norm"), f"{b}.mixer.kv").chunk(2, -1)
                else:
                    q, k, v = linear(h, f"{b}.mixer.qkv").chunk(3, -1)
                q, k, v = heads(q), heads(k), heads(v)
                scores = q @ k.mT / q.shape[-1] ** 0.5 + added
                added = 0.0
            out = linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{b}.mixer.proj")
            x = x + state[f"{key}.{b}.scale1"] * out
            hidden = F.gelu(linear(norm(x, f"{b}.norm2"), f"{b}.mlp.0"))
            x = x + state[f"{key}.{b}.scale2"] * linear(hidden, f"{b}.mlp.2")
        x = x.mT.unflatten(2, grid)
    x = F.layer_norm(x.flatten(2).mT, x.shape[1:2], state["norm.weight"], state["norm.bias"])
    return F.linear(x.mean(1), state["head.weight"], state["head.bias"])


def bridge(state: dict[str, torch.Tensor], key: str, scores: torch.Tensor, grid) -> torch.Tensor:
    """The attention residual with its pooling as 2-d convolutions of the map, first over queries, then over keys."""
    batch, count, queries, keys = scores.shape
    maps = scores.permute(0, 3, 1, 2).reshape(batch * keys, count, *grid)
    maps = F.conv2d(maps, state[f"{key}.query_weight"][:, None], stride=2, groups=count)
    maps = maps.flatten(2).unflatten(0, (batch, keys)).permute(0, 2, 3, 1)
    if f"{key}.key_weight" in state:
        queries = maps.shape[2]
        maps = maps.permute(0, 2, 1, 3).reshape(batch * queries, count, *grid)
        maps = F.conv2d(maps, state[f"{key}.key_weight"][:, None], stride=2, groups=count)
        maps = maps.flatten(2).unflatten(0, (batch, queries)).permute(0, 2, 1, 3)
    maps = F.group_norm(maps, 1, state[f"{key}.norm_weight"], state[f"{key}.norm_bias"])
    out = F.conv2d(maps, state[f"{key}.head_weight"][:, :, None, None])
    return out * state[f"{key}.layer_scale"][:, None, None]


@pytest.mark.parametrize("num_vanilla", [(1, 1, 2, 1), (1, 1, 1, 1)])
def test_gives_what_the_equations_give(num_vanilla):
    model = stirred(nano(num_vanilla=num_vanilla, img_size=(32, 48), dtype=torch.float64)).eval()
    images = torch.randn(2, 3, 32, 48, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(model(images), reference(model.state_dict(), images, model), atol=1e-10)


@pytest.mark.parametrize("num_vanilla", [(1, 1, 2, 1), (1, 1, 1, 1)])
def test_dense_mode_equals_factored(num_vanilla):
    twins = [stirred(nano(num_vanilla=num_vanilla, less_mode=m, dtype=torch.float64)) for m in ("factored", "dense")]
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    logits, grads = [], []
    for model in twins:
        out = model(images)
        grads.append(torch.autograd.grad(out.square().sum(), [m.theta for m in less_layers(model)]))
        logits.append(out)
    assert torch.allclose(*logits, atol=1e-10)
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(*grads, strict=True))


def test_trains_on_one_batch():
    model, images, labels = nano(), torch.randn(8, 3, 32, 32), torch.arange(8) % 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_gradient_reaches_every_parameter():
    model = stirred(nano(dtype=torch.float64))
    model(torch.randn(4, 3, 32, 32, dtype=torch.float64)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    still = {name for name, p in model.named_parameters() if p.grad.abs().max() < 1e-13}
    # Both add one number to a whole row of scores, which the softmax takes out again. It counts where such scores are
    # passed on, to less-attention or to a next stage: those of stage 3's first block and of the last block are not.
    assert still == {"stages.2.residual.norm_bias", "stages.3.blocks.1.mixer.psi_bias"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_attention_residual_is_used(stage):
    model, images = nano().eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = model(images)
        model.stages[stage].residual.layer_scale.add_(1.0)
        assert (model(images) - before).abs().max() > 1e-5


def test_kept_keys_are_pooled_keys_of_blocks():
    """Keys of 2 x 2 blocks, written out for each token of the block and pooled again, are the keys themselves."""
    torch.manual_seed(0)
    kept, pooled = AttentionResidual(2, 3, keys="kept"), AttentionResidual(2, 3)
    state = kept.state_dict()
    pooled.load_state_dict({**state, "key_weight": pooled.key_weight.detach()})
    query, key, dense = torch.randn(2, 2, 24, 5), torch.randn(2, 2, 6, 5), torch.randn(2, 2, 24, 6)

    def spread(x):
        return x.unflatten(2, (2, 3)).repeat_interleave(2, 2).repeat_interleave(2, 3).flatten(2, 3)

    wide = Scores(query, spread(key), spread(dense.mT).mT)
    assert torch.allclose(kept(Scores(query, key, dense), (4, 6)), pooled(wide, (4, 6)), atol=1e-6)
    with pytest.raises(UserError, match="does not apply to keys"):
        kept(Scores(query, key), (4, 6), torch.ones(2, 24, dtype=torch.bool))
    with pytest.raises(UserError, match="give macs the S of num_keys"):
        kept.macs((4, 6), 5)


def test_reduced_attention_sees_whole_blocks():
    torch.manual_seed(0)
    layer = ReducedAttention(16, (5, 7), num_heads=2, reduction=2).eval()
    x = torch.randn(2, 35, 16)
    weights = layer.attention_map(x)
    assert weights.shape == (2, 2, 35, 12)
    assert torch.allclose(weights.sum(-1), torch.ones(()))
    image = F.pad(x.mT.unflatten(2, (5, 7)), (0, 1, 0, 1))
    means = layer.norm(F.avg_pool2d(image, 2).flatten(2).mT)
    value = layer.kv(means)[..., 16:].unflatten(2, (2, 8)).transpose(1, 2)
    assert torch.allclose(layer(x), layer.proj((weights @ value).transpose(1, 2).flatten(2)), atol=1e-5)


def test_scores_of_each_less_attention_layer_come_out():
    model, images = stirred(nano()).eval(), torch.randn(2, 3, 32, 32)
    logits, scores = model.forward_with_scores(images)
    assert torch.equal(logits, model(images))
    used = [m.map for m in model.attention_maps(images) if isinstance(model.get_submodule(m.name), LessAttention)]
    assert len(scores) == len(less_layers(model)) == len(used) == 3
    for made, weights in zip(scores, used, strict=True):
        assert torch.allclose(made.matrix().softmax(-1), weights, atol=1e-5)


def test_diagonality_loss_trains_theta_and_psi():
    model, images = stirred(nano()), torch.randn(2, 3, 32, 32)
    weights = [getattr(m, part) for m in less_layers(model) for part in ("theta", "psi", "theta_bias", "psi_bias")]
    optimizer, losses = torch.optim.Adam(weights, lr=1e-2), []
    for _ in range(5):
        _, scores = model.forward_with_scores(images)
        loss = torch.stack([diagonality_loss(s.matrix()) for s in scores]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(w.grad.abs().max() > 0 for w in weights)
    assert losses[-1] < 0.9 * losses[0]


def test_maps_of_every_block():
    model = stirred(nano(img_size=(28, 36))).eval()
    maps = model.attention_maps(torch.randn(2, 3, 28, 36))
    assert [m.grid for m in maps] == [(14, 18), (7, 9)] + [(4, 5)] * 4 + [(2, 3)] * 2
    assert [m.kind for m in maps] == ["slots"] * 2 + ["tokens"] * 6
    assert [m.map.shape[-1] for m in maps] == [20, 20, 20, 20, 20, 20, 6, 6]
    assert all(torch.allclose(m.map.sum(-1), torch.ones(()), atol=1e-5) for m in maps)


def waves(height: int, width: int) -> torch.Tensor:
    rows, columns = (torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width
    phase = torch.tensor([0.0, 1.0, 2.0])[:, None, None]
    return torch.sin(4 * rows[:, None] + 3 * columns + phase)[None]


def smooth(model):
    """Theta, Psi and positions that vary slowly over the grid, as an interpolation takes them to do."""
    for stage in model.stages:
        height, width = stage.grid
        rows, columns = torch.meshgrid(torch.arange(height) / height, torch.arange(width) / width, indexing="ij")
        places = torch.stack([rows, columns], -1).flatten(0, 1)
        kernel = torch.softmax(-torch.cdist(places, places).square() / 0.1, -1)
        for block in stage.blocks:
            if isinstance(block.mixer, LessAttention):
                block.mixer.theta.data.copy_(kernel)
                block.mixer.psi.data.copy_(kernel.mT)
        stage.pos_embed.data.copy_(torch.sin(places[:, :1] * 3 + places[:, 1:] * torch.linspace(0, 3, stage.spec.dim)))
    return model


def features(model) -> torch.Tensor:
    with torch.no_grad():
        return model.forward_head(model.forward_features(waves(*model.img_size)), pre_logits=True)


def change(after: torch.Tensor, before: torch.Tensor) -> float:
    return float((after - before).norm() / before.norm())


@pytest.mark.parametrize("size", [96, 80, (64, 96), (64, 50)])
def test_another_image_size(size):
    model = smooth(nano(img_size=64, layer_scale=1.0)).eval()
    other = copy.deepcopy(model)
    other.set_input_size(size)
    if all(side % 16 == 0 for side in other.img_size):  # else the last places are part padding
        # A patch of a larger image sees a shorter piece of the same wave: that much changes in any case.
        assert change(features(other), features(model)) < 0.1
    for stage, old in zip(other.stages, model.stages, strict=True):
        for block, before in zip(stage.blocks, old.blocks, strict=True):
            if isinstance(block.mixer, LessAttention):
                weight, bias = before.mixer.psi.detach(), before.mixer.psi_bias.detach()
                expected, _ = resize_score_transform(weight, bias, old.grid, stage.grid)
                assert torch.equal(block.mixer.psi, expected)
    other.set_input_size(64)
    assert change(features(other), features(model)) < 0.02


def test_positions_of_another_size_lie_where_they_lay():
    model, fresh = smooth(nano(img_size=64)), smooth(nano(img_size=(96, 64)))
    model.set_input_size((96, 64))
    for stage, expected in zip(model.stages, fresh.stages, strict=True):
        height, width = stage.grid
        # `smooth` puts its waves on the corners of places; an interpolation keeps their centres.
        inside = stage.pos_embed.unflatten(1, stage.grid)[:, 1:-1, 1:-1]
        wanted = expected.pos_embed.unflatten(1, expected.grid)[:, 1:-1, 1:-1]
        assert (inside - wanted).abs().max() < 3 / min(height, width)


@pytest.mark.parametrize("size", [28, (30, 45), 33, 64, (1, 7)])
def test_any_image_size(size):
    model = nano(img_size=size)
    height, width = model.img_size
    assert model(torch.randn(2, 3, height, width)).shape == (2, 10)
    assert model.grid_sizes == [(-(-height // s), -(-width // s)) for s in (2, 4, 8, 16)]
    assert model.grid_size == model.grid_sizes[-1]
    model.prune_intermediate_layers([0, 2])
    assert model.grid_size == model.grid_sizes[-1] == model.grid_sizes[2]
    assert len(model.feature_info) == 3


def test_training_goes_on_at_another_size():
    model = nano()
    model.stages[2].requires_grad_(False)
    model.set_input_size((32, 48))
    model(torch.randn(2, 3, 32, 48)).sum().backward()
    assert all((p.grad is None) == name.startswith("stages.2.") for name, p in model.named_parameters())


def test_a_checkpoint_of_another_size():
    state, model = stirred(nano(img_size=64)).state_dict(), nano(img_size=(48, 80))
    model.load_state_dict(resize(state, model))
    twin = nano(img_size=64)
    twin.load_state_dict(state)
    twin.set_input_size((48, 80))
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in model.state_dict().items())


def test_stochastic_depth_grows_over_all_stages():
    rates = [m.drop_prob for m in nano(drop_path_rate=0.7).modules() if isinstance(m, DropPath)]
    assert rates == pytest.approx([0.1 * i for i in range(8)])


def test_timm_builds_it_with_its_features():
    model = timm.create_model("lavit_nano", num_classes=3, img_size=28, in_chans=1)
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 3)
    maps = timm.create_model("lavit_tiny", img_size=64, features_only=True, out_indices=(0, 1, 2, 3))
    assert [tuple(m.shape[1:]) for m in maps(torch.randn(1, 3, 64, 64))] == [
        (48, 16, 16),
        (96, 8, 8),
        (240, 4, 4),
        (432, 2, 2),
    ]
    assert maps.feature_info.reduction() == [4, 8, 16, 32]


@pytest.mark.slow
def test_compiles_as_one_graph_while_training():
    """With every scores' part of full rank in it; the presets' own graph is compiled with those of all models."""
    model = nano(img_size=16, depths=(1, 1, 2, 2), num_vanilla=(1, 1, 1, 1)).train()
    images, weight = torch.randn(2, 3, 16, 16), less_layers(model)[0].theta
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(run(images).square().sum(), weight)[0] for run in (model, compiled)]
    assert torch.allclose(*grads, atol=1e-5)


@pytest.mark.slow
def test_compiles_while_training_with_batches_of_any_size():
    """The second size makes the batch a symbol; views must hold without its number."""
    torch._dynamo.reset()
    model = nano(img_size=16, depths=(1, 1, 2, 2), num_vanilla=(1, 1, 1, 1)).train()
    compiled, weight = torch.compile(model, fullgraph=True, backend="aot_eager"), less_layers(model)[0].theta
    for size in (2, 3, 5):
        images = torch.randn(size, 3, 16, 16)
        grads = [torch.autograd.grad(run(images).square().sum(), weight)[0] for run in (model, compiled)]
        assert torch.allclose(*grads, atol=1e-5)
