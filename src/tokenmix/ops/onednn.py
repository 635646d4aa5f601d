"""Batched float32 products by oneDNN instead of MKL, on CPUs with AVX-512."""

import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from tokenmix.ops.cpu import AVX512, MKL_IS_FAST, MKL_IS_HALF

__all__ = [
    "batched_product",
    "batches_gain",
    "has_tangent",
    "is_differentiated",
    "is_differentiated_by_func",
    "is_followed",
    "is_plain",
    "onednn_products",
    "product_operator",
    "takes_onednn",
]

_IS_FASTER = AVX512 and not MKL_IS_FAST

# With fewer numbers to mix, oneDNN's setting up costs what it gains, also where it is twice as fast as MKL.
LEAST_NUMBERS = 2**15

# Where it is ahead by less, it gains from so many multiply-adds on in all products and in each: on a Zen 4 it takes 0.8
# to 1.0 of the time of MKL there, and 1.1 to 2.4 below.
LEAST_WORK, LEAST_WORK_OF_EACH = 2**26, 2**24

# Products of at least so many multiply-adds are added up one by one.
LEAST_MACS = 2**20

_MATMUL: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]

_FUNCTORCH: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]

_lock = threading.Lock()
_inside = 0
_before = "none"


class onednn_products:
    """A context in which PyTorch's own float32 products run on oneDNN, where that rounds as float32 does; else nothing
    changes.

    PyTorch hands them to oneDNN once it is allowed to round what goes in to bfloat16. oneDNN makes use of that only
    where the CPU has units for it (AMX); elsewhere it multiplies in float32. `_rounds_as_float32` sees which it is.

    The permission is one of the process: products of other threads meanwhile take the same way, with the same accuracy.
    """

    def __enter__(self) -> None:
        global _inside, _before
        self._changes = _rounds_as_float32()
        if self._changes:
            with _lock:
                if _inside == 0:
                    _before = _permission()
                    _permit("bf16")
                _inside += 1

    def __exit__(self, *_: object) -> None:
        global _inside
        if self._changes:
            with _lock:
                _inside -= 1
                if _inside == 0:
                    _permit(_before)


def takes_onednn(*tensors: Tensor) -> bool:
    """Whether operators that are built on `onednn_products` serve these tensors and are faster: `is_plain`, on a CPU
    with AVX-512 on which MKL is not as fast."""
    return _IS_FASTER and is_plain(*tensors)


def is_plain(*tensors: Tensor) -> bool:
    """Whether operators of our own serve these tensors: plain float32 on a CPU.

    Not while exporting or tracing, so that a saved graph holds PyTorch's operators; not under autocast; not under the
    transforms of torch.func and in forward mode, for which those operators have no rule.
    """
    # Exporting comes first, since looking at a tensor's size would restrict it.
    if torch.compiler.is_exporting() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"):
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    return all(map(_plain, tensors))


def is_differentiated(*tensors: Tensor) -> bool:
    """Whether autograd records calls of these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def is_followed(*tensors: Tensor) -> bool:
    """Whether somebody follows the calls of these tensors: autograd, either way, the compiler, a tracer, a transform of
    torch.func, or a mode such as the counter of multiply-adds.

    Then a call has to be a registered operator, which takes 0.05 ms more, and one of the documented form.
    """
    return is_differentiated(*tensors) or _is_traced()


def _is_traced() -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or forward_ad._current_level >= 0:
        return True
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0


def batches_gain(numbers: int, tokens: int, count: int) -> bool:
    """Whether `batched_product` is the faster way to mix `numbers` over `tokens` in `count` products, where
    `takes_onednn`."""
    if MKL_IS_HALF:
        return numbers >= LEAST_NUMBERS
    work = numbers * tokens
    return work >= LEAST_WORK and work >= LEAST_WORK_OF_EACH * count


def batched_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b + bias 1^T of matrices, as `torch.baddbmm`, and as often differentiable.

    Shape:
        a (G, M, K), or (M, K) for all; b (G, K, N), bias (M,) to (G, M, N).
    """
    if forward_ad._current_level >= 0:
        return _plain_product(a, b, bias)
    if _is_traced():
        return product_operator(a, b, bias)
    extra = () if bias is None else (bias,)
    return _Product.apply(a, b, bias) if is_differentiated(a, b, *extra) else _multiply(a, b, bias)  # pyright: ignore[reportReturnType]


