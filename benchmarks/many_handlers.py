"""Many of torch's own dynamic rendezvous handlers in one process (see ``benchmarks/rendezvous.py``).

Each has its own connection to one c10d store, as under torchrun. The same words on stdin, the same lines on stdout as
``many_nodes.py``; "fail" has every handler come to the next rendezvous, as torchrun's agents do after a failure.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from .many_nodes import now_s, tell


def make(number: int, options: argparse.Namespace) -> DynamicRendezvousHandler:
    parameters = RendezvousParameters(
        "c10d",
        f"127.0.0.1:{options.port}",
        "benchmark",
        options.nodes,
        options.nodes,
        local_addr="127.0.0.1",
        is_host=str(number == 0),
    )
    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description="Started by the rendezvous benchmark.")
    parser.add_argument("nodes", type=int)
    parser.add_argument("port", type=int)
    options = parser.parse_args()
    pool = ThreadPoolExecutor(options.nodes)
    together = threading.Barrier(options.nodes)

    def meet(handler: DynamicRendezvousHandler) -> float:
        together.wait()
        handler.next_rendezvous()
        return now_s()

    tell("here")
    sys.stdin.readline()
    host = make(0, options)
    handlers = [host, *pool.map(lambda number: make(number, options), range(1, options.nodes))]
    for first_time in (True, False):
        if not first_time:
            tell("calm")
            sys.stdin.readline()
            tell("failing")
        tell("sealed", moment=max(pool.map(meet, handlers)))
    tell("done")
    sys.stdin.readline()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
