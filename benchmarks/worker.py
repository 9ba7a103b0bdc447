"""The workers' script in the benchmarks: a loop of all_reduce over gloo that writes down when it got where.

With BENCH_HEEDS=1 it looks at notices, and leaves when all ranks agree that there is one.

Environment: BENCH_EVENTS (a file to append to), BENCH_NODE (the node's name), BENCH_PAUSE_S (between two rounds),
BENCH_CELLS (a folder: the time of this process's last round, in eight bytes of a mapped file named after its pid).
"""

import time

_first_line_s = time.clock_gettime(time.CLOCK_BOOTTIME)

import json  # noqa: E402
import mmap  # noqa: E402
import os  # noqa: E402
import secrets  # noqa: E402
import struct  # noqa: E402

STEADY_ROUNDS = 50
CELL = struct.Struct("d")

_file = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def make_cell() -> mmap.mmap:
    """Written to as to memory, so that noting every round slows none; readable when this process was killed."""
    handle = os.open(os.path.join(os.environ["BENCH_CELLS"], str(os.getpid())), os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(handle, CELL.size)
    cell = mmap.mmap(handle, CELL.size)
    os.close(handle)
    return cell


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


def report_progress() -> None:
    """As training does: workers that are killed one after the other before any progress are restarted with pauses."""
    from elastic_agent import client

    client.heartbeat()


tell("first_line", _first_line_s)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

tell("imported")
dist.init_process_group("gloo")
tell("process_group")

# The sum is rank 0's number: all workers with the same sum are in the same world, under any launcher.
token = torch.tensor([secrets.randbits(62) if dist.get_rank() == 0 else 0])
dist.all_reduce(token)
tell("collective", world=f"{token.item():x}", world_size=dist.get_world_size())

cell = make_cell()
pause_s = float(os.environ.get("BENCH_PAUSE_S", "0.01"))
agreement = None
if os.environ.get("BENCH_HEEDS") == "1":
    from elastic_agent import client

    agreement = client.Agreement()
rounds = 0
while True:
    dist.all_reduce(torch.ones(256))
    CELL.pack_into(cell, 0, time.clock_gettime(time.CLOCK_BOOTTIME))
    rounds += 1
    if rounds == STEADY_ROUNDS:
        tell("steady", world=f"{token.item():x}", world_size=dist.get_world_size())
        report_progress()
    if agreement is not None and agreement.notice() is not None:
        tell("left")
        client.leave()
    time.sleep(pause_s)