def _plain_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    a = a.expand(len(b), *a.shape[-2:])
    return torch.bmm(a, b) if bias is None else torch.baddbmm(bias.unsqueeze(-1), a, b)


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    with onednn_products():
        return _plain_product(a, b, bias)


@torch.library.custom_op("tokenmix::batched_product", mutates_args=())
def product_operator(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """`batched_product` as a registered operator."""
    return _multiply(a, b, bias)


@product_operator.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return b.new_empty(b.shape[0], a.shape[-2], b.shape[2])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Any = None) -> None:
    a, b, _ = inputs
    to_a, to_b = ctx.needs_input_grad[:2]
    ctx.is_shared = a.dim() == 2
    ctx.save_for_backward(a if to_b else None, b if to_a else None)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    to_a, to_b, to_bias = ctx.needs_input_grad
    of_a = None
    if to_a:
        of_a = _sum_of_products(grad, b.mT) if ctx.is_shared else batched_product(grad, b.mT)
    return of_a, batched_product(a.mT, grad) if to_b else None, grad.sum((0, 2)) if to_bias else None


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """The sum over G of a (G, M, K) b (G, K, N), without (G, M, N) where the matrices are large and nobody follows."""
    if is_followed(a, b) or a.shape[1:].numel() * b.shape[2] < LEAST_MACS or len(a) == 0:
        return batched_product(a, b).sum(0)
    with onednn_products():
        total = torch.mm(a[0], b[0])
        for left, right in zip(a[1:], b[1:]):
            total.addmm_(left, right)
    return total


class _Product(torch.autograd.Function):
    """`_multiply` for autograd, several times cheaper to call than the registered operator.

    With a `setup_context` PyTorch would look up the signature of `forward` at each call, which takes 0.05 ms.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        _keep(ctx, (a, b, bias))
        return _multiply(a, b, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad_outputs[0])


product_operator.register_autograd(_gradients, setup_context=_keep)


@register_flop_formula(torch.ops.tokenmix.batched_product)
def _(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * b[0] * a[-2] * a[-1] * b[2]


def has_tangent(tensor: Tensor) -> bool:
    """Whether a tensor carries a derivative of forward mode."""
    # Outside of forward mode none does, and to ask is as dear as all other questions together.
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def is_differentiated_by_func() -> bool:
    """Whether torch.func is taking a derivative, at any depth, for which registered operators have no rule."""
    if not torch._C._are_functorch_transforms_active():
        return False
    kinds = _FUNCTORCH.TransformType.Grad, _FUNCTORCH.TransformType.Jvp
    return any(level.key() in kinds for level in _FUNCTORCH.get_interpreter_stack() or ())


def _plain(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or has_tangent(tensor):
        return False
    return tensor.dtype == torch.float32 and tensor.is_cpu and tensor.layout == torch.strided


@cache
def _rounds_as_float32() -> bool:
    """Whether oneDNN multiplies in float32 although it may do otherwise: tried once, on what bfloat16 rounds."""
    if not _IS_FASTER or torch.cpu._is_amx_tile_supported():
        return False
    before = _permission()
    matrix = torch.full((2, 128, 128), 1.0 + 2.0**-12, dtype=torch.float32, device="cpu")
    try:
        _permit("bf16")
        product = torch.bmm(matrix, matrix)
    finally:
        _permit(before)
    return bool((product - 128.0 * (1.0 + 2.0**-12) ** 2).abs().amax() < 1e-3)


def _permission() -> str:
    return _MATMUL.fp32_precision


def _permit(precision: str) -> None:
    _MATMUL.fp32_precision = precision
