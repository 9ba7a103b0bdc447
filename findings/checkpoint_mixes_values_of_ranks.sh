#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint.save of values that differ between ranks under one name, such as a loader's
# position, keeps one of them and says nothing; of two such values, it may keep each from another rank. After load, every
# rank has {"position": 100, "state": tensor([101])}: the number of rank 0, the tensor of rank 1.
# One would guess: each rank reads what it saved, as with a file per rank, or a conflict is an error, or all of the entry
# comes from one rank. A per-rank random state or position that is restored so belongs to no rank that ever was.
# Source: torch/distributed/checkpoint/default_planner.py (objects: only the coordinator's) and _dedup_save_plans.py
# (tensors: the rank that has the least to write).
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/ranks.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing


def work(rank, folder, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dcp.save({"position": 100 + rank, "state": torch.tensor([100 + rank])}, checkpoint_id=f"{folder}/checkpoint")
    read = {"position": -1, "state": torch.tensor([-1])}
    dcp.load(read, checkpoint_id=f"{folder}/checkpoint")
    found = [None, None]
    dist.all_gather_object(found, (read["position"], int(read["state"])))
    dist.destroy_process_group()
    if rank == 0:
        print(f"saved as (position, state): rank 0 (100, 100), rank 1 (101, 101); read: {found}")
        raise SystemExit(found != [(100, 101)] * 2)


if __name__ == "__main__":
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(work, (sys.argv[1], server.port), nprocs=2)
PYTHON
"$folder/bin/python" "$folder/ranks.py" "$folder" 2> "$folder/stderr"
