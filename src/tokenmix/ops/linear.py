"""Linear maps of features, by whichever library multiplies matrices faster on the machine at hand."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.ops import onednn
from tokenmix.ops.cpu import AVX512, MKL_IS_FAST, MKL_IS_HALF

__all__ = ["inner_product", "linear", "linear_into", "takes_inner_product", "weight_gradient"]

# Below so many numbers in the input, setting up costs what it gains.
_LEAST_INPUT = 2**15

# Where MKL is fast, oneDNN gains where few features come out of an input that is so large.
_FEW_FEATURES, _LARGE_INPUT = 128, 2**20

# The gradient of a weight with fewer numbers is MKL's gain where it is not half as fast: 86 multiply-adds a nanosecond
# against 70 for 3,136 rows of 64 and 192 features on a Zen 4.
_SMALL_WEIGHT = 0 if MKL_IS_HALF else 2**14


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: bool = False) -> Tensor:
    """The linear map of the features, as `torch.nn.functional.linear`, faster in float32 on many CPUs.

        y = x W^T + b,   or   y = GELU(x W^T + b)

    PyTorch hands float32 products to MKL, which on AMD's CPUs is slower than oneDNN. So where `takes_inner_product`
    says so, this is oneDNN's inner product, with GELU in the same pass unless a gradient has to come back through it;
    else it is `F.linear`.

    Shape:
        x (..., D), weight (E, D), bias (E,) to (..., E).

    Measured on 2 cores of an AMD EPYC (Zen 4, peak 105 multiply-adds a nanosecond), torch 2.14.1, multiply-adds a
    nanosecond of `F.linear` / here: 8 x 196 tokens, 256 to 1,536 features 89 / 98, 768 to 256 77 / 96, 512 to 64
    76 / 94; 196 tokens, 256 to 1,536 70 / 97.
    """
    if not takes_inner_product(x, weight, bias):
        out = _library_linear(x, weight, bias)
        return F.gelu(out) if gelu else out
    extra = () if bias is None else (bias,)
    if onednn.is_differentiated(x, weight, *extra):
        if gelu:
            return F.gelu(linear(x, weight, bias))
        return _operator(x, weight, bias, False) if torch.compiler.is_compiling() else _Linear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]
    return (_operator if torch.compiler.is_compiling() else inner_product)(x, weight, bias, gelu)


def _library_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, but never a view of the rows of its product, as PyTorch returns it for tokens and a bias.

    Writing into a view drops the hook by which FSDP2 fetches the weights for the backward pass. Saved graphs say
    `linear`, and weights of other types choose their own product.
    """
    viewed = bias is not None and x.dim() > 2 and x.is_contiguous() and type(weight) in (Tensor, nn.Parameter)
    if not viewed or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return F.linear(x, weight, bias)
    return _unviewed(F.linear(_rows(x), weight, bias), x)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """`linear` of x (1, N, D), written into `out` (1, N, E), outside of autograd."""
    with onednn.onednn_products():
        if bias is None:
            torch.mm(x[0], weight.mT, out=out[0])
        else:
            torch.addmm(bias, x[0], weight.mT, out=out[0])


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """What `linear` hands back to its weight, sum_n grad_n x_n^T.

    Shape:
        grad (..., E), x (..., D) to (E, D).
    """
    left, right = _rows(grad).mT, _rows(x)
    if onednn.is_followed(left, right):
        # A transposed matrix that is made a batch of one is copied: it is a batch first.
        return onednn.batched_product(grad.reshape(1, *left.mT.shape).mT, right.unsqueeze(0))[0]
    if left.shape[0] * right.shape[1] < _SMALL_WEIGHT:
        return torch.mm(left, right)
    with onednn.onednn_products():
        return torch.mm(left, right)


def takes_inner_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether oneDNN is the faster way for a float32 product of x and weight: on a CPU with AVX-512, if it is large.

    Not while exporting or tracing, so that a saved graph says `linear`; nor while multiply-adds are counted or oneDNN
    is switched off; not under autocast or for half types, whose products PyTorch gives to oneDNN anyhow; not for a
    weight that is no plain tensor, such as a quantised or a sharded one; not under the transforms of torch.func and in
    forward mode; nor for shapes that `F.linear` treats in another way, or refuses.
    """
    # Exporting comes first, since comparing a size that is left open would restrict it.
    if not AVX512 or not onednn.is_plain(x, weight, *(() if bias is None else (bias,))):
        return False
    if not torch.compiler.is_compiling() and (
        torch._C._len_torch_dispatch_stack() > 0 or not torch._C._get_mkldnn_enabled()
    ):
        return False
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        return False
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        return False
    if MKL_IS_FAST:
        return x.numel() >= _LARGE_INPUT and weight.shape[0] <= _FEW_FEATURES
    return x.numel() >= _LEAST_INPUT


def inner_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """`linear` by oneDNN, outside of autograd, for plain float32 tensors on a CPU and a bias that is contiguous.

    The result is no view, which a function of autograd could not hand on to operators in place.
    """
    product = torch.ops.mkldnn._linear_pointwise.default
    return _unviewed(product(_rows(x).contiguous(), weight, bias, "gelu" if gelu else "none", [], "none"), x)


# TorchInductor takes oneDNN's own operator for one whose weight it has packed itself. Hence one of ours.
@torch.library.custom_op("tokenmix::linear", mutates_args=())
def _operator(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    return inner_product(x, weight, bias, gelu)


@_operator.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any = None) -> None:
    x, weight = inputs[:2]
    to_x, to_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if to_weight else None, weight if to_x else None)


def _gradients(ctx: Any, grad: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
    return (
        product(grad, weight.mT) if to_x else None,
        weight_gradient(grad, x) if to_weight else None,
        _rows(grad).sum(0) if to_bias else None,
    )


def _unviewed(rows: Tensor, x: Tensor) -> Tensor:
    """The fresh rows of a product in the shape of x, without autograd taking them for a view."""
    return rows if x.dim() == 2 else torch.ops.aten._unsafe_view.default(rows, (*x.shape[:-1], rows.shape[-1]))


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


class _Linear(torch.autograd.Function):
    """`inner_product` for autograd, several times cheaper to call than a registered operator.

    With a `setup_context` PyTorch would look up the signature of `forward` at each call, which takes 0.05 ms.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _keep(ctx, (x, weight))
        return inner_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad_outputs[0], linear)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, grad, lambda x, weight: _operator(x, weight, None, False)), None


_operator.register_autograd(_backward, setup_context=_keep)
