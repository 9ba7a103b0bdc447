#!/usr/bin/env bash
# torch 2.13.0: three ranks that train 3 steps, make a new DistributedDataParallel with the same weights and train 3 more
# on the same data end with other weights, in the last bits, than three ranks that train 6 steps; SGD without momentum, gloo,
# CPU, one thread, equal to the bit when either is repeated. With find_unused_parameters=True, both are equal.
# One would guess: a restart from a checkpoint of all there is gives the same weights, as it does without DDP. But after
# its first step, DDP sorts its buckets by the order in which gradients became ready; a new one begins with the other
# layout, and in which order the ranks' numbers are added depends on their place in the bucket. So weights that differ in
# the last bits prove no fault of a resume, from three ranks on.
# Source: torch/csrc/distributed/c10d/reducer.cpp, Reducer::rebuild_buckets and should_rebuild_buckets.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/ranks.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

STEPS = [[*range(6)], [*range(3)], [*range(3, 6)]]


def train(rank, layers, steps, unused):
    model = DistributedDataParallel(layers, bucket_cap_mb=0.05, find_unused_parameters=unused)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for step in steps:
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def trained(rank, parts, unused):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(part for _ in range(8) for part in (torch.nn.Linear(64, 64), torch.nn.Tanh())))
    for steps in parts:
        train(rank, layers, steps, unused)
    return torch.cat([one.detach().flatten() for one in layers.parameters()])


def work(rank, port):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    found = {}
    for unused in (False, True):
        whole = trained(rank, STEPS[:1], unused)
        found[unused] = [torch.equal(whole, trained(rank, parts, unused)) for parts in (STEPS[:1], STEPS[1:])]
    dist.destroy_process_group()
    if rank == 0:
        print(f"equal when repeated, equal when resumed: {found[False]}; find_unused_parameters: {found[True]}")
        raise SystemExit(found != {False: [True, False], True: [True, True]})


if __name__ == "__main__":
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(work, (server.port,), nprocs=3)
PYTHON
"$folder/bin/python" "$folder/ranks.py" 2> "$folder/stderr"
