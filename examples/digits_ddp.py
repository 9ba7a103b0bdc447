"""Trains a small network on scikit-learn's handwritten digits with DDP, and resumes after restarts.

    python examples/digits_ddp.py
    torchrun --nproc-per-node 2 examples/digits_ddp.py
    elastic-agent --rdzv-endpoint host0:29400 --nnodes 1:4 examples/digits_ddp.py --checkpoint-dir /shared

What it does to be elastic, because the number of workers may change at every restart:

- The global batch size is constant: each step uses the same 64 images, divided among the workers, and the gradient
  is that of the whole batch. The result therefore does not depend on the number of workers.
- The checkpoint is named after the run, not after a rank, and is replaced atomically. At the start, all workers load
  the newest checkpoint that any of them can read.
- It reports each step to the agent (a heartbeat), which detects hung workers.
- Before it is stopped (a node leaves or joins, a time limit, `elastic-agent stop`), all ranks receive a notice at
  the same step. Then it saves a checkpoint and exits, and no step is lost.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elastic_agent import client

GLOBAL_BATCH = 64
TEST_IMAGES = 360


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 numbers in 0..1, and their labels (0..9)."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train_x) // GLOBAL_BATCH


def main() -> int:
    options = parse_arguments()
    me = client.current()
    device = join_process_group()
    say(f"started worker={me.worker_id} pid={os.getpid()} rank={me.placement.rank}")

    torch.manual_seed(options.seed)
    digits = read_digits(options.seed, device)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    # A run id may contain characters that are not allowed in file names.
    checkpoint = options.checkpoint_dir / f"{quote(me.run_id, safe='')}.pt"
    train(network, optimizer, digits, checkpoint, options)

    accuracy = evaluate(network, digits)
    if me.placement.rank == 0:
        say(f"done accuracy={accuracy:.4f}")
    # Without a barrier, a rank could exit while another one is still in a collective.
    dist.barrier()
    dist.destroy_process_group()
    if accuracy < options.target_accuracy:
        print(f"accuracy {accuracy:.4f} is below the target of {options.target_accuracy}", file=sys.stderr)
        return 1
    return 0


def train(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    digits: Digits,
    checkpoint: Path,
    options: argparse.Namespace,
) -> None:
    """Train from the newest checkpoint to the last step; rank 0 periodically saves and logs."""
    last = options.steps or options.epochs * digits.steps_per_epoch
    done = resume(checkpoint, network, optimizer)
    leader = dist.get_rank() == 0
    if leader:
        say(f"{'resumed' if done else 'new'} step={done}/{last} checkpoint={checkpoint}")
    ddp = DistributedDataParallel(network)
    agreement = client.Agreement()
    for step in range(done + 1, last + 1):
        loss = train_step(ddp, optimizer, digits, step, options.seed)
        client.heartbeat(step)
        if leader and (step == done + 1 or step % options.log_every == 0 or step == last):
            say(f"step={step}/{last} loss={loss:.4f}")
        if leader and (step % options.checkpoint_every == 0 or step == last):
            save(checkpoint, step, network, optimizer)
        notice = agreement.notice()
        if notice is not None:
            leave(notice, checkpoint, step, network, optimizer)
        time.sleep(options.step_time)


def leave(
    notice: client.Notice, checkpoint: Path, step: int, network: nn.Module, optimizer: torch.optim.Optimizer
) -> NoReturn:
    """Save a checkpoint and exit, because the workers are about to be stopped."""
    if dist.get_rank() == 0:
        save(checkpoint, step, network, optimizer)
        say(f"saved step={step} reason={notice.reason}")
    client.leave()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--epochs", type=int, default=15, help="passes over the training images (default: 15)"
    )
    length.add_argument("--steps", type=int, help="steps to train, instead of --epochs")
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        default=Path("checkpoints"),
        help="directory of the checkpoint; with several machines, a shared one",
    )
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS")
    parser.add_argument(
        "--step-time",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="sleep this long in each step, to make training slow enough to watch",
    )
    parser.add_argument(
        "--target-accuracy",
        type=float,
        default=0.93,
        help="exit with 1 if the test accuracy is lower (default: 0.93)",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def join_process_group() -> torch.device:
    """Use NCCL if each local worker has its own GPU, else gloo; under plain python, a group of one."""
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def read_digits(seed: int, device: torch.device) -> Digits:
    """All 1,797 images, shuffled in the same order on every worker; the first 360 are the test set."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x = (torch.tensor(images, dtype=torch.float32) / 16)[order].to(device)
    y = torch.tensor(labels)[order].to(device)
    return Digits(x[TEST_IMAGES:], y[TEST_IMAGES:], x[:TEST_IMAGES], y[:TEST_IMAGES])


def train_step(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, digits: Digits, step: int, seed: int
) -> float:
    """One step on this worker's part of the global batch; returns the loss over the whole batch."""
    epoch, batch = divmod(step - 1, digits.steps_per_epoch)
    order = torch.randperm(len(digits.train_x), generator=torch.Generator().manual_seed(seed + 1000 * epoch))
    everyone = order[batch * GLOBAL_BATCH : (batch + 1) * GLOBAL_BATCH]
    mine = everyone[dist.get_rank() :: dist.get_world_size()].to(digits.train_x.device)
    summed = nn.functional.cross_entropy(ddp(digits.train_x[mine]), digits.train_y[mine], reduction="sum")
    # DDP averages gradients over the workers. With this factor, the result is the mean over the global batch,
    # for any number of parts and even if they differ in size.
    part = summed * dist.get_world_size() / GLOBAL_BATCH
    optimizer.zero_grad()
    part.backward()
    optimizer.step()
    total = summed.detach().clone()
    dist.all_reduce(total)
    return total.item() / GLOBAL_BATCH


@torch.no_grad()
def evaluate(network: nn.Module, digits: Digits) -> float:
    """Accuracy on the test images; the same on every worker."""
    return (network(digits.test_x).argmax(dim=1) == digits.test_y).float().mean().item()


def save(path: Path, step: int, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the checkpoint atomically: after a crash, either the old or the new one is there, complete."""
    state = {"step": step, "network": network.state_dict(), "optimizer": optimizer.state_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def resume(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint that any worker can read on all workers; returns its step, 0 without one."""
    state = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {"step": 0}
    steps: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(steps, state["step"])
    newest = max(steps)
    if newest == 0:
        return 0
    shared = [state]
    dist.broadcast_object_list(shared, src=steps.index(newest))
    network.load_state_dict(shared[0]["network"])
    optimizer.load_state_dict(shared[0]["optimizer"])
    return newest


def say(text: str) -> None:
    place = client.current().placement
    # One write per line: print() makes two, and output of another worker may come between them.
    sys.stdout.write(f"digits: {text} world={place.world_size} generation={place.generation}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
