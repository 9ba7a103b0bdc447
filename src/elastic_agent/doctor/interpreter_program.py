"""Runs in the interpreter of the script: prints what is installed there, or takes part in an all-reduce.

It is executed as a file, and imports nothing of elastic-agent, which that interpreter may not have. Its arguments are
``installed`` and the packages whose versions are wanted, or ``reduce``, the backend and a time limit; the place in the
world is in the environment, as for every worker. It prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import signal
import sys
import time
from datetime import timedelta
from typing import Any

NUMBERS = 64 * 1024
"""Of 4 bytes, in the tensor that is reduced."""


def installed(*packages: str) -> dict[str, Any]:
    """Return versions and libraries; ``problem``: why torch cannot be imported although it is installed."""
    versions: dict[str, str] = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name) or "unknown"
    found: dict[str, Any] = {"python": platform.python_version(), "versions": versions}
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


def reduce(backend: str, limit_s: str) -> dict[str, Any]:
    """Take part in an all-reduce at the store of the workers; ``problem`` and seconds."""
    import torch
    from torch import distributed
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    begun_s = time.monotonic()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        span = timedelta(seconds=float(limit_s))
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = PrefixStore(backend, TCPStore(host, port, is_master=False, timeout=span))
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
    """Print the answer."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: torch may hang
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print what they like
    task, *arguments = sys.argv[1:]
    answer = installed(*arguments) if task == "installed" else reduce(*arguments)
    print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # without Python's clean-up, which drivers may crash


if __name__ == "__main__":
    # Python puts the folder of this file first; its other files are no modules of torch's.
    sys.path = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]
    main()
