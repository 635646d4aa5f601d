"""The equations in float64, as plainly as they can be written: what every fast path is checked against; and the bare
products that none of them can do without."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from suite.place import Place
from tokenmix.ops.onednn import onednn_products

__all__ = ["bare_products", "dense_less_attention", "external_attention", "gated", "with_gradients"]


def external_attention(query: Tensor, key_memory: Tensor, value_memory: Tensor) -> Tensor:
    """Softmax over the tokens, then each token's row divided by its sum, then the values."""
    shares = torch.softmax(query.double() @ key_memory.double().mT, dim=-2)
    return shares / shares.sum(-1, keepdim=True) @ value_memory.double()


def gated(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The first half of the channels times a linear map over the tokens of the normalised second half."""
    content, passed = z.double().chunk(2, dim=-1)
    passed = torch.nn.functional.layer_norm(passed, passed.shape[-1:])
    return content * (weight.double() @ passed + bias.double().unsqueeze(-1))


def dense_less_attention(
    scores: Tensor, theta: Tensor, theta_bias: Tensor, psi: Tensor, psi_bias: Tensor, value: Tensor
) -> Tensor:
    """Theta over the keys of each query, Psi over the queries of each key, softmax, values."""
    rows = scores.double() @ theta.double().mT + theta_bias.double()
    both = (rows.mT @ psi.double().mT + psi_bias.double()).mT
    return torch.softmax(both, dim=-1) @ value.double()


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """The result of a function and the gradients of all of its inputs, in float64."""
    wide = [value.detach().double().requires_grad_() for value in inputs]
    out = function(*wide)
    return (out.detach(), *torch.autograd.grad(out, wide, grad.double()))


def bare_products(place: Place, *shapes: tuple[int, int, int, int], times: int = 1) -> Callable[[], None]:
    """Batched products alone, G of (M, K) (K, N) for each shape (G, M, K, N), all of them `times` times over.

    Into memory that is there already, and on a CPU by the library that is the faster one there: what a network or a
    layer with these products takes at least, however little else it does.
    """
    operands = [(place.randn(g, m, n), place.randn(g, m, k), place.randn(g, n, k).mT) for g, m, k, n in shapes]

    def run() -> None:
        with onednn_products():
            for _ in range(times):
                for out, left, right in operands:
                    torch.bmm(left, right, out=out)

    return run
