"""Trains a small network on scikit-learn's handwritten digits with DDP, and survives restarts.

    python examples/digits_ddp.py
    torchrun --nproc-per-node 2 examples/digits_ddp.py
    elastic-agent --rdzv-endpoint host0:29400 --nnodes 1:4 examples/digits_ddp.py --checkpoint-dir /shared

What makes it fit for an elastic world, where the number of workers changes from one restart to the next:

- Every step takes the same 64 images whatever the number of workers; they are dealt out to those there
  are, and the gradient is the whole batch's. So the result does not depend on how many took part, or when.
- The checkpoint is named after the run, not after a rank; it replaces the previous one in a single step; at
  the start all workers take up the newest that any of them can see.
- It tells the agent about each step, so that a worker that hangs is noticed.
- When it is to be stopped (a node leaves or joins, a time limit, `elastic-agent stop`), all ranks learn of it at the
  same step; then it saves and leaves, and no step is lost.
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
    """Images as rows of 64 numbers in 0..1, and which digit each shows."""

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
    # The run's id may hold any character; a file's name may not.
    checkpoint = options.checkpoint_dir / f"{quote(me.run_id, safe='')}.pt"
    train(network, optimizer, digits, checkpoint, options)

    accuracy = evaluate(network, digits)
    if me.placement.rank == 0:
        say(f"done accuracy={accuracy:.4f}")
    # Nobody leaves while another may still be in a collective.
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
    """Train from the newest checkpoint to the last step; rank 0 saves and reports now and then."""
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
    """Save, and make room: for another node, for another job, for the next life of this one."""
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
        help="where the checkpoint is kept; with several machines, storage that all of them see",
    )
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS")
    parser.add_argument(
        "--step-time",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="sleep this long in each step, so that there is something to watch",
    )
    parser.add_argument(
        "--target-accuracy",
        type=float,
        default=0.93,
        help="exit with 1 if fewer of the test images are recognised (default: 0.93)",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def join_process_group() -> torch.device:
    """NCCL where each local worker has a GPU of its own, gloo elsewhere; alone under plain python."""
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
    """All 1,797 images in a shuffled order that every worker agrees on, the first 360 kept for the test."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x = (torch.tensor(images, dtype=torch.float32) / 16)[order].to(device)
    y = torch.tensor(labels)[order].to(device)
    return Digits(x[TEST_IMAGES:], y[TEST_IMAGES:], x[:TEST_IMAGES], y[:TEST_IMAGES])


def train_step(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, digits: Digits, step: int, seed: int
) -> float:
    """One step on this worker's part of the step's batch; returns the loss over the whole batch."""
    epoch, batch = divmod(step - 1, digits.steps_per_epoch)
    order = torch.randperm(len(digits.train_x), generator=torch.Generator().manual_seed(seed + 1000 * epoch))
    everyone = order[batch * GLOBAL_BATCH : (batch + 1) * GLOBAL_BATCH]
    mine = everyone[dist.get_rank() :: dist.get_world_size()].to(digits.train_x.device)
    summed = nn.functional.cross_entropy(ddp(digits.train_x[mine]), digits.train_y[mine], reduction="sum")
    # DDP averages over the workers. Scaled like this, the average of the parts is the mean over the batch,
    # however many parts there are, and even where they differ in size.
    part = summed * dist.get_world_size() / GLOBAL_BATCH
    optimizer.zero_grad()
    part.backward()
    optimizer.step()
    total = summed.detach().clone()
    dist.all_reduce(total)
    return total.item() / GLOBAL_BATCH


@torch.no_grad()
def evaluate(network: nn.Module, digits: Digits) -> float:
    """The share of the test images that are recognised. The same on every worker, as the weights are."""
    return (network(digits.test_x).argmax(dim=1) == digits.test_y).float().mean().item()


def save(path: Path, step: int, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the checkpoint in one step: a crash at any moment leaves the old one or the new one, whole."""
    state = {"step": step, "network": network.state_dict(), "optimizer": optimizer.state_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def resume(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bring all workers to the newest checkpoint that any of them has; returns its step, 0 without one."""
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
    # One write for the whole line: print() makes two, and between them another worker's line may come.
    sys.stdout.write(f"digits: {text} world={place.world_size} generation={place.generation}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
