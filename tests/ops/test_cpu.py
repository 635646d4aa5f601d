"""Which processor it is, from what the system says of it."""

import pytest

from tokenmix.ops import cpu

ZEN_5 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC 9B45
"""
XEON = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\n"


@pytest.mark.parametrize(
    ("said", "expected"),
    [(ZEN_5, ("AuthenticAMD", 26)), (XEON, ("GenuineIntel", 6)), (ARM, ("", 0)), ("", ("", 0))],
)
def test_maker_and_family(said, expected, tmp_path):
    (tmp_path / "cpuinfo").write_text(said)
    assert cpu.maker_and_family(tmp_path / "cpuinfo") == expected


def test_without_the_file_as_on_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu.platform, "processor", lambda: "AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD")
    assert cpu.maker_and_family(tmp_path / "none") == ("AuthenticAMD", 25)
    monkeypatch.setattr(cpu.platform, "processor", lambda: "arm")
    assert cpu.maker_and_family(tmp_path / "none") == ("", 0)
