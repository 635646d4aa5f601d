"""gMLP's branch as a whole: how it starts, what it costs, and next to the blocks of timm and g-mlp-pytorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from g_mlp_pytorch import g_mlp_pytorch as lucidrains
from timm.models import mlp_mixer as timm_mixer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tokenmix.errors import UserError
from tokenmix.layers.gating import GatedMLP

VARIANTS = ("split", "multiplicative", "additive", "linear")
GATES = ("dense", "toeplitz", "toeplitz-fft")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _shaken(branch: GatedMLP, std: float = 0.2) -> GatedMLP:
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
    return branch


@pytest.mark.parametrize("attention_dim", [0, 4])
@pytest.mark.parametrize("variant", ["split", "multiplicative", "additive"])
def test_starts_as_the_mlp_without_gating(variant, attention_dim):
    branch = GatedMLP(8, 6, variant=variant, attention_dim=attention_dim)
    x = torch.randn(2, 6, 8)
    hidden = F.gelu(branch.proj_in(x))
    plain = branch.proj_out(hidden[..., :8] if variant == "split" else hidden)
    torch.testing.assert_close(branch(x), plain, rtol=0, atol=1e-4)


def test_reset_gate_undoes_what_a_network_drew_over_it():
    branch = GatedMLP(8, 6, attention_dim=4)
    for module in branch.modules():
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
            nn.init.ones_(module.bias)
    x = torch.randn(2, 6, 8)
    plain = branch.proj_out(F.gelu(branch.proj_in(x))[..., :8])
    assert (branch(x) - plain).abs().max() > 1e-2
    branch.reset_gate()
    torch.testing.assert_close(branch(x), plain, rtol=1e-4, atol=1e-4)


def _copy_gate(branch: GatedMLP, norm: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    branch.gating.norm.load_state_dict(norm.state_dict())
    with torch.no_grad():
        branch.gating.weight.copy_(weight)
        branch.gating.bias.copy_(bias)


def test_parity_with_timm_block():
    block = timm_mixer.SpatialGatingBlock(8, 9, mlp_ratio=6)
    mlp, ours = block.mlp_channels, GatedMLP(8, 9, expansion=6)
    ours.proj_in.load_state_dict(mlp.fc1.state_dict())
    ours.proj_out.load_state_dict(mlp.fc2.state_dict())
    _copy_gate(ours, mlp.gate.norm, mlp.gate.proj.weight, mlp.gate.proj.bias)
    x = torch.randn(2, 9, 8)
    torch.testing.assert_close(x + ours(block.norm(x)), block(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention_dim", [None, 5])
def test_parity_with_g_mlp_pytorch_block(attention_dim, causal):
    theirs = lucidrains.gMLPBlock(dim=8, dim_ff=32, seq_len=9, attn_dim=attention_dim, causal=causal)
    nn.init.normal_(theirs.sgu.weight)
    ours = GatedMLP(8, 9, expansion=4, attention_dim=attention_dim or 0, causal=causal)
    ours.proj_in.load_state_dict(theirs.proj_in[0].state_dict())
    ours.proj_out.load_state_dict(theirs.proj_out.state_dict())
    _copy_gate(ours, theirs.sgu.norm, theirs.sgu.weight[0], theirs.sgu.bias[0])
    if ours.tiny_attention is not None:
        ours.tiny_attention.proj.load_state_dict(theirs.attn.to_out.state_dict())
        with torch.no_grad():
            ours.tiny_attention.qkv.weight.copy_(theirs.attn.to_qkv.weight)
            ours.tiny_attention.qkv.bias.zero_()
    x = torch.randn(2, 9, 8)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("depth", "dim", "expansion", "attention_dim", "published"),
    [(48, 512, 6, 0, 130), (36, 512, 6, 64, 109), (96, 768, 4, 0, 365), (72, 768, 4, 128, 316), (144, 1024, 4, 0, 941)],
)
def test_published_sizes_of_the_language_models(depth, dim, expansion, attention_dim, published):
    """Table 5 of the paper: Toeplitz gates over 512 tokens, 32,000 tied embeddings, tiny attention in every block."""
    branch = GatedMLP(
        dim, 512, expansion=expansion, gate="toeplitz", attention_dim=attention_dim, device=torch.device("meta")
    )
    block = sum(p.numel() for p in branch.parameters()) + 2 * dim
    assert round((depth * block + 32000 * dim) / 1e6) == published


def test_cost_of_the_default_equals_self_attention_when_tokens_are_as_many_as_channels():
    dim = 64
    branch = GatedMLP(dim, dim)
    matrices = sum(p.numel() for p in branch.parameters() if p.dim() == 2)
    assert matrices == 4 * dim**2


@pytest.mark.parametrize("attention_dim", [0, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_macs_are_those_of_an_unfused_run(variant, attention_dim):
    branch = GatedMLP(8, 12, expansion=3, variant=variant, attention_dim=attention_dim)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        branch(torch.randn(1, 10, 8))
    assert counter.get_total_flops() == 2 * branch.macs(10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_padding_with_nan_changes_neither_output_nor_gradients(gate, causal):
    branch = _shaken(GatedMLP(8, 7, gate=gate, causal=causal, attention_dim=4)).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    padded = torch.cat((x, torch.full((2, 2, 8), float("nan"), dtype=torch.float64)), 1)
    mask = (torch.arange(7) < 5).expand(2, 7)
    short, long = branch(x), branch(padded, mask)
    torch.testing.assert_close(long[:, :5], short)
    assert torch.equal(long[:, 5:], torch.zeros(2, 2, 8, dtype=torch.float64))
    parameters = dict(branch.named_parameters())
    pairs = (torch.autograd.grad(out.square().sum(), list(parameters.values())) for out in (long, short))
    for name, a, b in zip(parameters, *pairs):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("attention_dim", [0, 4])
@pytest.mark.parametrize("gate", GATES)
def test_causal_never_leaks_and_bidirectional_reaches_back(gate, attention_dim):
    x = torch.randn(1, 6, 8)
    moved = x.clone()
    moved[:, -1] = torch.randn(8)
    for causal in (True, False):
        branch = _shaken(GatedMLP(8, 6, gate=gate, causal=causal, attention_dim=attention_dim), std=0.5)
        reach = (branch(moved) - branch(x))[0].abs().amax(-1)
        if causal:
            assert reach[:-1].max() <= (1e-5 if gate == "toeplitz-fft" else 0)
        assert reach[-1 if causal else 0] > 1e-3


def test_every_parameter_learns_from_the_start():
    branch = GatedMLP(8, 6, attention_dim=4)
    branch(torch.randn(2, 6, 8)).square().sum().backward()
    for name, parameter in branch.named_parameters():
        assert parameter.grad is not None, name
        if name != "gating.norm.bias":
            assert parameter.grad.abs().max() > 0, name


def test_maps():
    branch = _shaken(GatedMLP(8, 6, attention_dim=4))
    x, mask = torch.randn(2, 5, 8), torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    assert torch.equal(branch.attention_map(x, mask), branch.gating.weight[:5, :5])
    assert torch.equal(branch.tiny_attention_map(x, mask), branch.tiny_attention.attention_map(x, mask))
    with pytest.raises(UserError, match="no tiny attention"):
        GatedMLP(8, 6).tiny_attention_map(x)


def test_dropout_acts_in_training_only():
    branch = _shaken(GatedMLP(8, 6, dropout=0.5))
    x = torch.randn(2, 6, 8)
    assert (branch(x) == 0).any()
    assert not (branch.eval()(x) == 0).any()


@pytest.mark.parametrize("watch", ["register_forward_pre_hook", "register_full_backward_hook", "forward", "type"])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("name", ["proj_in", "gating", "act"])
def test_modules_that_somebody_listens_to_or_replaced_are_called(name, learns, watch):
    branch, called = _shaken(GatedMLP(8, 6)), []
    module = getattr(branch, name)
    if watch == "type":

        class Another(type(module)):
            def forward(self, *args, **kwargs):
                called.append(None)
                return super().forward(*args, **kwargs)

        module.__class__ = Another
    elif watch == "forward":
        forward = module.forward
        module.forward = lambda *args, **kwargs: (called.append(None), forward(*args, **kwargs))[1]
    else:
        getattr(module, watch)(lambda *_: called.append(None))
    x = torch.randn(2, 6, 8, requires_grad=True)
    if learns:
        branch(x).sum().backward()
    elif watch == "register_full_backward_hook":  # Without gradients nobody calls it.
        return
    else:
        with torch.no_grad():
            branch(x)
    assert called


@pytest.mark.parametrize("act", [torch.nn.GELU("tanh"), torch.nn.ReLU()])
def test_another_activation_is_taken(act):
    branch, x = _shaken(GatedMLP(8, 6)), torch.randn(2, 6, 8)
    branch.act = act
    with torch.no_grad():
        torch.testing.assert_close(branch(x), branch.proj_out(branch.gating(act(branch.proj_in(x)))))


class _OnlyMultiplies(torch.Tensor):
    """A weight without parts, such as a quantised one."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.chunk, torch.Tensor.split, torch.Tensor.__getitem__):
            raise NotImplementedError(f"{func} of a weight without parts")
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.as_subclass(torch.Tensor) if func is F.linear else out


