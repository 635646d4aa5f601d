"""The kernels compiled for GPUs that are not here: shared memory and registers stay within the chip's.

Triton brings its own assembler, so this needs no driver.
"""

import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tokenmix.kernels.external_kernels import (  # noqa: E402
    backward_emit_kernel,
    backward_sums_kernel,
    emit_kernel,
    merge_kernel,
    slot_sums_kernel,
)
from tokenmix.kernels.support import MAX_SLOTS, padded_size, tiles_of  # noqa: E402

# What a program may take at most, from the CUDA programming guide's table of compute capabilities.
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
# What all programs of an sm_90 multiprocessor share; each takes 1 KiB more than it asks for.
REGISTERS, SHARED = 64 * 1024, 228 * 1024
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
SUMS = {"partial", "offset", "sums", "grad_key", "grad_value"}
BACKWARD = partial(tiles_of, backward=True)
KERNELS = [
    (slot_sums_kernel, tiles_of),
    (emit_kernel, tiles_of),
    (backward_sums_kernel, BACKWARD),
    (backward_emit_kernel, BACKWARD),
]


def compiled(kernel: Any, constants: dict[str, Any], number: str, warps: int, capability: int) -> Any:
    """The kernel for tensors of `number`, columns side by side, no mask.

    Every pointer, stride and count is declared a multiple of 16, but for the counts that Triton is told to take as they
    come.
    """
    signature: dict[str, Any] = {}
    values: dict[tuple[int, ...], Any] = {}
    facts: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants or name.startswith("mask"):
            signature[name], values[(i,)] = "constexpr", constants.get(name)
        elif name.endswith("_strides"):
            axes = 2 if name in ("key_strides", "value_strides") else 4
            signature[name] = (*["i32"] * (axes - 1), "constexpr")
            values[(i, axes - 1)] = 1
            facts.update({(i, j): [["tt.divisibility", 16]] for j in range(axes - 1)})
        elif name.startswith("num_"):
            signature[name] = "i32"
            if not kernel.params[i].do_not_specialize:
                facts[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "*fp32" if name in SUMS else f"*{number}"
            facts[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, facts)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def external(kernel: Any, choose: Any, slots: int, width: int, number: str, capability: int) -> Any:
    tiles = choose(width, slots, BYTES[number])
    block = padded_size(width, tiles.columns)
    sizes = {"S": slots, "D": width, "DV": width, "BLOCK_N": tiles.tokens, "BLOCK_S": padded_size(slots, MAX_SLOTS)}
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


@pytest.mark.slow
@pytest.mark.parametrize("slots", [64, 128, 256])
def test_a_chip_with_little_shared_memory_is_served(slots: int) -> None:
    for kernel, choose in KERNELS:
        given = partial(choose, shared=SHARED_BYTES[86]) if choose is BACKWARD else choose
        # sm_86 has the memory's layouts of sm_80, for which the assembler is much faster.
        program = external(kernel, given, slots, 64, "fp16", 80)
        assert program.metadata.shared <= SHARED_BYTES[86]


def test_one_program_serves_every_number_of_tokens() -> None:
    for kernel in (merge_kernel, *(kernel for kernel, _ in KERNELS)):
        assert all(given.do_not_specialize for given in kernel.params if given.name.startswith("num_"))


def assembled(program: Any, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, on sm_90."""
    source = folder / "kernel.ptx"
    source.write_text(program.asm["ptx"])
    command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(folder / "kernel.o")]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return tuple(int(re.search(what, told)[1]) for what in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))


@pytest.mark.slow
@pytest.mark.parametrize("slots", [64, 128, 256])
@pytest.mark.parametrize(("kernel", "choose"), KERNELS, ids=lambda part: getattr(part, "__name__", ""))
def test_nothing_spills_and_as_many_programs_fit_as_tiles_say(
    kernel: Any, choose: Any, slots: int, tmp_path: Path
) -> None:
    program, tiles = external(kernel, choose, slots, 64, "bf16", 90), choose(64, slots, 2)
    registers, spilled = assembled(program, tmp_path)
    assert spilled == 0
    assert tiles.programs * tiles.warps * 32 * (registers + -registers % 8) <= REGISTERS
    assert tiles.programs * (program.metadata.shared + 1024) <= SHARED
