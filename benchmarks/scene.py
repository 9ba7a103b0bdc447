"""Two nodes of one machine under one launcher, what their workers wrote down, and what can befall them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from elastic_agent.testing.processes import Lines, free_port

from .launchers import Launcher, Place

HOST, PEER, THIRD = THREE = ("host", "peer", "third")
BOTH = (HOST, PEER)
SLOTS = {HOST: 2, PEER: 1, THIRD: 1}
"""Workers of each node, unless a benchmark says otherwise."""
CELL = struct.Struct("d")
HEAD_START_S = 0.4
LOOK_EVERY_S = 0.02
"""How often files are looked at; what is measured is what the workers wrote, so this adds nothing to it."""
SCENE_LIMIT_S = 90.0
PR_SET_CHILD_SUBREAPER = 36

Event = dict[str, Any]


class NoWorldError(Exception):
    """The expected world did not come; the message says in a few words what did."""


class SpoiltError(Exception):
    """The scene could not be set as wanted; another try may."""


def boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def become_subreaper() -> None:
    """Have everything that a launcher leaves behind fall to this process, which ends it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass
class World:
    """All ranks of a world have had their first collective; the stages of each, by name."""

    generation: int
    workers: dict[int, dict[str, float]] = field(default_factory=dict)
    """By pid."""
    pids: dict[tuple[str, int], int] = field(default_factory=dict)
    """By node and rank."""

    def latest_s(self, stage: str, nodes: Iterable[str] | None = None) -> float:
        """When the last of its workers (of these nodes) got there (CLOCK_BOOTTIME)."""
        pids = self.workers if nodes is None else self.pids_of(nodes)
        return max(self.workers[pid][stage] for pid in pids)

    def pids_of(self, nodes: Iterable[str]) -> list[int]:
        wanted = set(nodes)
        return [pid for (node, _), pid in self.pids.items() if node in wanted]


