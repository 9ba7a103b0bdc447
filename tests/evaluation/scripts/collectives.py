"""All-reduces for ever; of large tensors if the argument is ``large``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist


def main() -> None:
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    dist.init_process_group("gloo")
    size = 500_000 if how == "large" else 10
    dist.all_reduce(torch.ones(size))
    print("training", flush=True)
    while True:
        dist.all_reduce(torch.ones(size))


if __name__ == "__main__":
    main()
