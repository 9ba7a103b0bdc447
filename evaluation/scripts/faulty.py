"""Trains in vain: in each generation, worker b/1 fails in the way that the next argument names; the last one finishes.

What a name means is in `KINDS`. A kind that begins with "says:" raises an error with the text that follows, for errors
of hardware that the machine does not have.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

KINDS: dict[str, Callable[[], object]] = {}
BEFORE: dict[str, Callable[[], object]] = {}
"""What happens before the process group is made, on worker b/1."""
EVERYWHERE: dict[str, Callable[[], object]] = {}
"""What happens before the process group is made, on all workers."""
NODE = os.environ["ELASTIC_AGENT_NODE_ID"]
FOLDER = Path(os.environ["SCREEN_FOLDER"])


def kind(name: str, where: dict[str, Callable[[], object]] = KINDS) -> Callable[[Callable[[], object]], None]:
    def register(function: Callable[[], object]) -> None:
        where[name] = function

    return register


@kind("exception")
def _() -> None:
    raise ValueError("expected 128 features, got 127")


@kind("shapes")
def _() -> None:
    torch.ones(2, 3) @ torch.ones(2, 3)


@kind("missing-module", BEFORE)
def _() -> None:
    import apex  # noqa: F401


@kind("exit-3")
def _() -> None:
    sys.exit(3)


@kind("exit-0")
def _() -> None:
    os._exit(0)


@kind("sigkill")
def _() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@kind("sigsegv")
def _() -> None:
    ctypes.string_at(0)


@kind("sigabrt")
def _() -> None:
    os.abort()


@kind("sigterm")
def _() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()


@kind("disk-full")
def _() -> None:
    (FOLDER / "small" / "checkpoint").write_bytes(bytes(1 << 20))


@kind("disk-full-torch-save")
def _() -> None:
    torch.save({"weights": torch.ones(1 << 20)}, FOLDER / "small" / "checkpoint.pt")


@kind("read-only")
def _() -> None:
    (FOLDER / "read-only" / "checkpoint").write_bytes(b"")


@kind("not-shared")
def _() -> None:
    torch.load(FOLDER / "only-on-a" / "checkpoint.pt")


@kind("permission")
def _() -> None:
    private = FOLDER / "private"
    private.mkdir(mode=0o700, exist_ok=True)
    os.seteuid(65534)
    try:
        (private / "checkpoint").write_bytes(b"")
    finally:
        os.seteuid(0)


@kind("too-many-files")
def _() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    kept = [open("/dev/null") for _ in range(200)]  # noqa: SIM115
    assert kept


@kind("allocation")
def _() -> None:
    torch.empty(1 << 50)


@kind("memory-error")
def _() -> None:
    bytearray(1 << 50)


@kind("corrupt-checkpoint")
def _() -> None:
    file = FOLDER / "half.pt"
    torch.save({"weights": torch.ones(1000)}, file)
    file.write_bytes(file.read_bytes()[:2000])
    torch.load(file)


@kind("other-size")
def _() -> None:
    dist.all_reduce(torch.ones(7))


@kind("init-twice")
def _() -> None:
    dist.init_process_group("gloo")


@kind("atexit")
def _() -> None:
    atexit.register(lambda: dist.all_reduce(torch.ones(10)) and 1 / 0)
    raise KeyError("labels")


class _Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self._size:
            raise ValueError("cannot identify image file '/data/img_17.png'")
        return torch.ones(self._size)


@kind("loader-exception")
def _() -> None:
    next(iter(torch.utils.data.DataLoader(_Samples(0), num_workers=1)))


@kind("shm")
def _() -> None:
    for _ in torch.utils.data.DataLoader(_Samples(1 << 19), batch_size=8, num_workers=2):
        pass


@kind("port-taken")
def _() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], is_master=True)


@kind("nccl", EVERYWHERE)
def _() -> None:
    dist.init_process_group("nccl")


@kind("gloo-interface", BEFORE)
def _() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth7"


@kind("gloo-interface-list", BEFORE)
def _() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "^lo"


@kind("unsets-rank", BEFORE)
def _() -> None:
    del os.environ["RANK"]


@kind("unknown-name")
def _() -> None:
    dist.TCPStore("no-such-machine.invalid", 29500, timeout=timedelta(seconds=2))


@kind("gloo-timeout")
def _() -> None:
    threading.Event().wait(60)


@kind("elsewhere")
def _() -> None:
    threading.Event().wait()


@kind("sigstop")
def _() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@kind("other-collective")
def _() -> None:
    dist.broadcast(torch.ones(10), 0)
    dist.broadcast(torch.ones(10), 0)


@kind("deadlocked-loader")
def _() -> None:
    class Deadlocked(_Samples):
        def __getitem__(self, index: int) -> torch.Tensor:
            threading.Event().wait()
            return torch.ones(1)

    next(iter(torch.utils.data.DataLoader(Deadlocked(1), num_workers=1)))


@kind("uneven")
def _() -> None:
    dist.barrier()


def write_noise() -> None:
    """Write what libraries write in runs that succeed."""
    sys.stderr.write(Path(os.environ["SCREEN_NOISE"]).read_text())


def main() -> None:
    name = sys.argv[int(os.environ["ELASTIC_AGENT_GENERATION"])]
    is_odd = (NODE, os.environ["LOCAL_RANK"]) == ("b", "1")
    if is_odd and "SCREEN_NOISE" in os.environ and name != "none":
        write_noise()
        atexit.register(write_noise)
    EVERYWHERE.get(name, int)()
    if is_odd:
        BEFORE.get(name, int)()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20 if name == "gloo-timeout" else 1800))
    for step in range(20):
        if step == 10 and is_odd:
            if name.startswith("says:"):
                raise RuntimeError(name.removeprefix("says:"))
            KINDS.get(name, int)()
        if name == "none":
            continue
        dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
