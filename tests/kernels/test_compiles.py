"""The kernels compiled for GPUs that are not here: their shared memory stays within the chip's.

Triton brings its own assembler, so this needs no driver.
"""

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tokenmix.kernels.external_backward import backward_emit_kernel, backward_sums_kernel  # noqa: E402
from tokenmix.kernels.external_forward import emit_kernel, slot_sums_kernel  # noqa: E402
from tokenmix.kernels.gate_kernel import gate_kernel  # noqa: E402
from tokenmix.kernels.tiles import MAX_SLOTS, backward_tiles, forward_tiles, padded  # noqa: E402

# What a program may take at most, from the CUDA programming guide's table of compute capabilities.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
SUMS = {"partial", "offset", "sums", "grad_key", "grad_value"}
KERNELS = [
    (slot_sums_kernel, forward_tiles),
    (emit_kernel, forward_tiles),
    (backward_sums_kernel, backward_tiles),
    (backward_emit_kernel, backward_tiles),
]


def compiled(kernel: Any, constants: dict[str, Any], number: str, warps: int, capability: int) -> Any:
    """The kernel for tensors of `number`, every pointer and stride a multiple of 16, columns side by side, no mask."""
    signature: dict[str, Any] = {}
    values: dict[tuple[int, ...], Any] = {}
    facts: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants or name.startswith("mask"):
            signature[name], values[(i,)] = "constexpr", constants.get(name)
        elif name.endswith("_strides"):
            axes = (
                2 if name in ("key_strides", "value_strides", "weight_strides") else 3 if kernel is gate_kernel else 4
            )
            signature[name] = (*["i32"] * (axes - 1), "constexpr")
            values[(i, axes - 1)] = 1
            facts.update({(i, j): [["tt.divisibility", 16]] for j in range(axes - 1)})
        elif name.startswith("num_") or name == "channels":
            signature[name] = "i32"
        else:
            signature[name] = "*fp32" if name in SUMS else f"*{number}"
            facts[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, facts)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def external(kernel: Any, choose: Any, slots: int, width: int, number: str, capability: int) -> Any:
    tiles = choose(width, slots, BYTES[number])
    block = padded(width, tiles.columns)
    sizes = {"S": slots, "D": width, "DV": width, "BLOCK_N": tiles.tokens, "BLOCK_S": padded(slots, MAX_SLOTS)}
    how = {"BLOCK_D": block, "BLOCK_V": block, "PRECISION": "ieee", "STAGES": tiles.stages}
    constants = {name: value for name, value in {**sizes, **how}.items() if name in kernel.arg_names}
    return compiled(kernel, constants, number, tiles.warps, capability)


@pytest.mark.parametrize(("kernel", "choose"), KERNELS, ids=lambda part: getattr(part, "__name__", ""))
def test_published_sizes_fit_a_hopper(kernel: Any, choose: Any) -> None:
    program = external(kernel, choose, 64, 64, "bf16", 90)
    assert 0 < program.metadata.shared <= SHARED_BYTES[90]
    assert "wgmma" in program.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("number", ["fp16", "fp32"])
@pytest.mark.parametrize(("slots", "width"), [(64, 64), (64, 512), (128, 64), (256, 64), (256, 256)])
def test_every_choice_of_tiles_fits(slots: int, width: int, number: str, capability: int) -> None:
    for kernel, choose in KERNELS:
        program = external(kernel, choose, slots, width, number, capability)
        assert program.metadata.shared <= SHARED_BYTES[capability]


@pytest.mark.parametrize("capability", [80, 90])
def test_gate_fits(capability: int) -> None:
    constants = {"BLOCK_N": 64, "BLOCK_C": 64, "BLOCK_K": 32, "PRECISION": "ieee", "STAGES": 3}
    program = compiled(gate_kernel, constants, "bf16", 4, capability)
    assert 0 < program.metadata.shared <= SHARED_BYTES[capability]
