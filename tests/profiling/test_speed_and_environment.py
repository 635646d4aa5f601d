import itertools
import json
import platform
import re
import time

import pytest
import torch

import tokenmix.environment
from tokenmix.environment import environment, newer_than, warn_untested
from tokenmix.errors import UserError
from tokenmix.models import create_model
from tokenmix.profiling.machine import Timing, time_interleaved
from tokenmix.profiling.units import count, milliseconds, ratio, size, spread, to_markdown
from tokenmix.swap import swap_attention


def test_every_function_runs_once_a_round_and_none_always_behind_the_same():
    calls: list[str] = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    timings = time_interleaved(functions, repeats=20, warmup=1)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert all(len(t.runs) == 20 for t in timings.values())
    followed = {first + then for first, then in itertools.pairwise(calls)}
    assert {x + y for x in "abc" for y in "abc" if x != y} <= followed
    calls.clear()
    time_interleaved(functions, repeats=20, warmup=1)
    assert rounds == ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]


def test_times_are_those_of_the_function():
    timings = time_interleaved({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, repeats=3)
    assert 0.02 <= timings["slow"].q1 <= timings["slow"].median <= timings["slow"].q3 < 0.2
    assert timings["fast"].median < 0.01


def test_quartiles():
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (timing.q1, timing.median, timing.q3) == (2.0, 3.0, 4.0)
    assert Timing.of([2.0]).median == 2.0


def test_no_round_is_refused():
    with pytest.raises(UserError, match="got 0"):
        time_interleaved({}, repeats=0)


def test_environment_is_json_and_names_machine_and_versions():
    found = json.loads(json.dumps(environment()))
    assert found["cpu"]
    assert found["cores"] >= 1
    assert {"tokenmix", "torch", "timm"} <= set(found["versions"])
    assert found["commit"] is None or re.fullmatch("[0-9a-f]{40}", found["commit"])


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("2.14.1+cpu", False),
        ("2.14", False),
        ("2.13.9", False),
        ("2.15.0", True),
        ("2.15.0.dev20261101+cu130", True),
        ("3.0", True),
        ("2.9.1", False),
    ],
)
def test_what_is_newer_than_the_tested_release(version: str, newer: bool):
    assert newer_than(version, "2.14") is newer


def test_a_newer_release_is_one_warning_and_no_refusal(monkeypatch: pytest.MonkeyPatch):
    warn_untested.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.warns(UserWarning, match=r"not tested with torch 2.99.0 \(tested: 2.14\)") as told:
        swap_attention(create_model("vit_nano"), "external")
    assert len([one for one in told if "not tested" in str(one.message)]) == 1
    assert told[0].filename == __file__
    warn_untested.cache_clear()


def test_environment_can_be_told_after_the_newer_setting_of_precision():
    products = torch.backends.cuda.matmul
    before = products.fp32_precision  # type: ignore[attr-defined]
    try:
        products.fp32_precision = "tf32"  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        assert environment()["float32_matmul_precision"] == "tf32"
    finally:
        products.fp32_precision = before  # type: ignore[attr-defined]
    assert environment()["float32_matmul_precision"] == "highest"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (
            "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n",
            "AMD EPYC (family 25, model 17)",
        ),
        ("processor\t: 0\nmodel name\t: ARMv8\n", "ARMv8"),
        ("processor\t: 0\n", platform.machine()),
        (None, platform.processor() or platform.machine()),
    ],
)
def test_name_of_the_processor(lines, name, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenmix.environment, "CPUINFO", tmp_path / "cpuinfo")
    if lines is not None:
        (tmp_path / "cpuinfo").write_text(lines)
    assert environment()["cpu"] == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (count(999), "999"),
        (count(1_234_567), "1.23 M"),
        (count(123_456), "123 k"),
        (size(1536), "1.5 KiB"),
        (size(3 << 30), "3 GiB"),
        (milliseconds(0.012345), "12.3"),
        (milliseconds(2.5), "2,500"),
        (ratio(3, 2), "1.5×"),
        (ratio(1, 0), "–"),
        (spread(0.81234, None), "0.8123"),
        (spread(0.81234, 0.004), "0.8123 ± 0.0040"),
    ],
)
def test_units(text: str, expected: str):
    assert text == expected


def test_a_bar_in_a_name_does_not_end_a_cell():
    assert to_markdown(["variant", "recall of a|b"], [["x|y", "1"]]).splitlines() == [
        r"| variant | recall of a\|b |",
        "|---|---:|",
        r"| x\|y | 1 |",
    ]
