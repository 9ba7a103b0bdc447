"""Warns of workers that train independent copies of a model, as their script has made no process group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator

from elastic_agent.agent import events
from elastic_agent.config.settings import Settings
from elastic_agent.logs import get_logger
from elastic_agent.protocol import World
from elastic_agent.rendezvous.asyncio_runner import run_abandonable
from elastic_agent.transport import StoreLostError
from elastic_agent.workers.guard.client import Spawned

TELL_AFTER_S = 60.0
"""Scripts have made their process group by then, unless they first prepare data for long."""

SCAN_S = 10.0
MOST_FILES = 200

_IMPORTED = re.compile(rb"^[ \t]*(?:from|import)[ \t]+(\w+)", re.MULTILINE)
_TRAINERS = {b"torch", b"lightning", b"pytorch_lightning", b"accelerate", b"transformers"}
_SHARES_WORK = re.compile(rb"\b(?:RANK|WORLD_SIZE|spawn|horovod|mpi4py|jax|ray)\b")
"""In the source of scripts that divide their work themselves, or start processes that meet."""


class CopiesWatch:
    """Tells once, after a minute of a generation or at its successful end, that its workers have not met."""

    def __init__(
        self,
        settings: Settings,
        world: Callable[[], World | None],
        introduced: Callable[[], Collection[int]],
        tell_after_s: float = TELL_AFTER_S,
    ) -> None:
        """Watch nothing yet.

        Args:
            settings: of this node; name the script.
            world: the world whose workers this node runs or ran last.
            introduced: the slots of those that have made a process group.
            tell_after_s: how long workers may take to make one.
        """
        self._settings = settings
        self._world = world
        self._introduced = introduced
        self._tell_after_s = tell_after_s
        self._scan: asyncio.Task[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Whether other programs and interpreters make process groups is not known.
        self._is_over = settings.runs_program or settings.python_exec not in (None, sys.executable)

    def on_event(self, event: events.Event) -> None:
        """Follow the workers of this node."""
        match event:
            case Spawned():
                self._begin()
            case events.WorkersSucceeded():
                self._tell(":")
                self._stop_timer()
            case events.WorkersStopping() | events.WorkersSaved():
                self._stop_timer()

    def close(self) -> None:
        """Watch no more."""
        self._stop_timer()
        if self._scan is not None:
            self._scan.cancel()

    def _begin(self) -> None:
        self._stop_timer()
        world = self._world()
        if self._is_over or world is None or world.world_size == 1:
            return
        if self._scan is None:
            self._scan = asyncio.create_task(self._trains_alone())
        so_far = f" in {self._tell_after_s:g} s; unless one does,"
        self._timer = asyncio.get_running_loop().call_later(self._tell_after_s, self._tell, so_far)

    async def _trains_alone(self) -> bool:
        script, is_module = self._settings.script, self._settings.runs_module
        with contextlib.suppress(
            StoreLostError, OSError
        ):  # it takes too long, or the working directory is gone
            return await run_abandonable(lambda: trains_alone(script, is_module=is_module), SCAN_S)
        return False

    def _tell(self, when: str) -> None:
        world = self._world()
        self._is_over |= bool(self._introduced())
        if self._is_over or world is None or self._scan is None or not self._scan.done():
            return
        self._is_over = True
        if self._scan.result():
            get_logger().warning(
                f"no worker of this node has made a process group{when} each of the {world.world_size} workers "
                "trains a copy of its own. To train one model, call torch.distributed.init_process_group() or "
                "fabric.launch(), or use Accelerator, or a Trainer with all devices; if the copies are intended, "
                "ignore this"
            )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def trains_alone(script: str, *, is_module: bool) -> bool:
    """Return whether a script or the files beside it use PyTorch, and nothing in them divides work between ranks.

    Reads the source; nothing is executed.
    """
    uses_torch = False
    for source in _sources(script, is_module):
        if _SHARES_WORK.search(source):
            return False
        uses_torch = uses_torch or not _TRAINERS.isdisjoint(_IMPORTED.findall(source))
    return uses_torch


def _sources(script: str, is_module: bool) -> Iterator[bytes]:
    """Read the script, and the modules and packages in its folder that it imports, directly or through others."""
    base = os.path.join(*script.split(".")) if is_module else script
    folder = os.getcwd() if is_module else os.path.dirname(os.path.abspath(script))
    pending = [base, f"{base}.py", os.path.join(base, "__main__.py")] if is_module else [base]
    seen: set[str] = set()
    while pending and len(seen) < MOST_FILES:
        file = os.path.abspath(pending.pop())
        if file in seen:
            continue
        seen.add(file)
        try:
            with open(file, "rb") as opened:
                source = opened.read()
        except OSError:
            continue
        yield source
        for name in set(_IMPORTED.findall(source)):
            pending += _files_of(os.path.join(folder, name.decode()))


def _files_of(module: str) -> list[str]:
    """List the files of a module or package with this path; none if it is not there."""
    inside = os.walk(module)
    found = [
        os.path.join(place, name) for place, _, names in inside for name in names if name.endswith(".py")
    ]
    return [*found[:MOST_FILES], *([f"{module}.py"] if os.path.isfile(f"{module}.py") else [])]
