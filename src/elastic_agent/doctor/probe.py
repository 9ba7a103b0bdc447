"""Examines machines together: the worker of the doctor's run, one on each machine.

What the workers found is exchanged through the store that every worker of a run has; so that needs neither gloo nor a
port of its own. It reads its task from a file of the folder that the command made, and leaves in it what all workers
found.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from elastic_agent.files import write_atomically
from elastic_agent.transport import interface_of, resolve, source_towards
from elastic_agent.worker_variables import LAUNCH_FOLDER

from .connections import TEST_S, EchoServer, closed_ports, connect_to_all, targets
from .folders import SharedFolders, unanswered
from .interpreter import REDUCE_S, START_S, reduce
from .machine import in_time
from .records import GATHERED, TASK, Arrived, Ended, Gathered, Reduced, Surroundings, Task

R = TypeVar("R", bound=Struct)

EXCHANGE_S = 15.0
"""The wait for the records of the others beside the time that making them may take; machines may be slow."""
STORAGE_S = 8.0
USELESS = {"gloo-interface", "interpreter"}
"""After an error of these checks, an all-reduce would only wait for its time-out."""


class Exchange:
    """The store of the workers, and this machine's place among them."""

    def __init__(self) -> None:
        """Connect, as every worker does."""
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=EXCHANGE_S),
        )

    def swap(self, record: R, timeout_s: float) -> dict[int, R]:
        """Give the others this machine's record; return those of all machines that came in time, by rank."""
        folder = f"elastic-agent-doctor/{type(record).__name__}"
        self._store.set(f"{folder}/{self.rank}", msgspec.json.encode(record).decode())
        until_s, found = time.monotonic() + timeout_s, {}
        for rank in range(self.size):
            key = f"{folder}/{rank}"
            try:
                self._store.wait([key], timedelta(seconds=max(0.1, until_s - time.monotonic())))
                found[rank] = msgspec.json.decode(self._store.get(key), type=type(record))
            except (DistStoreError, msgspec.MsgspecError):  # it came too late, or is none
                continue
        return found


async def examine(task: Task) -> Gathered:
    """Examine this machine together with the others."""
    exchange, echo = Exchange(), EchoServer()
    address = task.address or source_towards(*resolve(os.environ["MASTER_ADDR"])[0])
    place = await echo.listen(address, task.ports)
    here = Arrived(task.local, place, interface_of(address) or "", secrets.token_hex(4))
    arrived = await asyncio.to_thread(exchange.swap, here, EXCHANGE_S)
    # A folder that one machine was given has to be on all.
    paths = [
        Path(path)
        for path in dict.fromkeys(
            folder.path for rank in sorted(arrived) for folder in arrived[rank].local.shared
        )
    ]
    folders = SharedFolders(paths, arrived[min(arrived)].token, exchange.rank)
    peers = {rank: arrived[rank].place for rank in targets(exchange.rank, exchange.size) if rank in arrived}
    try:
        shared, connections, closed = await asyncio.gather(
            in_time(folders.mark, STORAGE_S, unanswered(paths)),
            connect_to_all(peers),
            closed_ports(task.etcd),
        )
        found = Surroundings(tuple(connections), shared, closed)
        tested = await asyncio.to_thread(exchange.swap, found, TEST_S + EXCHANGE_S)
        backends = possible_backends(exchange.size, arrived.values(), tested.values())
        seen = await in_time(lambda: folders.look(exchange.size), STORAGE_S, tuple[tuple[int, ...], ...]())
        reduced: dict[str, Reduced] = {}
        for backend in backends:
            reduced[backend] = await reduce(task.python, backend)
            if reduced[backend].problem:
                break
        limit_s = STORAGE_S + sum(2 * REDUCE_S[backend] + START_S for backend in backends)
        ended = await asyncio.to_thread(exchange.swap, Ended(seen, reduced), limit_s + EXCHANGE_S)
    finally:
        await in_time(folders.remove_marks, STORAGE_S, None)
        echo.close()
    return Gathered(exchange.size, arrived, tested, ended)


def possible_backends(size: int, arrived: Iterable[Arrived], tested: Iterable[Surroundings]) -> list[str]:
    """Return the backends of the all-reduces that all machines take part in; none where they would fail anyway."""
    machines = [machine.local for machine in arrived]
    connections = [connection for surroundings in tested for connection in surroundings.connections]
    is_useless = any(connection.problem for connection in connections) or any(
        finding.is_error and finding.check in USELESS for machine in machines for finding in machine.findings
    )
    if size < 2 or len(machines) < size or is_useless or not all(machine.has_torch for machine in machines):
        return []
    return ["gloo", "nccl"] if all(machine.gpus for machine in machines) else ["gloo"]


def main() -> None:
    """Do the task of the folder, and leave in it what all machines found."""
    folder = Path(os.environ[LAUNCH_FOLDER])
    task = msgspec.json.decode((folder / TASK).read_bytes(), type=Task)
    write_atomically(folder / GATHERED, msgspec.json.encode(asyncio.run(examine(task))))


if __name__ == "__main__":
    main()
