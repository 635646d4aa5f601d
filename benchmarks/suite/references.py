"""The equations in float64, as plainly as they can be written: what every fast path is checked against; and the bare
products that none of them can do without."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["bare_products", "dense_less_attention", "external_attention", "gated", "with_gradients"]


def external_attention(query: Tensor, key_memory: Tensor, value_memory: Tensor) -> Tensor:
    """Softmax over the tokens, then each token's row divided by its sum, then the values."""
    weights = torch.softmax(query.double() @ key_memory.double().mT, dim=-2)
    return weights / weights.sum(-1, keepdim=True) @ value_memory.double()


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


def bare_products(pairs: Sequence[tuple[Tensor, Tensor]], times: int = 1) -> Callable[[], None]:
    """Batched products (G, M, K) (G, K, N) alone, all of them `times` times over, into memory that is there already:
    what a network or a layer with these products takes at least, however little else it does.
    """
    products = [(torch.bmm(left, right), left, right) for left, right in pairs]

    def run() -> None:
        for _ in range(times):
            for out, left, right in products:
                torch.bmm(left, right, out=out)

    return run
