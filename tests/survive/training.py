"""A training whose workers are kept: steps of equal ranks, each of which is noted as `Cluster` reads it.

It ends after so many steps, or when there is a file ``finish``. ``how`` says what goes wrong in step 5 of the first
generation, where slot 1 goes no further.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from elastic_agent import client, survive
from elastic_agent.worker_variables import SURVIVE_GPU

STANDS_AT = 5


def note(kind: str, **more: object) -> None:
    """Append one line, in one write: several workers share the file."""
    place = {"node_id": me.node_id, "worker_id": me.worker_id, "pid": os.getpid()}
    line = {"kind": kind, "boottime_s": time.clock_gettime(time.CLOCK_BOOTTIME), **place, **more}
    handle = os.open(folder / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(handle, (json.dumps(line) + "\n").encode())
    os.close(handle)


def break_connections() -> None:
    for number in range(3, 200):
        try:
            connection = socket.socket(fileno=os.dup(number))
            if connection.family == socket.AF_INET and connection.getpeername():
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def go_wrong() -> None:
    """Do what is to happen in step 5 of the first generation."""
    if how == "connections break":
        break_connections()
    elif me.slot == 1:
        note("stands")
        signal.pause()
    elif how == "all raise":
        raise RuntimeError("gloo/a mistake in the script: Connection closed by peer")


folder, steps, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
me = client.current()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = {"scaler": torch.amp.GradScaler("cpu")} if how == "a gradient scaler" else {}
optimizers = {} if how == "no optimizer" else {"optimizer": optimizer}
state = survive.State(model=model, **optimizers, **scaler)
if how.startswith("a GPU"):
    torch.cuda.is_available = lambda: True
if how == "a GPU that is kept":
    os.environ[SURVIVE_GPU] = "1"

note("born")
print(f"{me.worker_id} begins", flush=True)
is_first = not (folder / f"{me.node_id}.{me.slot}").exists()
(folder / f"{me.node_id}.{me.slot}").touch()
while not (is_first or (folder / "may_be_replaced").exists()):
    time.sleep(0.01)


@survive.train(state)
def train(world: survive.World) -> None:
    ddp = world.ddp(model)
    if how == "another group":
        dist.new_group()
    placement = client.current().placement
    print(f"{me.worker_id} is in generation {placement.generation}", flush=True)
    where = {"generation": placement.generation, "rank": world.rank, "size": world.world_size}
    files = len(os.listdir("/proc/self/fd"))
    note("world", step=state.step, variable=int(os.environ["RANK"]), open_files=files, **where)
    while state.step < steps:
        ends = torch.tensor([float((folder / "finish").exists())])
        dist.all_reduce(ends)
        if ends.item():
            return
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * state.step + world.rank))
        loss = ddp(inputs).square().mean()
        if how and state.step == STANDS_AT and placement.first_generation:
            go_wrong()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        note("step", step=state.step, **where)
        time.sleep(0.01)


if how == "another training":
    other = nn.Linear(1, 1)

    @survive.train(survive.State(other=other))
    def train_before(world: survive.World) -> None:
        world.ddp(other)(torch.ones(1, 1)).sum().backward()

    train_before()
if how == "a group before":
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
train()
parameters = [*model.parameters(), *(each["exp_avg"] for each in optimizer.state.values())]
note(
    "done",
    digest=hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in parameters)).hexdigest(),
)
