#!/usr/bin/env bash
# torch 2.13.0: each init_process_group wraps sys.excepthook in one that puts "[rankN]: " before every line, and
# destroy_process_group does not take it away. A process that was rank 1 of two, and is the only one of its second group,
# reports its error as "[rank0]: [rank1]: Traceback ..."; one whose groups have all ended still says "[rank1]: ".
# One would guess: the prefix is the rank in the present group, once, and there is none without a group: a process that
# outlives a group to form the next one would be searched for under the wrong rank.
# Source: torch/distributed/distributed_c10d.py, init_process_group, _distributed_excepthook.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/worker.py" <<'PYTHON'
import sys

import torch.distributed as dist

folder, rank, again = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "again"
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/first", 2), rank=rank, world_size=2)
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    sys.exit()
if again:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
raise RuntimeError("the error of a process that was rank 1")
PYTHON
for again in again never; do
    "$folder/bin/python" "$folder/worker.py" "$folder" 0 "$again" &
    "$folder/bin/python" "$folder/worker.py" "$folder" 1 "$again" 2> "$folder/$again" || true
    wait && rm -f "$folder/first"
    grep RuntimeError "$folder/$again"
done
[ "$(grep -c '^\[rank0\]: \[rank1\]: RuntimeError' "$folder/again")" = 1 ] &&
    [ "$(grep -c '^\[rank1\]: RuntimeError' "$folder/never")" = 1 ]
