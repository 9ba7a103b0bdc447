"""All-reduces of six workers, some of which fail when an order says so; each notes the moment before it does.

Environment: CAUSES_FOLDER, in which the orders (`order.GENERATION.json`) and the moments (`moments.jsonl`) are.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = Path(os.environ["CAUSES_FOLDER"])
GENERATION = int(os.environ["ELASTIC_AGENT_GENERATION"])
WORKER = f"{os.environ['ELASTIC_AGENT_NODE_ID']}/{os.environ['LOCAL_RANK']}"
GROUP_TIMEOUT_S = 3.0
PAUSE_S = 0.004
STEADY_STEPS = 10


def fail(
    error: BaseException, cause: BaseException | None = None, *, beside_a_collective: bool = False
) -> None:
    try:
        raise error from cause
    finally:
        if beside_a_collective:
            dist.barrier()


def chained() -> None:
    try:
        {}[f"label on {WORKER}"]
    except KeyError as error:
        raise RuntimeError("the data set cannot be read") from error


def abort(message: str) -> None:
    print(message, file=sys.stderr)
    os.abort()


def log_and_exit(error: RuntimeError) -> None:
    print(f"training failed: {type(error).__name__}", file=sys.stderr)
    sys.exit(1)


class _Damaged(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        wait_until(self._at_s)
        note("loader exception")
        raise ValueError(f"cannot identify image file of {WORKER}")


NCCL_ERROR = (
    "NCCL error in: NCCLUtils.hpp:317, invalid usage (run with NCCL_DEBUG=WARN for details)\n"
    "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"
)
CUDA_MEMORY = f"CUDA out of memory. Tried to allocate 2.00 GiB on {WORKER}."
FILE = FOLDER / "small" / f"checkpoint-{WORKER.replace('/', '-')}"

KINDS: dict[str, Callable[[], object]] = {
    "exception": lambda: fail(ValueError(f"bad sample on {WORKER}")),
    "chained exception": chained,
    "exception in a finally": lambda: fail(ValueError(f"bad sample on {WORKER}"), beside_a_collective=True),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGABRT": os.abort,
    "os._exit(3)": lambda: os._exit(3),
    "sys.exit(3)": lambda: sys.exit(3),
    "sys.exit(message)": lambda: sys.exit(f"no data on {WORKER}"),
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit(0)": lambda: os._exit(0),
    "out of memory": lambda: torch.empty(1 << 50),
    "disk full": lambda: FILE.write_bytes(bytes(1 << 20)),
    "CUDA out of memory": lambda: fail(torch.OutOfMemoryError(CUDA_MEMORY)),
    "CUDA error": lambda: fail(RuntimeError("CUDA error: uncorrectable ECC error encountered")),
    "NCCL error": lambda: fail(RuntimeError(NCCL_ERROR)),
    "hang": lambda: threading.Event().wait(),
}
"""What ends a worker, by name."""

UNCAUGHT = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  "

REACTIONS: dict[str, Callable[[RuntimeError], object]] = {
    "none": fail,
    "chained": lambda error: fail(SystemError("training failed"), error),
    "another exception": lambda error: fail(SystemError("training failed")),
    "logs, sys.exit(1)": log_and_exit,
    "os._exit(7)": lambda error: os._exit(7),
    "aborts": lambda error: abort(f"{UNCAUGHT}{error}"),
}
"""What a worker does when its collective has failed, by name."""


# -- the loop -------------------------------------------------------------------------------------


def note(what: str, **more: object) -> None:
    """One line, in one write."""
    line = {
        "kind": what,
        "boottime_s": time.clock_gettime(time.CLOCK_BOOTTIME),
        "worker": WORKER,
        "rank": int(os.environ["RANK"]),
        "generation": GENERATION,
        **more,
    }
    with (FOLDER / "moments.jsonl").open("ab", buffering=0) as file:
        file.write((json.dumps(line) + "\n").encode())


def ordered() -> dict[str, Any] | None:
    try:
        return json.loads((FOLDER / f"order.{GENERATION}.json").read_bytes())
    except FileNotFoundError:
        return None


def wait_until(at_s: float) -> None:
    """Until this moment (CLOCK_BOOTTIME), as exactly as the machine allows."""
    time.sleep(max(0.0, at_s - time.clock_gettime(time.CLOCK_BOOTTIME) - 0.001))
    while time.clock_gettime(time.CLOCK_BOOTTIME) < at_s:
        pass


def act(name: str, at_s: float) -> None:
    """Fail at this moment."""
    if name == "loader exception":  # its process is started before, and notes the moment
        next(iter(torch.utils.data.DataLoader(_Damaged(at_s), num_workers=1)))
    else:
        wait_until(at_s)
        note(name)
        KINDS[name]()


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    order: dict[str, Any] | None = None
    step = 0
    while True:
        is_time = order is not None and time.clock_gettime(time.CLOCK_BOOTTIME) > order["leave_s"]
        votes = torch.full((256,), float(is_time))
        try:
            dist.all_reduce(votes)
        except RuntimeError as error:
            REACTIONS[(order or {}).get("reactions", {}).get(WORKER, "none")](error)
        step += 1
        if step == STEADY_STEPS:
            note("training")
        if order is not None and votes[0] > 0 and WORKER in order["acts"]:  # in the same step on all of them
            act(*order["acts"][WORKER])
        order = order or ordered()
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
