"""Trains in vain: in each generation, worker b/1 fails in the way that the next argument names; the last one finishes.

What a name means is in `KINDS`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

NODE = os.environ["ELASTIC_AGENT_NODE_ID"]
FOLDER = Path(os.environ["SCREEN_FOLDER"])


def fail(error: BaseException) -> None:
    raise error


def terminate_itself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()


def fail_at_exit() -> None:
    atexit.register(lambda: dist.all_reduce(torch.ones(10)) and 1 / 0)
    raise KeyError("labels")


def take_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], is_master=True)


def broadcast_twice() -> None:
    dist.broadcast(torch.ones(10), 0)
    dist.broadcast(torch.ones(10), 0)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """``make``: makes one."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._make()


def damaged_sample() -> torch.Tensor:
    raise ValueError("cannot identify image file '/data/img_17.png'")


def deadlocked_sample() -> torch.Tensor:
    threading.Event().wait()
    return torch.ones(1)


def load(make: Callable[[], torch.Tensor], batch_size: int = 1, num_workers: int = 1) -> None:
    for _ in torch.utils.data.DataLoader(Samples(make), batch_size=batch_size, num_workers=num_workers):
        pass


KINDS: dict[str, Callable[[], object]] = {
    "exception": lambda: fail(ValueError("expected 128 features, got 127")),
    "exit-3": lambda: sys.exit(3),
    "exit-0": lambda: os._exit(0),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigsegv": lambda: ctypes.string_at(0),
    "sigabrt": os.abort,
    "sigterm": terminate_itself,
    "disk-full": lambda: (FOLDER / "small" / "checkpoint").write_bytes(bytes(1 << 20)),
    "not-shared": lambda: torch.load(FOLDER / "only-on-a" / "checkpoint.pt"),
    "other-size": lambda: dist.all_reduce(torch.ones(7)),
    "atexit": fail_at_exit,
    "loader-exception": lambda: load(damaged_sample),
    "shm": lambda: load(lambda: torch.ones(1 << 19), 8, 2),
    "port-taken": take_the_port,
    "gloo-timeout": lambda: threading.Event().wait(60),
    "elsewhere": lambda: threading.Event().wait(),
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "other-collective": broadcast_twice,
    "deadlocked-loader": lambda: load(deadlocked_sample),
    "uneven": lambda: dist.barrier(),
}


def write_noise() -> None:
    """Write what libraries write in runs that succeed."""
    sys.stderr.write(Path(os.environ["SCREEN_NOISE"]).read_text())


def main() -> None:
    name = sys.argv[int(os.environ["ELASTIC_AGENT_GENERATION"])]
    is_odd = (NODE, os.environ["LOCAL_RANK"]) == ("b", "1")
    if is_odd and "SCREEN_NOISE" in os.environ and name != "none":
        write_noise()
        atexit.register(write_noise)
    if name == "nccl":
        dist.init_process_group("nccl")
    if name == "gloo-interface" and is_odd:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
    dist.init_process_group("gloo", timeout=timedelta(seconds=20 if name == "gloo-timeout" else 1800))
    for step in range(20):
        if step == 10 and is_odd:
            KINDS.get(name, int)()
        if name == "none":
            continue
        dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
