"""Has a worker tell its agent that it takes optimizer steps without a process group, or took none until its end.

So its user can be warned. Workers call :func:`install` when ``torch.optim`` is there. A worker tells the first once, at
its tenth step, and the second when its script has ended; it is not asked.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys

from elastic_agent.integrations.collectives import private_names
from elastic_agent.worker_variables import GENERATION, PROGRESS, SLOT

__all__ = ["install"]

STEPS = 10
"""A script may take some before its process group is there, to warm up or to measure."""

_SHARE_GRADIENTS = ("hivemind", "horovod", "jax", "mpi4py", "ray", "torchcomms", "torchft")
"""Packages with which workers may train one model without a process group of PyTorch."""

_COMPILER = "torch._inductor.compile_fx"
"""Is there once something has been compiled."""


def install() -> None:
    """Begin to count; once, and only in a worker of an agent that listens."""
    address = os.environ.get(PROGRESS)
    if address:
        count = _Count(address)
        private_names.call_after_optimizer_steps(count.is_over)
        atexit.register(count.end)


class _Count:
    def __init__(self, address: str) -> None:
        self._address = address
        self._worker = os.getpid()
        self._steps = 0
        self._optimizer: int | None = None
        """The first that makes a step: scripts may have one for each parameter."""

    def is_over(self, optimizer: object) -> bool:
        """Count a step; whether the next ones need not be counted."""
        import torch.distributed as dist

        if os.getpid() != self._worker or not dist.is_available() or dist.is_initialized():
            return True
        self._optimizer = self._optimizer or id(optimizer)
        self._steps += self._optimizer == id(optimizer)
        if self._steps < STEPS:
            return False
        if not any(package in sys.modules for package in _SHARE_GRADIENTS):
            try:
                self._tell("trains_alone")
            except BlockingIOError:  # others tell it at this moment
                return False
            except (OSError, KeyError, ValueError):  # training works without it
                return True
        return True

    def end(self) -> None:
        """Tell the agent that no step was taken, if that is certain: compiled steps, children's steps are not seen."""
        if os.getpid() != self._worker or self._optimizer is not None or _has_had_children():
            return
        if not any(package in sys.modules for package in (*_SHARE_GRADIENTS, _COMPILER)):
            with contextlib.suppress(OSError, KeyError, ValueError):
                self._tell("took_no_step")

    def _tell(self, what: str) -> None:
        message = {
            "slot": int(os.environ[SLOT]),
            "generation": int(os.environ[GENERATION]),
            "pid": self._worker,
            what: True,
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.bind("")
            sender.sendto(json.dumps(message).encode(), socket.MSG_DONTWAIT, "\0" + self._address)


def _has_had_children() -> bool:
    import resource  # here, as few scripts need it

    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there are none now
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
    return True
