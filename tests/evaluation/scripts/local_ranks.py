"""Takes LOCAL_RANK for the rank, as scripts that were written for one machine do."""

import os

import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo", rank=local_rank, world_size=int(os.environ["WORLD_SIZE"]))
dist.barrier()
