"""One of two workers that are stopped: ``python at_sigterm.py FOLDER KIND``. Where they communicate, rank 1 freezes.

KIND is where the worker waits when it gets SIGTERM, or what its handler does. ``FOLDER/RANK`` appears when it is about
to wait there, ``FOLDER/saved`` when the handler has saved.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

FOLDER, KIND, RANK = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
STATE_BYTES = 64 * 2**20
SERIALISE_S = 2.0
terminated = threading.Event()


def ready() -> None:
    (FOLDER / str(RANK)).touch()


def meet() -> None:
    """From here on, the second worker takes part in nothing."""
    dist.barrier()
    ready()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


# -- where a worker waits --------------------------------------------------------------------------


def in_backward() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(1000, 1000))
    meet()
    while True:
        model(torch.ones(8, 1000)).sum().backward()


def in_item() -> None:
    value = torch.ones(1)
    meet()
    while True:
        dist.all_reduce(value, async_op=True).wait()
        value.item()


def in_barrier() -> None:
    meet()
    while True:
        dist.barrier()


class Slow(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        time.sleep(1000)
        return index


def in_data_loader() -> None:
    loader = iter(torch.utils.data.DataLoader(Slow(), num_workers=1))
    ready()
    next(loader)


def in_sleep() -> None:
    ready()
    time.sleep(1000)


# -- what a handler does ---------------------------------------------------------------------------


def set_flag(signum: int, frame: FrameType | None) -> None:
    """For a script that checks it after every step."""
    terminated.set()


def write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def save_quickly() -> None:
    torch.save(nn.Linear(100, 100).state_dict(), FOLDER / "state")


def serialise() -> None:
    """Many small objects: time goes into pickling."""
    data, ends = [], time.monotonic() + SERIALISE_S
    while time.monotonic() < ends:
        data.append(pickle.dumps([{"step": number, "loss": float(number)} for number in range(1000)]))
    write(FOLDER / "state", b"".join(data))


def write_in_pieces() -> None:
    """Each on the disk before the next."""
    for number in range(STATE_BYTES // 2**20):
        write(FOLDER / f"state.{number}", bytes(2**20))


def write_to_slow_pipe() -> None:
    """As through a program that uploads: 320 KB/s."""
    uploads = ["sh", "-c", "while sleep 0.2; do test $(head -c 65536 | wc -c) -gt 0 || exit 0; done"]
    with subprocess.Popen(uploads, stdin=subprocess.PIPE, start_new_session=True) as upload:
        assert upload.stdin is not None
        upload.stdin.write(bytes(2**20))
        upload.stdin.close()


def in_thread() -> None:
    thread = threading.Thread(target=serialise)
    thread.start()
    thread.join()


def in_subprocess() -> None:
    code = f"open({str(FOLDER / 'state')!r}, 'wb').write(bytes({STATE_BYTES}))"
    subprocess.run([sys.executable, "-c", code], check=True)


def saving(save: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    def handler(signum: int, frame: FrameType | None) -> None:
        save()
        (FOLDER / "saved").touch()
        os._exit(0)

    return handler


# -- frameworks ------------------------------------------------------------------------------------


def lightning_trainer() -> None:
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Linear(8, 1)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            if number == 5:
                meet()
            return self.network(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(1000, 8)))


def transformers_trainer(**options: Any) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.network(x).sum()}

    class Freeze(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == 5:
                meet()

    arguments = TrainingArguments(
        str(FOLDER),
        use_cpu=True,
        max_steps=10_000,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    data = [{"x": torch.ones(8)}] * 1000
    Trainer(Model(), arguments, train_dataset=data, callbacks=[Freeze()]).train()


WAITS = {
    "backward": in_backward,
    "item": in_item,
    "barrier": in_barrier,
    "data loader": in_data_loader,
    "sleep": in_sleep,
}
SAVES = {
    "quickly": save_quickly,
    "serialises": serialise,
    "pieces": write_in_pieces,
    "slow pipe": write_to_slow_pipe,
    "thread": in_thread,
    "subprocess": in_subprocess,
}
FRAMEWORKS = {
    "lightning": lightning_trainer,
    "transformers": transformers_trainer,
    "transformers, JIT": lambda: transformers_trainer(enable_jit_checkpoint=True),
}


def main() -> None:
    if KIND in FRAMEWORKS:
        FRAMEWORKS[KIND]()
        return
    if KIND in SAVES:
        signal.signal(signal.SIGTERM, saving(SAVES[KIND]))
        in_sleep()
    dist.init_process_group("gloo")
    if not KIND.endswith("default"):
        signal.signal(signal.SIGTERM, set_flag)
    WAITS[KIND.removesuffix(", default")]()


if __name__ == "__main__":
    main()
