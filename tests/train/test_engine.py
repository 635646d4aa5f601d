"""What a process is set up with for training on a CPU."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from tokenmix.environment import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [torch.zeros(6_000_000) for _ in range(4)]
        del blocks
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10
faults()
given_back = faults()
keep_freed_memory()
faults()
print(given_back, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is set")
def test_freed_memory_is_kept():
    """Four blocks of 24 MB, freed and taken again, are 23,000 pages of 4 KiB."""
    # Set, the threshold stays; else glibc raises it when a block is freed, and what lies above the next on its heap
    # decides whether they are given back.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    assert given_back > 5_000
    assert kept < 500
