"""Where Triton cannot run, a picked backend says so in one line; and the backend that runs anywhere, on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import assert_as_good_as, external_inputs

from processes import finish, start
from tokenmix.errors import UserError
from tokenmix.ops.external import external_attention

SAY = """
import sys, torch
from tokenmix.errors import UserError
from tokenmix.ops import external_attention
print('tokenmix.kernels.external' in sys.modules)
for missing in (False, True):
    if missing: sys.modules['triton'] = None
    try: external_attention(torch.ones(1, 1, 4, 8), torch.ones(3, 8), torch.ones(3, 8), backend='triton')
    except UserError as error: print(error)
"""


def test_without_a_device_and_without_triton_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = finish(start(SAY, output=tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr
    loaded, device, package = done.stdout.splitlines()
    assert loaded == "False"
    assert "needs a CUDA device, got cpu; use backend='eager'" in device
    assert "needs the package triton; pip install triton" in package


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 2}, "one Sinkhorn step, got num_steps=2"),
        ({"chunk_size": 4}, "got chunk_size=4"),
        ({"dropout": 0.5}, "dropout=0.5"),
    ],
)
def test_options_that_a_backend_has_not(backend: Any, options: dict[str, Any], message: str) -> None:
    inputs = external_inputs(1, 1, 6, 4, 4, 3, dtype=torch.float32)
    with pytest.raises(UserError, match=message):
        external_attention(**inputs, **options, backend=backend)


@pytest.mark.parametrize("normalization", ["double", "softmax"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sdpa_equals_the_eager_op(dtype: torch.dtype, masked: bool, normalization: Any) -> None:
    inputs = external_inputs(3, 2, 37, 8, 8, 5, dtype=dtype)
    mask = torch.rand(3, 37, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[1] = False

    def run(backend: Any) -> Any:
        return lambda **tensors: external_attention(
            **tensors, mask=mask if masked else None, normalization=normalization, backend=backend
        )

    assert_as_good_as(run("sdpa"), run("eager"), inputs)
