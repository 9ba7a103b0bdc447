"""The program that the interpreter of the script runs: tells what is installed for it, then takes part in all-reduces.

It is executed as a file, and imports nothing of elastic-agent, which that interpreter may not have. Its argument, what
it reads from its standard input and what it prints are lines of JSON: it is told the ``packages`` whose versions are
wanted, the lowest and the highest of the ``ports`` of which one is for its store (null: it hosts none), and by which
``signal`` it dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import socket
import sys
import time
from datetime import timedelta
from typing import Any

NUMBERS = 64 * 1024
"""Of 4 bytes, in the tensor that is reduced."""
STORE_S = 5.0
"""How long a store may take to answer its own process."""

_kept: list[Any] = []
"""The store, for as long as this process lives."""


def installed(packages: list[str]) -> dict[str, Any]:
    """Return versions and libraries; ``problem``: why torch cannot be imported although it is installed."""
    versions: dict[str, str] = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name) or "unknown"
    found = {"python": platform.python_version(), "versions": versions}
    if "torch" not in versions:
        return found
    try:
        import torch

        versions["torch"] = str(torch.__version__)
        found["cuda"] = torch.version.cuda or ""
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            found["nccl"] = ".".join(map(str, version))
            with open("/proc/self/maps") as maps:  # torch has loaded it
                libraries = [line.split()[-1] for line in maps if "libnccl.so" in line]
            found["nccl_library"] = libraries[0] if libraries else ""
    except Exception as failure:
        found["problem"] = first_line(failure)
    return found


def open_store(lowest: int, highest: int) -> int:
    """Host the store that the ranks meet at if this one's machine is the first; the port, 0 if there is none."""
    from torch._C._distributed_c10d import TCPStore

    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    for port in range(highest, lowest - 1, -1):  # the doctor itself listens at the first that is free
        with contextlib.suppress(OSError):
            listening = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
            break
    else:
        return 0
    port, span = int(listening.getsockname()[1]), timedelta(seconds=STORE_S)
    with contextlib.suppress(RuntimeError):  # a packet filter that rejects this machine's own packets
        store = TCPStore(
            "127.0.0.1", port, None, True, span, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        _kept.append(store)
        return port
    return 0


def reduce(
    backend: str,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    environment: dict[str, str],
    limit_s: float,
) -> dict[str, Any]:
    """Take part in an all-reduce at the store of the first rank; ``problem`` and seconds."""
    import torch
    from torch import distributed
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    os.environ.update(environment)
    begun_s = time.monotonic()
    try:
        span = timedelta(seconds=limit_s)
        store = PrefixStore(backend, TCPStore(host, port, None, False, span, wait_for_workers=False))
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=span)
        tensor = torch.full((NUMBERS,), 1.0, device="cuda:0" if backend == "nccl" else "cpu")
        distributed.all_reduce(tensor)
        total = float(tensor[0].item())
        distributed.destroy_process_group()
    except Exception as failure:
        return {"problem": first_line(failure), "took_s": time.monotonic() - begun_s}
    problem = "" if total == world_size else f"wrong result: {total}, expected {world_size}"
    return {"problem": problem, "took_s": time.monotonic() - begun_s}


def first_line(failure: Exception) -> str:
    """Return what went wrong, in one line."""
    return (str(failure).strip() or type(failure).__name__).splitlines()[0][:400]


def main() -> None:
    """Answer until standard input ends."""
    wanted = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(1, wanted["signal"])  # PR_SET_PDEATHSIG: torch may hang
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print what they like
    found = installed(wanted["packages"])
    if wanted["ports"] and "torch" in found["versions"] and "problem" not in found:
        found["store_port"] = open_store(*wanted["ports"])
    print(json.dumps(found), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(reduce(**json.loads(line))), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    # Python puts the folder of this file first; its other files are no modules of torch's.
    sys.path = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]
    main()
