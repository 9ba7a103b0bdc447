"""Prints the names that stay beside those that do not; one worker then dies, once, so that all start again.

    elastic-agent --nproc-per-node 3 examples/identity.py

Name files, log streams and experiments after what stays: the run, the node, the worker. A rank says where a
worker stands in one generation. After a restart the same rank may be another worker on another machine.
"""

import os
import sys
import time

import torch.distributed as dist

from elastic_agent import client

WAIT_TO_BE_STOPPED_S = 60.0

me = client.current()
now = me.placement
sys.stdout.write(  # in one piece, unlike print(): all workers write at the same time
    f"generation {now.generation}:"
    f"  stays: run {me.run_id}, node {me.node_id}, worker {me.worker_id}"
    f"  |  until the next restart: rank {now.rank} of {now.world_size},"
    f" node {now.node_rank} of {now.node_count}, process {os.getpid()}\n"
)
sys.stdout.flush()

if now.first_generation and now.world_size > 1:
    dist.init_process_group("gloo")
    dist.barrier()  # everyone has introduced itself
    if now.rank == now.world_size - 1:
        print(
            f"worker {me.worker_id} dies now, on purpose: see which names are the same afterwards", flush=True
        )
        sys.exit(3)
    # The others would train on; the agent stops them when it sees the failure.
    time.sleep(WAIT_TO_BE_STOPPED_S)
    sys.exit("nobody stopped this worker after another one had failed")
