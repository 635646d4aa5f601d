"""Limits of the machine that a loader meets."""

import resource

import pytest

from tokenmix.errors import UserError
from tokenmix.lab.data import indexed


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
