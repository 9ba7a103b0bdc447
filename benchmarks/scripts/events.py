"""What the workers of a benchmark write down: lines of JSON in one file, with times of CLOCK_BOOTTIME.

Environment: BENCH_EVENTS (the file to append to), BENCH_NODE (the node's name), BENCH_CELLS (a folder: the time of
each process's last round, in eight bytes of a mapped file named after its pid).
"""

import time

_imported_s = time.clock_gettime(time.CLOCK_BOOTTIME)

import json  # noqa: E402
import mmap  # noqa: E402
import os  # noqa: E402
import secrets  # noqa: E402
import struct  # noqa: E402
from pathlib import Path  # noqa: E402

STEADY_ROUNDS = 50
CELL = struct.Struct("d")
FOLDER = Path(os.environ["BENCH_EVENTS"]).parent

_file = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def tell(event: str, at_s: float | None = None, **more: object) -> None:
    """One line, in one write: several processes share the file."""
    line = {
        "event": event,
        "boottime_s": time.clock_gettime(time.CLOCK_BOOTTIME) if at_s is None else at_s,
        "node": os.environ["BENCH_NODE"],
        "pid": os.getpid(),
        "rank": int(os.environ["RANK"]),
        "generation": int(os.environ.get("ELASTIC_AGENT_GENERATION", "-1")),
        **more,
    }
    os.write(_file, (json.dumps(line) + "\n").encode())


def _make_cell() -> mmap.mmap:
    """Written to as to memory, so that noting every round slows none; readable when this process was killed."""
    handle = os.open(os.path.join(os.environ["BENCH_CELLS"], str(os.getpid())), os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(handle, CELL.size)
    cell = mmap.mmap(handle, CELL.size)
    os.close(handle)
    return cell


class Rounds:
    """The rounds or steps of one worker; :meth:`done` is called after each."""

    def __init__(self) -> None:
        self.number = 0
        self._cell = _make_cell()
        self._world: dict[str, object] = {}

    def meet(self) -> None:
        """Agree on a number by which all workers of a world are recognised, under any launcher."""
        import torch
        import torch.distributed as dist

        token = torch.tensor([secrets.randbits(62) if dist.get_rank() == 0 else 0])
        dist.all_reduce(token)
        self._world = {"world": f"{token.item():x}", "world_size": dist.get_world_size()}
        tell("collective", **self._world)

    def done(self) -> None:
        """A round is over."""
        if not self._world:
            self.meet()
        CELL.pack_into(self._cell, 0, time.clock_gettime(time.CLOCK_BOOTTIME))
        self.number += 1
        if self.number == STEADY_ROUNDS:
            tell("steady", **self._world)


tell("first_line", _imported_s)
