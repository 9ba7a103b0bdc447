"""A minimal distributed script: the workers compute the sum of their ranks, and each prints a line.

elastic-agent --nproc-per-node 2 examples/hello.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
line = f"hello from rank {dist.get_rank()} of {dist.get_world_size()}; our ranks add up to {total.item()}"
print(line + "\n", end="", flush=True)  # one write per line, because the workers share the standard output
dist.destroy_process_group()
