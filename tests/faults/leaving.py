"""Workers that share memory by name and are killed with everything that would have cleared it away.

In the first generation worker 1 shares memory in two ways and does not end when asked to, and worker 0 fails as
soon as it has. In the second generation worker 0 writes down what is left of it when it starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
SHARED, GO_ON, LEFT = FOLDER / "shared.json", FOLDER / "go-on", FOLDER / "left.json"
PATIENCE_S = 90.0


def wait_for(file: Path) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < deadline_s, f"{file} does not come"
        time.sleep(0.02)


def write(file: Path, names: list[str]) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(names))
    draft.replace(file)


def kill_helpers() -> None:
    """As the kernel may, when memory is short: Python's and torch's processes that clear away after a death."""
    resource_tracker.ensure_running()
    helpers = [resource_tracker._resource_tracker._pid]  # type: ignore[attr-defined]
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended in between
            if b"torch_shm_manager" in (Path("/proc") / entry / "cmdline").read_bytes():
                environment = (Path("/proc") / entry / "environ").read_bytes()
                if os.fsencode(os.environ["TORCHELASTIC_ERROR_FILE"]) in environment:
                    helpers.append(int(entry))
    assert len(helpers) == 2
    for pid in helpers:
        os.kill(pid, signal.SIGKILL)


def share_and_stay() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.multiprocessing.set_sharing_strategy("file_system")
    iterator: Any = iter(DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=4, num_workers=1))
    loader = iterator._workers[0].pid
    batches = [*iterator]
    memory = SharedMemory(create=True, size=64)
    tensors = [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{loader}_")]
    assert len(batches) == 2
    assert tensors
    kill_helpers()
    write(SHARED, [memory.name, *tensors])
    while True:
        signal.pause()


if os.environ["ELASTIC_AGENT_GENERATION"] == "1":
    if os.environ["LOCAL_RANK"] == "1":
        share_and_stay()
    wait_for(GO_ON)
    sys.exit("the other one is to be killed")
if os.environ["LOCAL_RANK"] == "0":
    names = json.loads(SHARED.read_text())
    write(LEFT, [name for name in names if os.path.exists(f"/dev/shm/{name}")])
