"""Counts the optimizer steps of a worker, for its agent.

The agent shows the count where the script reports no steps. It also warns the user of workers that take optimizer steps
without a process group, or took none until their end: a worker tells the first at its tenth step, and the second when
its script has ended; it is not asked. Workers call :func:`install` when ``torch.optim`` is there.
"""

from __future__ import annotations

import atexit
import contextlib
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

_COMPILER = "torch._inductor.compile_fx"
"""Is there once something has been compiled."""


def install() -> None:
    """Begin to count; once, and only in a worker of an agent that listens."""
    address = os.environ.get(PROGRESS)
    if address:
        count = _Count(address)
        private_names.watch_optimizer_steps(count.begin, count.end_step)
        atexit.register(count.end)


class _Count:
    """The steps of one process, by optimizer.

    A step within another one counts once. Of several optimizers that step in turn, those of a GAN or one for each
    parameter, the one with the fewest steps counts. If an optimizer comes later than the others or is left behind, the
    count is not known.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._worker = os.getpid()
        self._stepping = 0
        """The optimizer whose step began last, if it has not ended; 0: none."""
        self._first = 0
        """The first optimizer that made a step; 0: none has."""
        self._steps: dict[int, int] = {}
        self._fewest = 0
        """Steps that every optimizer has made."""
        self._behind = 0
        """The number of optimizers that have made no more."""
        self._shown = 0
        self._cell: memoryview[int] | None = None
        """The place where the agent reads the count; None: before the first step, or if the count is not known."""
        self._is_known = True
        self._is_checked = False
        """It is known that the worker has a process group, or the agent was told that it has none."""

    def begin(self, optimizer: object) -> None:
        """Remember which optimizer steps; within the step of another one, that one is meant."""
        self._stepping = id(optimizer)

    def end_step(self, optimizer: object) -> None:
        """Count the step, once. Never raises: the script's training goes on whatever is known of it."""
        key = id(optimizer)
        if self._stepping != key:
            return
        self._stepping = 0
        if os.getpid() != self._worker:
            return
        steps = self._steps[key] = self._steps.get(key, 0) + 1
        self._first = self._first or key
        try:
            if self._is_known:
                self._count(steps)
            if not self._is_checked and key == self._first:
                self._is_checked = self._check_group(steps)
        except Exception:
            self._is_known = False

    def _count(self, steps: int) -> None:
        is_late = steps == 1 and self._fewest > FEW
        if is_late or steps > FEW * (self._fewest + 1):
            self._show(0)
            self._is_known = False
            return
        self._behind -= steps == self._fewest + 1
        if steps == 1 or not self._behind:
            made = [*self._steps.values()]  # at once: other threads may step other optimizers
            self._fewest = min(made)
            self._behind = made.count(self._fewest)
            self._show(max(self._shown, self._fewest))

    def _show(self, steps: int) -> None:
        if not self._shown:  # here: scripts without an optimizer have no use for it
            self._cell = _cell_of_this_worker()
        self._shown = steps
        if self._cell is not None:
            self._cell[OPTIMIZER_STEPS] = steps

    def _check_group(self, steps: int) -> bool:
        """Tell the agent if there is no process group at the last of a few steps; return whether that is known."""
        import torch.distributed as dist

        if not dist.is_available() or dist.is_initialized():
            return True
        if steps < FEW:
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
        if os.getpid() != self._worker or self._first or _has_had_children():
            return
        if not any(package in sys.modules for package in (*_SHARE_GRADIENTS, _COMPILER)):
            with contextlib.suppress(OSError, KeyError, ValueError):
                self._tell("took_no_step")

    def _tell(self, fact: str) -> None:
        message = {
            "slot": int(os.environ[SLOT]),
            "generation": int(os.environ[GENERATION]),
            "pid": self._worker,
            fact: True,
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


def _has_had_children() -> bool:
    import resource  # here, as few scripts need it

    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there are none now
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
    return True
