"""Counts the optimizer steps of a worker, for its agent.

The agent shows the count where the script reports no steps. It also warns the user of workers that take optimizer steps
without a process group: a worker tells that at its tenth step; it is not asked. Workers call :func:`install` when
``torch.optim`` is there.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
from typing import cast

from elastic_agent.exit_note import CELL_BYTES, OPTIMIZER_STEPS
from elastic_agent.integrations.collectives import private_names
from elastic_agent.worker_variables import GENERATION, HEARTBEAT, PROGRESS, SLOT

__all__ = ["install"]

FEW = 10
"""A script may take some steps before its process group is there, to warm up or to measure."""

_SHARE_GRADIENTS = ("hivemind", "horovod", "jax", "mpi4py", "ray", "torchcomms", "torchft")
"""Packages with which workers may train one model without a process group of PyTorch."""


def install() -> None:
    """Begin to count; once, and only in a worker of an agent that listens."""
    address = os.environ.get(PROGRESS)
    if address:
        count = _Count(address)
        private_names.watch_optimizer_steps(count.begin, count.end_step)


class _Count:
    """The steps of one process, by all its optimizers together. A step within another one counts once."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._worker = os.getpid()
        self._stepping = 0
        """The optimizer whose step began last, if it has not ended; 0: none."""
        self._total = 0
        self._cell: memoryview[int] | None = None
        """The place where the agent reads the count; None: before the first step, or if it cannot be had."""
        self._is_checked = False
        """It is known that the worker has a process group, or the agent was told that it has none."""

    def begin(self, optimizer: object) -> None:
        """Remember which optimizer steps; within the step of another one, that one is meant."""
        self._stepping = id(optimizer)

    def end_step(self, optimizer: object) -> None:
        """Count the step, once. Never raises: the script's training goes on whatever is known of it."""
        if self._stepping != id(optimizer):
            return
        self._stepping = 0
        if os.getpid() != self._worker:
            return
        steps = self._total = self._total + 1
        try:
            if steps == 1:  # here: scripts without an optimizer have no use for it
                self._cell = _cell_of_this_worker()
            if self._cell is not None:
                self._cell[OPTIMIZER_STEPS] = steps
            if not self._is_checked:
                self._is_checked = self._check_group(steps)
        except Exception:
            self._cell = None

    def _check_group(self, steps: int) -> bool:
        """Tell the agent if there is no process group at the last of a few steps; return whether that is known."""
        import torch.distributed as dist

        if not dist.is_available() or dist.is_initialized():
            return True
        if steps < FEW:
            return False
        if not any(package in sys.modules for package in _SHARE_GRADIENTS):
            try:
                self._tell_that_it_trains_alone()
            except BlockingIOError:  # others tell it at this moment
                return False
            except (OSError, KeyError, ValueError):  # training works without it
                return True
        return True

    def _tell_that_it_trains_alone(self) -> None:
        message = {
            "slot": int(os.environ[SLOT]),
            "generation": int(os.environ[GENERATION]),
            "pid": self._worker,
            "trains_alone": True,
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.bind("")
            sender.sendto(json.dumps(message).encode(), socket.MSG_DONTWAIT, "\0" + self._address)


def _cell_of_this_worker() -> memoryview[int] | None:
    """Return this worker's cell of its heartbeat file, without claiming it; None if that cannot be had.

    The client claims it for the process that reports heartbeats, which may be a child of this one. The claim is a lock
    that a process gives up when it closes the file, so where the client is, its cell is taken. No descriptor is left.
    """
    client = sys.modules.get("elastic_agent.client")
    if client is not None:
        return cast("memoryview[int] | None", client._pulse._words)
    import ctypes

    try:
        slot = int(os.environ[SLOT])
        fd = os.open(os.environ[HEARTBEAT], os.O_RDWR | os.O_CLOEXEC)
    except (OSError, KeyError, ValueError):
        return None
    try:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        size = os.fstat(fd).st_size
        start = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if start in (None, ctypes.c_void_p(-1).value) or (slot + 1) * CELL_BYTES > size:
        return None
    cell = (ctypes.c_char * CELL_BYTES).from_address(start + slot * CELL_BYTES)
    return memoryview(cell).cast("B").cast("q")
