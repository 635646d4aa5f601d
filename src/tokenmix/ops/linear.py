"""Linear maps of features and of tokens, by whichever library multiplies matrices faster on the machine at hand."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LEAST_TOKENS", "convolves", "features_by_convolution", "linear", "tokens_by_convolution"]

# Measured where the CPU has AVX-512; elsewhere nothing is known to be gained.
_AVX512 = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX512")

# Below so many numbers in the input, setting up a convolution costs what it gains.
_LEAST_INPUT = 2**15

# With fewer tokens than this the tokens' convolution loses to a batched product.
LEAST_TOKENS = 144


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The linear map of the features, as `torch.nn.functional.linear`, faster in float32 on many CPUs.

        y = x W^T + b

    PyTorch hands float32 products to MKL, which leaves the AVX-512 units of AMD's CPUs idle, and convolutions to
    oneDNN, which does not. So where `convolves` says so, this is `features_by_convolution`; else it is `F.linear`.

    Shape:
        x (..., D), weight (E, D), bias (E,) to (..., E).

    Measured on 2 cores of an AMD EPYC with AVX-512, torch 2.14.1, 8 x 196 tokens, `F.linear` / here: 256 to 1,536
    features 6.8 / 3.2 ms, with backward 21.9 / 11.0 ms; 768 to 256 features 3.4 / 1.6 ms, with backward 11.3 / 5.8 ms.
    """
    if x.dim() == 3 and convolves(x, weight):
        return features_by_convolution(x, weight, bias)
    return F.linear(x, weight, bias)


def convolves(x: Tensor, weight: Tensor) -> bool:
    """Whether a float32 product of x and weight, large enough to gain, is about to run on a CPU with AVX-512.

    Not while exporting, so that a saved graph says `linear`; not under autocast or for half types, whose products
    PyTorch gives to oneDNN anyhow; not for a weight that is no plain tensor, such as a quantised or a sharded one.
    """
    # Exporting comes first, since comparing a size that is left open would restrict it.
    if not _AVX512 or torch.compiler.is_exporting() or torch.is_autocast_enabled("cpu"):
        return False
    plain = type(weight) in (Tensor, torch.nn.Parameter)
    single = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    return plain and single and x.numel() >= _LEAST_INPUT


def features_by_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` as a 1 x 1 convolution over the tokens, whose features last are its channels last: nothing is copied.

    Shape:
        x (B, N, D), weight (E, D), bias (E,) to (B, N, E).
    """
    image = x.unsqueeze(1).permute(0, 3, 1, 2)
    # Dilating the axis of length 1 changes nothing but what PyTorch decides: without, one thread gets the slow kernel.
    out = F.conv2d(image, weight[:, :, None, None], bias, dilation=(2, 1))
    return out.permute(0, 2, 3, 1).squeeze(1)


def tokens_by_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """W X + b 1^T as a convolution of width 1, for which the tokens are the channels.

    Shape:
        x (B, N, C), weight (M, N), bias (M,) to (B, M, C).
    """
    return F.conv1d(x, weight[:, :, None], bias)
