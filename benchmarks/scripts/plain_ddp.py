"""Training with DDP alone, as tutorials write it: scikit-learn's digits, a sampler, a checkpoint from time to time."""

from events import FOLDER, Rounds  # isort: skip

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT = FOLDER / "plain.pt"
SAVE_EVERY = 100


def main() -> None:
    dist.init_process_group("gloo")
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(network.parameters())
    step = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp = DistributedDataParallel(network)
    rounds = Rounds()
    for epoch in range(1_000_000):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            step += 1
            rounds.done()
            if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
                state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, CHECKPOINT.with_suffix(".new"))
                os.replace(CHECKPOINT.with_suffix(".new"), CHECKPOINT)


if __name__ == "__main__":
    main()
