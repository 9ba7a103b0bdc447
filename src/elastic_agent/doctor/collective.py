"""An all-reduce over all machines, in a process of its own: torch may hang or abort."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from typing import TYPE_CHECKING

from elastic_agent.linux import set_parent_death_signal
from elastic_agent.values import PortRange

from .records import Reduced

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

TIMEOUT_S = 8.0
NCCL_TIMEOUT_S = 15.0
_NUMBERS = 64 * 1024
"""Numbers in the reduced tensor: 256 KiB."""


@dataclass(frozen=True)
class Task:
    """One all-reduce; ``host`` and ``port`` are those of the first rank's store."""

    backend: str
    rank: int
    world_size: int
    host: str
    port: int
    environment: dict[str, str]


class CollectiveProcess:
    """A process forked while this one has a single thread, so that torch is imported only once."""

    def __init__(self) -> None:
        """Import torch, and fork."""
        import torch.distributed  # noqa: F401 - for the child

        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._pipe), daemon=True)
        self._process.start()
        theirs.close()

    async def open_store(self, ports: PortRange | None) -> int:
        """Have the process host the store that all ranks meet at; its port, 0 if there is none."""
        self._send(tuple(ports) if ports is not None else (0,))
        answer = await self._answer(TIMEOUT_S)
        return answer if isinstance(answer, int) else 0

    async def reduce(self, task: Task, timeout_s: float) -> Reduced:
        """Take part in an all-reduce."""
        self._send(task)
        answer = await self._answer(timeout_s + 2.0)
        if isinstance(answer, Reduced):
            return answer
        self._process.kill()
        return Reduced(task.backend, f"did not end within {timeout_s:g} s, or the process died")

    def _send(self, message: object) -> None:
        try:
            self._pipe.send(message)
        except OSError:  # it has died: no answer will come
            return

    async def _answer(self, timeout_s: float) -> object:
        """None: there is none, in time."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._pipe.fileno(), ready.set)
        try:
            async with asyncio.timeout(timeout_s):
                await ready.wait()
            return self._pipe.recv()
        except (OSError, EOFError):  # TimeoutError is an OSError
            return None
        finally:
            loop.remove_reader(self._pipe.fileno())

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _serve(pipe: Pipe, parents: Pipe) -> None:
    """In the process: do what is asked, until the other side closes."""
    parents.close()
    set_parent_death_signal(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    store = None
    try:
        while True:
            message = pipe.recv()
            if isinstance(message, Task):
                pipe.send(_reduce(message))
            else:
                store = _open_store(message)
                pipe.send(store.port if store is not None else 0)
    except (EOFError, OSError):
        pass
    os._exit(0)


def _open_store(ports: tuple[int, ...]) -> TCPStore | None:
    from torch._C._distributed_c10d import TCPStore

    for port in ports:
        try:
            return TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        except RuntimeError:
            continue
    return None


def _reduce(task: Task) -> Reduced:
    import torch
    from torch import distributed
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    os.environ.update(task.environment)
    begun_s = time.monotonic()
    limit_s = NCCL_TIMEOUT_S if task.backend == "nccl" else TIMEOUT_S
    try:
        span = timedelta(seconds=limit_s)
        store = TCPStore(task.host, task.port, None, False, span, wait_for_workers=False)
        named = PrefixStore(task.backend, store)
        distributed.init_process_group(
            task.backend, store=named, rank=task.rank, world_size=task.world_size, timeout=span
        )
        tensor = torch.full((_NUMBERS,), 1.0, device="cuda:0" if task.backend == "nccl" else "cpu")
        distributed.all_reduce(tensor)
        total = float(tensor[0].item())
        distributed.destroy_process_group()
    except Exception as failure:
        line = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        return Reduced(task.backend, line[:400], time.monotonic() - begun_s)
    if total != task.world_size:
        return Reduced(task.backend, f"wrong result: {total}, expected {task.world_size}")
    return Reduced(task.backend, "", time.monotonic() - begun_s)
