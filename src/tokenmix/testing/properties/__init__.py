"""Properties of every token mixer: one function each, usable on any nn.Module without pytest.

Call a property as `check(build, x)`. `build` makes a new layer at each call. `x` is a float32 example, (B, N, D)
or (B, C, H, W), with at least three samples of eight tokens. The function returns None if the property holds. It raises
`PropertyFailure` if not, and `NotApplicable` if the layer lacks the feature.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tokenmix.testing.harness import Build
from tokenmix.testing.properties import graphs, layer, tokens

__all__ = ["PROPERTIES", "Property"]


@dataclass(frozen=True)
class Property:
    """One entry of the table: the check, and the usual cause of a failure."""

    check: Callable[[Build, Tensor], None]
    cause: str

    @property
    def about(self) -> str:
        """The requirement in a sentence: the summary line of the check."""
        return (self.check.__doc__ or "").strip().splitlines()[0]


PROPERTIES: dict[str, Property] = {
    "shape": Property(tokens.shape, "a missing output projection, or a result kept in another type"),
    "lengths": Property(tokens.lengths, "a size that is wired in, batch and tokens mixed up, or a view that needs N"),
    "batch-empty": Property(tokens.empty_batch, "a reshape with -1, which no batch of 0 can fill"),
    "bad-input": Property(tokens.bad_input, "no check in forward; broadcasting takes what should be refused"),
    "batch": Property(tokens.batch_independence, "softmax or a norm over axis 0, or without naming its axis"),
    "batch-training": Property(tokens.batch_independence_training, "statistics over the batch"),
    "gradients": Property(layer.gradients, "an unused layer, .data or .detach() in forward, NaN after a where"),
    "registered": Property(layer.registered, "modules in a Python list instead of nn.ModuleList, a bare tensor"),
    "eval-stable": Property(layer.eval_stable, "dropout that ignores eval(), or what forward keeps or makes again"),
    "slopes": Property(layer.slopes, ".detach(), .data or torch.no_grad() in forward, or a wrong backward"),
    "input-kept": Property(layer.input_kept, "an in-place operation on the input, the mask, or a view of them"),
    "non-contiguous": Property(layer.non_contiguous, "reading the storage with as_strided or a wrong view"),
    "copies": Property(layer.copies, "two parameters on one storage (tying through .data), state outside buffers"),
    "seeds": Property(layer.seeds, "random numbers from outside torch, or uninitialised memory"),
    "arguments": Property(layer.arguments, "an argument that is accepted and never used, a size wired in"),
    "device-dtype": Property(layer.device_and_dtype, "a sub-module built without device and dtype"),
    "equivariance": Property(tokens.equivariance, "normalisation over the wrong axis, or a wrong declaration"),
    "causality": Property(tokens.causality, "a triangle that is missing, or one that nobody asked for"),
    "mask-full": Property(tokens.full_mask, "another path with a mask than without"),
    "mask-polarity": Property(tokens.polarity, "True and False swapped: PyTorch itself uses both conventions"),
    "mask-padding": Property(tokens.padding, "a mask applied after the softmax, or to rows instead of columns"),
    "mask-zero": Property(tokens.zero_rows, "a bias or a residual that is added after the mask"),
    "mask-nan": Property(
        tokens.not_a_number, "a mask on scores or outputs only: 0 * NaN is NaN; set masked x to 0 first"
    ),
    "mask-empty": Property(tokens.empty_row, "softmax over minus infinity alone, or a division by a count of 0"),
    "map-shape": Property(tokens.map_shape, "heads averaged away, or a mask that does not reach the map"),
    "map-rows": Property(tokens.map_rows, "a second normalisation over the wrong axis, or an epsilon that rounds to 0"),
    "map-used": Property(tokens.map_used, "a map computed a second time, by another formula than forward's"),
    "finite": Property(layer.finite, "exp without subtracting the maximum, a norm without epsilon"),
    "half-precision": Property(layer.half_precision, "an epsilon below the smallest half, a long sum in half"),
    "autocast": Property(layer.autocast, "an operation that mixes float32 weights with bfloat16 input"),
    "macs": Property(layer.macs, "a term left out, fused attention counted as 0, or elementwise operations counted"),
    "compile": Property(graphs.compiled, "a Python branch on a tensor's value, or .item() in forward"),
    "vmap": Property(graphs.batched, "a Python branch on a tensor's value, or writing into a tensor in place"),
    "trace": Property(graphs.traced, "work that is only done while gradients are recorded, or a fixed size"),
    "onnx": Property(
        graphs.onnx_by_tracing, "an operator that the exporter does not have, or keyword-only arguments of forward"
    ),
    "export": Property(graphs.exported, "int(x.shape[1]) or a Python loop over tokens, which fixes their number"),
}
"""Properties by name, in report order."""
