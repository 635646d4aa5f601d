"""Limits of the machine that a loader meets."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmix.errors import UserError
from tokenmix.lab.data import indexed

MEMORY = """
import resource, torch
from tokenmix.environment import keep_freed_memory
from tokenmix.lab.data.indexed import IndexedDataset, make_loader

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 2**20

class Used(IndexedDataset):
    def __len__(self):
        return 1

    def read(self, indices, epoch):
        before = resident()
        torch.ones(4 << 20)  # 16 MB, freed
        return resident() - before

if __name__ == "__main__":
    keep_freed_memory()
    for workers in (1, 0):
        print(*make_loader(Used(), batch_size=1, shuffle=False, seed=0, workers=workers))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps memory")
def test_loader_processes_return_large_memory(tmp_path: Path):
    """Though the process that starts them keeps it, in training on a CPU."""
    (tmp_path / "memory.py").write_text(MEMORY)
    done = subprocess.run([sys.executable, "memory.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    returned, kept = map(int, done.stdout.split())
    assert kept > 8 > returned


@pytest.mark.parametrize(("hard", "works"), [(20, False), (4096, True), (resource.RLIM_INFINITY, True)])
def test_loader_processes_need_open_files(monkeypatch: pytest.MonkeyPatch, hard: int, works: bool):
    """With too few of them a batch never arrives, and nothing says so."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    if works:
        indexed._check_open_files(2)
        assert given == [(128, hard)]
    else:
        with pytest.raises(UserError, match=r"workers=2 needs 128 open files, 20 are allowed; raise ulimit -n"):
            indexed._check_open_files(2)
        assert given == []
