"""Ctrl-C and SIGTERM: a request to stop at the end of a step, the same one in all processes."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tokenmix.lab.train.distributed import distributed_info


class Interrupted(Exception):
    """The run was asked to stop and has been saved."""


class StopRequest:
    """Whether Ctrl-C was pressed, or SIGTERM came."""

    def __init__(self) -> None:
        self.asked, self.owner = False, os.getpid()
        self.before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(self) -> Callable[[], bool]:
        """Begin to ask all processes whether one of them has a request; what is returned waits for their answers.

        Between the two a step is computed, so that no process waits for this. Of a single process it is its request by
        then.
        """
        if not dist.is_initialized():
            return lambda: self.asked
        asked = torch.tensor(int(self.asked))
        work = dist.all_reduce(asked, dist.ReduceOp.MAX, async_op=True)

        def answer() -> bool:
            work.wait()
            return bool(asked)

        return answer

    def note(self, signum: int, frame: Any) -> None:
        """Request a stop once. A second Ctrl-C interrupts; SIGTERM often comes twice, to a process and to its group."""
        signal.signal(signal.SIGINT, self.before[signal.SIGINT])
        # Processes that load images inherit this handler, and get the same Ctrl-C.
        here = distributed_info()
        if not self.asked and here.first and os.getpid() == self.owner:
            step = "this step" if here.world_size == 1 else "this step or the next"
            print(f"\nstopping after {step}; Ctrl-C now stops without saving", file=sys.stderr, flush=True)
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
