"""What it costs to stop the workers of a generation before a restart, by what they do at SIGTERM.

Two workers under a guard, one of which freezes while the other waits for it. Measured is the time from SIGTERM until no
process is left: with the rule that ends the grace period when no worker makes progress, with a whole grace period, and
without any, which is what the system needs to end such processes. And whether a handler that saves could complete.
"""

from __future__ import annotations

import os
import select
import sys
import tempfile
import time
from pathlib import Path

from elastic_agent.config.settings import Settings
from elastic_agent.linux import boottime_s
from elastic_agent.testing.ports import free_port
from elastic_agent.workers.guard.client import Guard, GuardEvent, Launch, Stopped

from .figures import Figures, Result
from .options import Options, progress

SCRIPT = Path(__file__).parent / "scripts" / "at_sigterm.py"
RULE, WHOLE_GRACE, AT_ONCE = "by progress", "whole grace of 1 s", "SIGKILL at once"
WHOLE_GRACE_S = 1.0
PATIENCE_S = 120.0
SETTLE_S = 0.2
"""Until a worker that said that it is ready is in its call."""

WAITS = {
    "backward, default": "DDP's backward, no handler",
    "backward": "DDP's backward, handler sets a flag",
    "item": "all_reduce and .item(), handler sets a flag",
    "barrier": "barrier, handler sets a flag",
    "data loader": "data loader, handler sets a flag",
    "sleep": "time.sleep, handler sets a flag",
    "lightning": "Lightning's Trainer",
    "transformers": "transformers' Trainer",
    "transformers, JIT": "transformers' Trainer, enable_jit_checkpoint",
}
SAVES = {
    "quickly": "handler saves quickly",
    "serialises": "handler serialises for 2 s, then writes",
    "pieces": "handler writes 64 MB in pieces with fsync",
    "slow pipe": "handler writes 1 MB to a pipe read at 320 KB/s",
    "thread": "handler waits for a thread that serialises for 2 s and writes",
    "subprocess": "handler waits for a process that writes 64 MB",
}


def run(options: Options) -> Result:
    figures = Figures()
    saved: list[str] = []
    for kind, what in {**WAITS, **SAVES}.items():
        for who in (RULE, WHOLE_GRACE, AT_ONCE):
            figure = figures.of(what, who)
            for _ in range(options.times):
                took_s, completed = measure(kind, who)
                figure.add(took_s)
                progress(f"{what}, {who}: {took_s:.3f} s{', saved' if completed else ''}")
            if kind in SAVES:
                saved.append(f"{what}, {who}: {'saved' if completed else 'not saved'}")
    return Result("stopping", list(figures), notes=saved)


def measure(kind: str, who: str) -> tuple[float, bool]:
    """Seconds from SIGTERM until nothing is left, and whether the handler saved."""
    with tempfile.TemporaryDirectory() as folder:
        guard = Guard.start()
        try:
            guard.set_deadline(boottime_s() + 1000)
            guard.spawn(1, launches(Path(folder), kind))
            await_ready(Path(folder))
            time.sleep(SETTLE_S)
            return stop(guard, who), (Path(folder) / "saved").exists()
        finally:
            guard.close()


def launches(folder: Path, kind: str) -> list[Launch]:
    both = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": "stopping",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    argv = (sys.executable, str(SCRIPT), str(folder), kind)
    output = str(folder / "output")
    return [
        Launch(
            rank,
            argv,
            {**os.environ, **both, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=output,
            stderr=output,
        )
        for rank in range(2)
    ]


def await_ready(folder: Path) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not all((folder / str(rank)).exists() for rank in range(2)):
        if time.monotonic() > ends:
            raise TimeoutError((folder / "output").read_text())
        time.sleep(0.01)


def stop(guard: Guard, who: str) -> float:
    defaults = Settings()
    began = time.monotonic()
    if who is RULE:
        guard.stop(defaults.restart_grace, idle_s=defaults.restart_idle)
    else:
        guard.stop(WHOLE_GRACE_S if who is WHOLE_GRACE else 0.0)
    events: list[GuardEvent] = []
    while not any(isinstance(event, Stopped) for event in events):
        select.select((guard,), (), (), PATIENCE_S)
        events = guard.read_events()
    return time.monotonic() - began
