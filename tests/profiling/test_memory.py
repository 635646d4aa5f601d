from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from processes import finish, start
from tokenmix.errors import UserError
from tokenmix.profiling.machine import peak_memory


def test_peak_of_one_tensor_is_its_size():
    assert peak_memory(lambda: torch.empty(1000, 1000)) == 4_000_000


def test_peak_counts_what_lives_at_the_same_time():
    def one_after_the_other() -> None:
        torch.empty(1_000_000)
        torch.empty(1_000_000)

    def together() -> None:
        a = torch.empty(1_000_000)
        b = torch.empty(1_000_000)
        del a, b

    assert peak_memory(one_after_the_other) == 4_000_000
    assert peak_memory(together) == 8_000_000


def test_memory_held_before_is_not_counted():
    held = torch.empty(1_000_000)
    assert peak_memory(lambda: held + torch.empty(())) == 4_000_004


def test_sees_inside_fused_attention():
    q = torch.randn(1, 2, 1024, 16)
    scores = 2 * 1024 * 1024 * 4

    def unfused() -> torch.Tensor:
        return torch.softmax(q @ q.transpose(-1, -2) / 4, -1) @ q

    assert peak_memory(unfused) > scores
    assert q.numel() * 4 <= peak_memory(lambda: F.scaled_dot_product_attention(q, q, q)) < scores / 2


def test_error_inside_escapes_and_the_next_call_works():
    def broken() -> None:
        raise RuntimeError("from inside")

    with pytest.raises(RuntimeError, match="from inside"):
        peak_memory(broken)
    assert peak_memory(lambda: torch.empty(10)) == 40


def test_unwatched_device_is_refused():
    with pytest.raises(UserError, match="mps"):
        peak_memory(lambda: None, "mps")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_peak():
    assert peak_memory(lambda: torch.empty(1 << 20, device="cuda"), "cuda") == 4 << 20


def test_profiler_says_nothing_and_own_output_remains(tmp_path: Path):
    code = (
        "import sys, torch; from tokenmix.profiling.machine import peak_memory\n"
        "before = [torch.ones(1000)]\n"
        "peak_memory(lambda: print('mine', file=sys.stderr) or before.clear())"
    )
    done = finish(start(code, output=tmp_path), tmp_path)
    assert (done.stdout, done.stderr) == ("", "mine\n")
