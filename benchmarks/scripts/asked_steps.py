"""Training steps of about 5 ms with a collective each; per line on stdin, does some and prints how long they took."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from elastic_agent.integrations import collectives

collectives.install()
dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
torch.set_num_threads(1)
steps, length_s = int(sys.argv[2]), float(sys.argv[3])
gradient, weights = torch.ones(25_000), torch.ones(200, 200)
for _ in range(2):  # the first time is for warming up
    began_s = time.process_time()
    for _ in range(200):
        weights @ weights
products = max(1, round(length_s / ((time.process_time() - began_s) / 200)))
dist.all_reduce(gradient)
print("ready", flush=True)
for _ in sys.stdin:
    began_s = time.perf_counter()
    for _ in range(steps):
        for _ in range(products):
            weights @ weights
        dist.all_reduce(gradient)
    print(time.perf_counter() - began_s, flush=True)
