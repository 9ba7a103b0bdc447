"""Makes process groups at the agent's store and at stores of its own, in workers and in processes that they start."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = timedelta(seconds=300)


def add_up(where: str, rank: int, size: int, init_method: str | None = None) -> None:
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size, timeout=LIMIT)
    total = torch.ones(1)
    dist.all_reduce(total)
    os.write(1, f"{where} {int(total.item())}\n".encode())
    dist.barrier()
    dist.destroy_process_group()


def child(slot: int, port: int, method: str) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
    add_up(f"own store of a {method} child", slot, 1)


def child_of_agents_store(slot: int) -> None:
    add_up("agent's store in a child", int(os.environ["RANK"]), 2)


if __name__ == "__main__":
    rank, agents = int(os.environ["RANK"]), f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    uses, port, *ports = sys.argv[1:]
    if uses == "address":
        add_up("agent's store by address", rank, 2, f"tcp://{agents}")
    else:
        if uses == "children":
            mp.spawn(child_of_agents_store)
        else:
            add_up("agent's store", rank, 2)
        add_up("own store by address", rank, 2, f"tcp://127.0.0.1:{port}")
        methods = ("spawn", "forkserver") if rank == 0 else ()
        for method, own_port in zip(methods, ports, strict=False):
            os.environ["MASTER_PORT"] = own_port  # in the parent, which its children inherit
            args = (int(own_port), method)
            mp.start_processes(child, args=args, nprocs=1, start_method=method)
