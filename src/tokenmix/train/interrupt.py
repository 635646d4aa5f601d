"""Ctrl-C and SIGTERM: a request to stop after the current step."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenmix.train.distributed import distributed_info


class Interrupted(Exception):
    """The run was asked to stop and has been saved."""


class StopRequest:
    """Whether Ctrl-C was pressed, or SIGTERM came."""

    def __init__(self) -> None:
        self.asked, self.owner = False, os.getpid()
        self.before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(self, signum: int, frame: Any) -> None:
        """Request a stop once. A second Ctrl-C interrupts; SIGTERM often comes twice, to a process and to its group."""
        signal.signal(signal.SIGINT, self.before[signal.SIGINT])
        # Processes that load images inherit this handler, and get the same Ctrl-C.
        if not self.asked and distributed_info().first and os.getpid() == self.owner:
            print("\nstopping after this step; Ctrl-C now stops without saving", file=sys.stderr, flush=True)
        self.asked = True


@contextmanager
def listen() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C, and SIGTERM, into a request to stop after the current step."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    for number in request.before:
        signal.signal(number, request.note)
    try:
        yield request
    finally:
        for number, handler in request.before.items():
            signal.signal(number, handler)
