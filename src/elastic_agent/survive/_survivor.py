"""Lets this worker outlive its world: it leaves it when another worker is lost, and goes on in the next one.

The agent says on a line of its own when the world is to be left. Then a thread aborts the communicators of NCCL, and
ends the connections of gloo, so that the collective in which the main thread waits fails; the latter again and again,
as one that just begins may miss it once. The main thread ends its process group, returns to the last step boundary,
says that it is parked, and waits to be told in which world it goes on, or that there is none: then the error of the
collective is raised.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elastic_agent import client
from elastic_agent import worker_variables as variables
from elastic_agent.survive._sockets import Sockets, group_calls, shut_down

_AGAIN_S = 0.01

_CONNECTION_ENDED = re.compile(
    r"gloo/\S*pair\.cc\S* (Connection closed by peer|(Read error|Write error|writev) .*([Rr]eset|Broken pipe))"
    r"|ncclRemoteError"
)
"""What gloo and NCCL say when a connection has ended."""
_OWN_FAULT = re.compile(r"enforce fail|[Tt]imed out")
"""What is in errors of collectives that say nothing about another worker."""


class LeftWorldError(BaseException):
    """This worker leaves its world. Handlers of Exception do not catch it, as it is no error."""


class Survivor:
    """This worker, over all worlds in which one training takes part."""

    def __init__(self, address: str) -> None:
        """Connect to the agent.

        Raises:
            OSError: it does not listen.
        """
        self._generation = client.current().placement.generation
        self._pid = os.getpid()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._line.bind("")
        self._line.connect("\0" + address)
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        """Where to go on; None: nowhere."""
        self._in_world = threading.Event()
        self._is_told_to_park = False
        self._group: dist.ProcessGroup | None = None
        """The process group of this world; None: it is aborted, or ends in good order."""
        self._group_ends = threading.Lock()
        self._connections: Sockets = {}
        """Those of the process group."""
        self._group_calls: int | None = None
        """Tells whether the script has made another process group since."""
        self._models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        threading.Thread(target=self._listen, name="survive", daemon=True).start()

    @classmethod
    def of_worker(cls) -> Survivor | None:
        """Return this worker; None if it is not to outlive a world, or cannot: it has no agent, or may use a GPU.

        Nor if it has made a process group before: the workers that are started again would wait in that for this one.
        """
        address = os.environ.get(variables.PROGRESS)
        is_wanted = variables.PARKING in os.environ
        is_main = threading.current_thread() is threading.main_thread()
        if not address or not is_wanted or not is_main or not client.is_monitored():
            return None
        if group_calls() != 0 or (torch.cuda.is_available() and not keeps_gpus()):
            return None
        try:
            return cls(address)
        except OSError:
            return None

    # -- in a world ---------------------------------------------------------------------------------

    def made(self, model: DistributedDataParallel, connections: Sockets) -> None:
        """Take note of a model of this world, in whose process group these connections are; this worker can park."""
        self._models.add(model)
        if not self._in_world.is_set():
            self._group, self._connections, self._group_calls = dist.group.WORLD, connections, group_calls()
            self._in_world.set()
            self._say("can park")

    @property
    def _can_park(self) -> bool:
        """Whether the process group of this world is the only one: what waits in another one would not be freed."""
        return self._in_world.is_set() and group_calls() == self._group_calls

    def _listen(self) -> None:
        """Wait for what the agent says: as a thread."""
        while True:
            try:
                message = self._line.recv(1 << 18)
            except OSError:
                return
            if not message:
                return
            if message.startswith(b"{"):
                self._orders.put(json.loads(message))
            elif message == b"raise":
                self._orders.put(None)
            elif self._in_world.is_set() and not self._can_park:
                self._say("cannot park")
            self._is_told_to_park = message == b"park" and self._can_park
            while message == b"park" and self._can_park:
                self._abort()
                shut_down(self._connections)
                time.sleep(_AGAIN_S)

    def _abort(self) -> None:
        """End the collectives of NCCL; those of gloo cannot be aborted."""
        with self._group_ends:
            group, self._group = self._group, None
            if group is not None and group is dist.group.WORLD:
                # Where it fails, this worker does not park in time, and is started again.
                with contextlib.suppress(RuntimeError):
                    group.abort()

    def release_group(self) -> None:
        """Leave the process group alone from now on: it is destroyed."""
        with self._group_ends:
            self._group = None

    @property
    def is_told_to_leave(self) -> bool:
        """Whether the world is to be left, and the collectives of NCCL may have been aborted."""
        return self._is_told_to_park and self._can_park

    def leave_if_told(self) -> None:
        """Leave the world before the parameters change: perhaps no collective comes that could be ended.

        An all-reduce by NCCL may still run, and when it is aborted, the gradients are those of no step: it is awaited.
        """
        if self._can_park and has_used_gpu() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
        if self.is_told_to_leave:
            raise LeftWorldError("the world is left, and this worker is not at a step to which it can return")

    # -- between two worlds -------------------------------------------------------------------------

    def await_world(self) -> None:
        """Wait until this worker, which was started apart from any world, has a place in one."""
        self._say("can park")
        self._say("has parked")
        order = self._orders.get()
        if order is None:
            raise SystemExit("elastic_agent.survive: there is no world for this worker")
        self._go_on(order)

    def outlives(self, error: BaseException, rewind: Callable[[], None]) -> bool:
        """Leave the world if ``error`` says that it is broken, and wait for the next one.

        Args:
            error: ends the training function.
            rewind: returns to the last step boundary.

        Returns:
            Whether this worker goes on in the next world; otherwise ``error`` is to be raised.
        """
        is_aborted = self._is_told_to_park and isinstance(error, dist.DistBackendError)
        if os.getpid() != self._pid or not self._can_park or not (is_aborted or _says_world_is_broken(error)):
            return False
        traceback.clear_frames(error.__traceback__)
        for model in list(self._models):
            # Its hooks would be called for parameters in the next world, if something refers to it.
            for name in ("reducer", "logger"):
                model.__dict__.pop(name, None)
        self._models.clear()
        try:
            self._abort()
            if has_used_gpu():
                torch.cuda.synchronize()  # raises if this process cannot use its GPU any more
            if dist.is_initialized():
                dist.destroy_process_group()
            rewind()
        except Exception:  # the first error says more
            return False
        finally:
            self._in_world.clear()
            self._is_told_to_park = False
        self._say("has parked")
        order = self._orders.get()
        if order is not None:
            self._go_on(order)
        return order is not None

    def _go_on(self, order: dict[str, Any]) -> None:
        """Take the variables and the files of the next world."""
        os.environ.update(order["variables"])
        self._generation = order["generation"]
        for descriptor, stream in ((1, "stdout"), (2, "stderr")):
            _move(descriptor, order[stream])
        self._say("goes on")

    def close(self) -> None:
        """End the line: this worker outlives no world any more."""
        self._in_world.clear()
        self._say("cannot park")
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)  # which ends the thread

    def _say(self, what: str) -> None:
        words = {
            "slot": int(os.environ[variables.SLOT]),
            "generation": self._generation,
            "pid": self._pid,
            "parking": what,
        }
        with contextlib.suppress(OSError):  # without an agent, this worker ends soon
            self._line.send(json.dumps(words).encode())


def keeps_gpus() -> bool:
    """Return whether the user has asked to keep workers that may use a GPU."""
    return os.environ.get(variables.SURVIVE_GPU) == "1"


def is_apart() -> bool:
    """Return whether this worker was started apart from any world, and has had none yet."""
    return os.environ.get(variables.PARKING) == variables.APART


def has_used_gpu() -> bool:
    """Return whether this process has used a GPU of CUDA, and so perhaps NCCL."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _says_world_is_broken(error: BaseException) -> bool:
    """Return whether the connection to another worker has ended; any other error is the script's."""
    if isinstance(error, LeftWorldError):
        return True
    if not isinstance(error, RuntimeError) or _OWN_FAULT.search(str(error)):
        return False
    return isinstance(error, dist.DistNetworkError) or _CONNECTION_ENDED.search(str(error)) is not None


def _move(descriptor: int, path: str | None) -> None:
    """Have what is written to a standard stream go to another file, if it goes to one of the agent's files."""
    if not path or path == os.devnull:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
