"""What the kernels know before they start: how float32 is multiplied, and that all tensors lie on one device."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tokenmix.errors import UserError
from tokenmix.kernels.support import Tiles, input_precision, num_programs, require_triton


@pytest.fixture
def matmul() -> Iterator[object]:
    """`torch.backends.cuda.matmul`; all switches are put back."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    precision = torch.get_float32_matmul_precision()
    yield backends[0]
    torch.set_float32_matmul_precision(precision)
    for backend, value in zip(backends, before, strict=True):
        backend.fp32_precision = value


SWITCHES: dict[str, Callable[[], object]] = {
    "precision": lambda: torch.set_float32_matmul_precision("high"),
    "allow": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "newer": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=list(SWITCHES))
def test_every_switch_of_torch_is_followed(switch: Callable[[], object], matmul: object) -> None:
    assert input_precision(torch.float32) == "ieee"
    switch()
    assert input_precision(torch.float32) == "tf32"
    assert input_precision(torch.bfloat16) == "ieee"


def test_all_tensors_and_the_mask_lie_on_one_device() -> None:
    pytest.importorskip("triton")
    with FakeTensorMode():
        first, second, mask = (torch.empty(2, device=device) for device in ("cuda:0", "cuda:1", "cpu"))
    require_triton("op", first, None, mask=first.bool())
    with pytest.raises(UserError, match=r"one device, got cuda:0, cuda:1; move"):
        require_triton("op", first, second)
    with pytest.raises(UserError, match=r"one device, got cpu, cuda:0; move"):
        require_triton("op", first, mask=mask)


def test_as_many_programs_as_run_at_once_and_blocks_of_columns_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    assert num_programs(torch.device("cuda"), 2) == 264
    pytest.importorskip("triton")
    from tokenmix.kernels import external

    monkeypatch.setattr(external, "num_programs", lambda device, resident: 132 * resident)
    tiles = Tiles(tokens=64, columns=64, warps=4, stages=1, programs=2)
    walk = external._Walk(torch.empty(1, 8, 4096, 512, device="meta"), tiles)
    assert [walk.programs(blocks) for blocks in (1, 8, 500)] == [264, 33, 1]