class Scene:
    """Start nodes, wait for worlds, do harm. Leaves no process behind."""

    def __init__(self, launcher: Launcher, pause_s: float = 0.01, slots: Mapping[str, int] = SLOTS) -> None:
        self.launcher = launcher
        self.slots = slots
        self._pause_s = pause_s
        self._own = tempfile.TemporaryDirectory(prefix="elastic-agent-benchmark-")
        self.folder = Path(self._own.name)
        self._cells = self.folder / "cells"
        self._cells.mkdir()
        self.port = free_port()
        self._lines = Lines(self.folder / "events.jsonl")
        self._journal = Lines(self.folder / "journal.jsonl")
        self.agents: dict[str, psutil.Popen] = {}
        self._strays: list[psutil.Process] = []
        self._others = {one.pid for one in psutil.Process().children(recursive=True)}
        """Processes of the benchmark that are not the scene's."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _kill([one for node in self.agents for one in self.processes(node)] + self._strays)
        left = psutil.Process().children(recursive=True)  # what was left to us
        _kill([one for one in left if one.pid not in self._others])
        self._own.cleanup()

    # -- starting -------------------------------------------------------------------------------

    def start(self, node: str) -> float:
        """Start a node's agent; when that was (CLOCK_BOOTTIME)."""
        place = Place(node, self.slots[node], self.port, self.folder)
        environment = {
            **os.environ,
            **self.launcher.environment,
            "OMP_NUM_THREADS": "1",
            "BENCH_EVENTS": str(self.folder / "events.jsonl"),
            "BENCH_CELLS": str(self._cells),
            "BENCH_NODE": node,
            "BENCH_PAUSE_S": str(self._pause_s),
        }
        with (self.folder / f"{node}.log").open("ab") as log:
            at_s = boottime_s()
            self.agents[node] = psutil.Popen(
                self.launcher.command(place),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return at_s

    def settle_down(self, nodes: Iterable[str]) -> World:
        """Start these nodes, ``HOST`` a little ahead so that it hosts the store, and let them run for a while."""
        if self.launcher.store is not None:
            with (self.folder / "store.log").open("wb") as log:
                command = self.launcher.store(self.port, self.folder)
                self._strays.append(psutil.Popen(command, stdout=log, stderr=log))
        for node in nodes:
            self.start(node)
            time.sleep(HEAD_START_S)
        try:
            world = self.await_world(self.size(self.agents), 0.0, SCENE_LIMIT_S, stage="steady")
        except NoWorldError as error:
            raise SpoiltError(f"did not get going: {error}") from None
        if self.launcher.store is None and not self._hosts(HOST):
            raise SpoiltError("the store was hosted by the other node")
        return world

    def size(self, nodes: Iterable[str]) -> int:
        """How many workers these nodes have."""
        return sum(self.slots[node] for node in nodes)

    def _hosts(self, node: str) -> bool:
        """Return whether a process of this node, such as that of the stores, listens at the scene's port."""
        connections: list[Any] = []
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                connections += process.net_connections("tcp")
        return any(one.status == "LISTEN" and one.laddr.port == self.port for one in connections)

    # -- what comes of it -----------------------------------------------------------------------

    def await_world(self, size: int, after_s: float, limit_s: float, stage: str = "collective") -> World:
        """The first world of this size whose workers all started after ``after_s`` and got to ``stage``.

        Raises:
            NoWorldError: every agent ended, or the time is up.
        """
        ends_s = time.monotonic() + limit_s
        while True:
            world = self._find_world(size, after_s, stage)
            if world is not None:
                return world
            if all(agent.poll() is not None for agent in self.agents.values()):
                raise NoWorldError("job failed")
            if time.monotonic() >= ends_s:
                raise NoWorldError(f"not in {limit_s:.0f} s")
            time.sleep(LOOK_EVERY_S)

    def _find_world(self, size: int, after_s: float, stage: str) -> World | None:
        stages: dict[int, dict[str, float]] = {}
        worlds: dict[str, list[Event]] = {}
        for event in self._lines.all():
            if event["boottime_s"] <= after_s:
                continue
            stages.setdefault(event["pid"], {})[event["event"]] = event["boottime_s"]
            if event["event"] == stage and event["world_size"] == size:
                worlds.setdefault(event["world"], []).append(event)
        for met in worlds.values():
            workers = {one["pid"]: stages[one["pid"]] for one in met}
            new = all("first_line" in one for one in workers.values())
            if len(workers) == size and new:
                pids = {(one["node"], one["rank"]): one["pid"] for one in met}
                return World(met[0]["generation"], workers, pids)
        return None

    def interruption_s(self, old: World, new: World, nodes: Iterable[str]) -> float:
        """How long these nodes' workers had no collective: from the old world's last to all their first of the new.

        The first worker to stop and the last to go on count, so no single worker was interrupted for longer.
        """
        nodes = tuple(nodes)
        last_s = min(self._last_round_s(pid) for pid in old.pids_of(nodes))
        return new.latest_s("collective", nodes) - last_s

    def _last_round_s(self, pid: int) -> float:
        """When this worker, which may have ended, had its last collective."""
        (at_s,) = CELL.unpack((self._cells / str(pid)).read_bytes())
        return float(at_s)

    def journal(self) -> list[Event]:
        """What our agents wrote down (none under other launchers)."""
        return self._journal.all()

    # -- harm -----------------------------------------------------------------------------------

    def processes(self, node: str) -> list[psutil.Process]:
        """A node's agent and everything below it."""
        agent = self.agents[node]
        try:
            return [agent, *agent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill_node(self, node: str) -> float:
        """SIGKILL to all of a node's processes at once, as far as that is possible; when it began."""
        processes = self.processes(node)
        self._strays += processes
        at_s = boottime_s()
        _signal(processes, signal.SIGKILL)
        self.agents[node].wait()
        return at_s

    def freeze_node(self, node: str) -> float:
        """SIGSTOP to all of a node's processes; when it began."""
        processes = self.processes(node)
        self._strays += processes
        at_s = boottime_s()
        _signal(processes, signal.SIGSTOP)
        return at_s


def _signal(processes: Iterable[psutil.Process], signum: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def _kill(processes: list[psutil.Process]) -> None:
    _signal(processes, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=10.0)