def test_a_weight_of_another_type_is_not_cut():
    branch, x = _shaken(GatedMLP(8, 6)), torch.randn(2, 6, 8)
    with torch.no_grad():
        expected = branch(x)
        weight = branch.proj_in.weight.detach().as_subclass(_OnlyMultiplies)
        branch.proj_in.weight = nn.Parameter(weight, requires_grad=False)
        assert type(branch.proj_in.weight) is _OnlyMultiplies
        torch.testing.assert_close(branch(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gate", GATES)
def test_half_types_and_autocast(gate, dtype):
    branch, x = GatedMLP(16, 8, gate=gate, attention_dim=8), torch.randn(2, 8, 16)
    tolerance = 8 * torch.finfo(dtype).eps
    half = copy.deepcopy(branch).to(dtype)(x.to(dtype))
    with torch.autocast("cpu", dtype):
        mixed = branch(x)
    assert half.dtype == mixed.dtype == dtype
    for out in (half, mixed):
        torch.testing.assert_close(out.float(), branch(x), rtol=tolerance, atol=tolerance)


def test_a_hidden_width_that_cannot_be_halved_names_another():
    with pytest.raises(UserError, match=r"hidden width 15 .* expansion=2.8"):
        GatedMLP(5, 4, expansion=3)
    assert GatedMLP(5, 4, expansion=2.8).hidden == 14
    assert GatedMLP(5, 4, expansion=3, variant="additive").hidden == 15


def test_a_map_needs_tiny_attention():
    with pytest.raises(UserError, match="no tiny attention"):
        GatedMLP(8, 4)(torch.randn(1, 4, 8), None, torch.ones(1, 1, 4, 4))
