"""Prints stable and unstable identifiers of each worker, before and after a restart.

    elastic-agent --nproc-per-node 3 examples/identity.py

One worker exits with an error in the first generation, so that all workers are restarted. Name files, log streams and
experiments after stable identifiers: run id, node id, worker id. A rank is valid for one generation only. After a
restart, another worker on another machine may have the same rank.
"""

import os
import sys
import time

import torch.distributed as dist

from elastic_agent import client

WAIT_TO_BE_STOPPED_S = 60.0

me = client.current()
now = me.placement
sys.stdout.write(  # one write, unlike print(), because all workers write at the same time
    f"generation {now.generation}:"
    f"  stays: run {me.run_id}, node {me.node_id}, worker {me.worker_id}"
    f"  |  until the next restart: rank {now.rank} of {now.world_size},"
    f" node {now.node_rank} of {now.node_count}, process {os.getpid()}\n"
)
sys.stdout.flush()

if now.first_generation and now.world_size > 1:
    dist.init_process_group("gloo")
    dist.barrier()  # all workers have printed their ids
    if now.rank == now.world_size - 1:
        print(f"worker {me.worker_id} exits now, on purpose; compare the ids after the restart", flush=True)
        sys.exit(3)
    # The other workers would continue to train; the agent stops them when it detects the failure.
    time.sleep(WAIT_TO_BE_STOPPED_S)
    sys.exit("expected the agent to stop this worker after another one had failed; it did not")
