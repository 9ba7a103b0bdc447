"""A worker that ends while a thread of torch's waits for the interpreter's lock."""

ENDS_WHILE_A_COLLECTIVE_COMPLETES = """
import sys, time
import torch, torch.distributed as dist

rank, meeting_point = int(sys.argv[-2]), sys.argv[-1]
dist.init_process_group("gloo", init_method="file://" + meeting_point, rank=rank, world_size=2)
dist.barrier()

def reduce():
    dist.all_reduce(torch.ones(1), async_op=True)

if rank == 0:
    time.sleep(0.1)  # the other one is in its loop by then
    dist.all_reduce(torch.ones(1))
else:
    reduce()
    sys.setswitchinterval(100)  # the loop keeps the lock: gloo's thread waits for it to free the tensor
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        pass
    sys.setswitchinterval(0.005)
"""
"""Of two ranks (last arguments: rank, file to meet at), rank 1 ends while gloo's thread waits for the lock."""
