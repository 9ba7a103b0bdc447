"""Has a worker tell its agent that it takes optimizer steps without a process group, so that its user can be warned.

Workers call :func:`install` when ``torch.optim`` is there. A worker tells it once, at its tenth step, and is not asked.
"""

from __future__ import annotations

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


def install() -> None:
    """Begin to count; once, and only in a worker of an agent that listens."""
    address = os.environ.get(PROGRESS)
    if address:
        private_names.call_after_optimizer_steps(_Count(address).is_over)


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
                self._tell()
            except BlockingIOError:  # others tell it at this moment
                return False
            except (OSError, KeyError, ValueError):  # training works without it
                return True
        return True

    def _tell(self) -> None:
        message = {
            "slot": int(os.environ[SLOT]),
            "generation": int(os.environ[GENERATION]),
            "pid": self._worker,
            "trains_alone": True,
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.bind("")
            sender.sendto(json.dumps(message).encode(), socket.MSG_DONTWAIT, "\0" + self._address)
