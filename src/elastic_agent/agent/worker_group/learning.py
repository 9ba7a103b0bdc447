"""Learns which installed modules a script's workers import, so that the next workers find them preloaded.

Workers report what they have imported (`workers/spawner/import_report.py`) to a socket of the agent. The agent writes
it down and has the guard prepare another spawner in the background. That one tries which of the modules may be
preloaded (`workers/spawner/trial.py`), imports those, and takes the place of the present spawner.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from elastic_agent.agent import events
from elastic_agent.config.settings import Settings
from elastic_agent.files import all_but_newest, write_atomically
from elastic_agent.logs import get_logger
from elastic_agent.rendezvous.disk_thread import DiskThread
from elastic_agent.workers.guard.client import Guard, NotLearned, PreloadOutdated, SpawnerConfig, Warm

from .datagrams import WorkerDatagrams
from .script_files import ScriptFiles

KEPT_SCRIPTS = 100
"""For so many scripts is kept what was learned, the newest."""

_VERSION = 2
_MOST_NAMES = 20_000
_MOST_VARIABLES = 1_000
_GATHER_S = 1.0
"""How long the reports of the other workers are awaited after the first."""
_PAUSE_S = (10.0, 640.0)
"""The shortest and longest time between two spawners; it doubles."""
_WRITE_S = 10.0
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

_Name = Annotated[str, Meta(max_length=256)]


class _Report(Struct, frozen=True):
    """A message of a worker."""

    slot: int
    names: Annotated[list[_Name], Meta(max_length=_MOST_NAMES)]
    changed: Annotated[dict[_Name, _Name], Meta(max_length=_MOST_VARIABLES)]


class _Known(Struct):
    """What workers of a script reported so far: the content of a file."""

    version: int = _VERSION
    serial: int = 0
    """Increased whenever this is written."""
    names: Annotated[list[_Name], Meta(max_length=_MOST_NAMES)] = msgspec.field(default_factory=list)
    """Modules, in the order in which they were imported."""
    changed: Annotated[dict[_Name, _Name], Meta(max_length=_MOST_VARIABLES)] = msgspec.field(
        default_factory=dict
    )
    """Variables that the script changed, and the last module that was imported before; empty: none was."""


def _read_known(path: Path) -> _Known:
    try:
        known = msgspec.json.decode(path.read_bytes(), type=_Known)
    except (OSError, ValueError, RecursionError):
        return _Known()
    return known if known.version == _VERSION else _Known()


@dataclass
class _Preparation:
    """When another spawner may be prepared."""

    pause_s: float = _PAUSE_S[0]
    timer: asyncio.TimerHandle | None = None
    running: bool = False
    wanted: bool = False
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


class Learning:
    """What this agent learns about its script. To be opened and closed in the agent's loop."""

    def __init__(
        self, settings: Settings, config: SpawnerConfig, guard: Callable[[], Guard], script: str
    ) -> None:
        """``config``: the spawner's; ``guard``: the present guard; ``script``: its name in messages."""
        self._files = ScriptFiles.of(settings, config.folder)
        self._config = config
        self._guard = guard
        self._script = script
        self._known = _Known()
        self._names: set[str] = set()
        self._untried = config.learn is None
        self._datagrams = WorkerDatagrams("imports", self._receive)
        self._disk = DiskThread("preload")
        self._next = _Preparation()

    @property
    def address(self) -> str | None:
        """Where workers are to report; None while it is closed."""
        return self._datagrams.address

    def open(self) -> None:
        """Listen to reports. Without a socket nothing is learned."""
        if not self._datagrams.open():
            return
        self._known = _read_known(self._files.reported)
        self._names = set(self._known.names)

    def close(self) -> None:
        """Stop listening; what has been written down stays."""
        self._datagrams.close()
        if self._next.timer is not None:
            self._next.timer.cancel()
        for task in self._next.tasks:
            task.cancel()

    def on_event(self, event: events.Event) -> None:
        """Take note of what became of the spawner."""
        match event:
            case PreloadOutdated():
                self._untried = True
                self._want()
            case Warm() | NotLearned() if self._next.running:
                self._next.running = False
                if isinstance(event, Warm) and event.serial == self._known.serial and not self._untried:
                    self._next.wanted = False  # it has taken in what was reported meanwhile
                self._next.timer = asyncio.get_running_loop().call_later(self._next.pause_s, self._rested)
                self._next.pause_s = min(2 * self._next.pause_s, _PAUSE_S[1])
                if isinstance(event, Warm):
                    get_logger().info(
                        f"learned which modules {self._script} imports: workers now start with "
                        f"{event.learned} of them preloaded"
                    )
            case NotLearned():
                self._untried = True

    # -- reports --------------------------------------------------------------------------------

    def _receive(self, data: bytes, _: bytes) -> None:
        self._take_in(msgspec.json.decode(data, type=_Report))

    def _take_in(self, report: _Report) -> None:
        fresh = [one for one in report.names if one not in self._names and _MODULE.fullmatch(one)]
        room = _MOST_NAMES - len(self._known.names)
        self._known.names.extend(fresh[:room])
        self._names.update(fresh[:room])
        changed = {
            variable: last for variable, last in report.changed.items() if self._is_news(variable, last)
        }
        self._known.changed.update(changed)
        if fresh[:room] or changed or self._untried:
            self._want()

    def _is_news(self, variable: str, last: str) -> bool:
        """Whether this was not known, or the variable is now set before all modules."""
        known = self._known.changed.get(variable)
        if known is None:
            return len(self._known.changed) < _MOST_VARIABLES
        return not last and bool(known)

    # -- spawners -------------------------------------------------------------------------------

    def _want(self) -> None:
        """There is something to learn, by the spawner that is being prepared or by another one after it."""
        self._next.wanted = True
        if self._next.running:
            self._spawn(self._write_known())
        elif self._next.timer is None:
            self._next.timer = asyncio.get_running_loop().call_later(_GATHER_S, self._prepare)

    def _rested(self) -> None:
        self._next.timer = None
        if self._next.wanted:
            self._prepare()

    def _prepare(self) -> None:
        self._next.timer = None
        self._next.wanted = self._untried = False
        self._next.running = True
        self._spawn(self._write_and_prepare())

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._next.tasks.add(task)
        task.add_done_callback(self._next.tasks.discard)

    async def _write_and_prepare(self) -> None:
        if await self._write_known():
            self._guard().prepare_spawner(replace(self._config, learn=self._files.source(learn=True)))
        else:
            self._next.running = False

    async def _write_known(self) -> bool:
        """Write down what was reported so far. Returns whether it worked."""
        self._known.serial += 1
        content = msgspec.json.encode(self._known)
        try:
            await self._disk.call_async("reported", lambda: self._write(content), _WRITE_S)
        except OSError as error:
            get_logger().debug("cannot write down what workers import", reason=str(error))
            return False
        return True

    def _write(self, content: bytes) -> None:
        folder = self._files.reported.parent
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._files.reported, content)
        for _, path in all_but_newest(folder.glob("*.json"), 2 * KEPT_SCRIPTS):
            with contextlib.suppress(OSError):
                path.unlink()
