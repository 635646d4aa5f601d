"""Linear maps of features and of tokens, by whichever library multiplies matrices faster on the machine at hand."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.ops.cpu import AVX512, MKL_IS_FAST

__all__ = [
    "convolves",
    "convolves_tokens",
    "features_by_convolution",
    "linear",
    "linear_into",
    "tokens_by_convolution",
    "weight_gradient",
]

# Below so many numbers in the input, setting up a convolution costs what it gains.
_LEAST_INPUT = 2**15

# Where MKL is fast, oneDNN gains where few features come out of an input that is so large.
_FEW_FEATURES, _LARGE_INPUT = 128, 2**20

# With fewer tokens than this the tokens' convolution loses to a batched product.
_LEAST_TOKENS = 96


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The linear map of the features, as `torch.nn.functional.linear`, faster in float32 on many CPUs.

        y = x W^T + b

    PyTorch hands float32 products to MKL, which on AMD's CPUs reaches half the speed of oneDNN, and convolutions to
    oneDNN. So where `convolves` says so, this is `features_by_convolution`; else it is `F.linear`.

    Shape:
        x (..., D), weight (E, D), bias (E,) to (..., E).

    Measured on 2 cores of an AMD EPYC with AVX-512, torch 2.14.1, 8 x 196 tokens, `F.linear` / here: 256 to 1,536
    features 7.3 / 3.7 ms, with backward 21.4 / 10.9 ms; 768 to 256 features 3.8 / 2.0 ms, with backward 10.9 / 5.5 ms.
    """
    if x.dim() != 3 or not convolves(x, weight):
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():
        return _compiled_features(x, weight, bias)
    return features_by_convolution(x, weight, bias)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """`linear` of x (1, N, D), written into `out` (1, N, E), outside of autograd."""
    if convolves(x, weight) and not MKL_IS_FAST:
        out.copy_(linear(x, weight, bias))
    elif bias is None:
        torch.mm(x[0], weight.mT, out=out[0])
    else:
        torch.addmm(bias, x[0], weight.mT, out=out[0])


def convolves(x: Tensor, weight: Tensor) -> bool:
    """Whether `features_by_convolution` is the faster way for a float32 product of x and weight, on a CPU with AVX-512.

    Not while exporting, so that a saved graph says `linear`; not under autocast or for half types, whose products
    PyTorch gives to oneDNN anyhow; not for a weight that is no plain tensor, such as a quantised or a sharded one.
    """
    if MKL_IS_FAST:
        return _can_convolve(x, weight, _LARGE_INPUT) and weight.shape[0] <= _FEW_FEATURES
    return _can_convolve(x, weight, _LEAST_INPUT)


def convolves_tokens(x: Tensor, weight: Tensor) -> bool:
    """The same for `tokens_by_convolution` of x (B, N, C)."""
    return not MKL_IS_FAST and _can_convolve(x, weight, _LEAST_INPUT) and x.shape[1] >= _LEAST_TOKENS


def _can_convolve(x: Tensor, weight: Tensor, least_input: int) -> bool:
    # Exporting comes first, since comparing a size that is left open would restrict it.
    if not AVX512 or torch.compiler.is_exporting():
        return False
    if x.numel() < least_input or torch.is_autocast_enabled("cpu"):
        return False
    plain = type(weight) in (Tensor, torch.nn.Parameter)
    return plain and x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"


def features_by_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` as a 1 x 1 convolution over the tokens, whose features last are its channels last: nothing is copied.

    Shape:
        x (B, N, D), weight (E, D), bias (E,) to (B, N, E).
    """
    return _tokens(F.conv2d(_image(x), weight[:, :, None, None], bias, dilation=_DILATION))


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """What `linear` hands back to its weight, sum_n grad_n x_n^T, outside of autograd.

    Shape:
        grad (B, N, E), x (B, N, D) to (E, D).
    """
    weight = x.new_empty(grad.shape[-1], x.shape[-1])
    if not convolves(x, weight):
        return grad.flatten(0, 1).mT @ x.flatten(0, 1)
    return _convolution_backward(grad, x, weight, (False, True, False))[1][:, :, 0, 0]


# Dilating the axis of length 1 changes nothing but what PyTorch decides: without, one thread gets the slow kernel.
_DILATION = (2, 1)


def _image(tokens: Tensor) -> Tensor:
    return tokens.unsqueeze(1).permute(0, 3, 1, 2)


def _tokens(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).squeeze(1)


# TorchInductor forgets the stride of an axis of length 1, then no longer sees that the channels come last, and copies
# what goes in and what comes out. Hence an operator that it does not look into.
@torch.library.custom_op("tokenmix::features", mutates_args=())
def _compiled_features(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return features_by_convolution(x.contiguous(), weight, bias).contiguous()


@_compiled_features.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("tokenmix::features_backward", mutates_args=())
def _compiled_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    to_x, to_weight, to_bias = _convolution_backward(grad.contiguous(), x.contiguous(), weight, (True, True, True))
    return _tokens(to_x).contiguous(), to_weight[:, :, 0, 0].contiguous(), to_bias


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, ...]) -> tuple[Tensor, ...]:
    sizes = ([weight.shape[0]], (1, 1), (0, 0), _DILATION, False, (0, 0), 1, wanted)
    return torch.ops.aten.convolution_backward(_image(grad), _image(x), weight[:, :, None, None], *sizes)


@_compiled_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    to_x, to_weight, to_bias = _compiled_backward(grad, *ctx.saved_tensors)
    return to_x, to_weight, to_bias if ctx.has_bias else None


_compiled_features.register_autograd(_backward, setup_context=_keep)


def tokens_by_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W X + b 1^T as a convolution of width 1, for which the tokens are the channels.

    Shape:
        x (B, N, C), weight (M, N), bias (M,) to (B, M, C).
    """
    return F.conv1d(x, weight[:, :, None], bias)
