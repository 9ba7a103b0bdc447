"""A worker that ends while a thread of torch's waits for the interpreter's lock."""

ENDS_WHILE_A_COLLECTIVE_COMPLETES = """
import mmap, sys, time
import torch, torch.distributed as dist

rank, meeting_point = int(sys.argv[-2]), sys.argv[-1]
with open(f"{meeting_point}-flags", "a+b") as file:
    file.truncate(2)
    flags = mmap.mmap(file.fileno(), 2)
dist.init_process_group("gloo", init_method="file://" + meeting_point, rank=rank, world_size=2)
dist.barrier()

def reduce():
    dist.all_reduce(torch.ones(1), async_op=True)

if rank == 0:
    while not flags[1]:
        time.sleep(0.001)
    dist.all_reduce(torch.ones(1))
    flags[0] = 1
else:
    reduce()
    sys.setswitchinterval(1000)  # the loop keeps the lock: gloo's thread waits for it to free the tensor
    flags[1] = 1
    while not flags[0]:
        pass
    sys.setswitchinterval(0.005)
"""
"""Of two ranks (last arguments: rank, file to meet at), rank 1 ends while gloo's thread waits for the lock."""
