"""Two nodes of one machine under one launcher, what their workers wrote down, and what can befall them."""

from __future__ import annotations

import contextlib
import struct
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from elastic_agent.testing.processes import Agents, Line, Lines, free_port

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


class NoWorldError(Exception):
    """The expected world did not come; the message says in a few words what did."""


class SpoiltError(Exception):
    """The scene could not be set as wanted; another try may."""


def boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass
class World:
    """All ranks of a world have had their first collective; the stages of each, by name."""

    generation: int
    workers: dict[int, dict[str, float]] = field(default_factory=dict)
    """By pid."""
    pids: dict[tuple[str, int], int] = field(default_factory=dict)
    """By node and rank."""

    def latest_s(self, stage: str, nodes: Iterable[str] | None = None) -> float:
        """Return when the last of its workers (of these nodes) got there (CLOCK_BOOTTIME)."""
        pids = self.workers if nodes is None else self.pids_of(nodes)
        return max(self.workers[pid][stage] for pid in pids)

    def pids_of(self, nodes: Iterable[str]) -> list[int]:
        wanted = set(nodes)
        return [pid for (node, _), pid in self.pids.items() if node in wanted]


class Scene(Agents):
    """Start nodes, wait for worlds, do harm. Leaves no process behind."""

    def __init__(self, launcher: Launcher, pause_s: float = 0.01, slots: Mapping[str, int] = SLOTS) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="elastic-agent-benchmark-")
        super().__init__(Path(self._own.name))
        self.launcher = launcher
        self.slots = slots
        self._pause_s = pause_s
        self._cells = self.folder / "cells"
        self._cells.mkdir()
        self.port = free_port()
        self._lines = Lines(self.folder / "events.jsonl")

    def __exit__(self, *how: object) -> None:
        super().__exit__(*how)
        self._own.cleanup()

    # -- starting -------------------------------------------------------------------------------

    def start(self, node: str) -> float:
        """Start a node's agent; when that was (CLOCK_BOOTTIME)."""
        place = Place(node, self.slots[node], self.port, self.folder)
        environment = {
            **self.launcher.environment,
            "BENCH_EVENTS": str(self.folder / "events.jsonl"),
            "BENCH_CELLS": str(self._cells),
            "BENCH_NODE": node,
            "BENCH_PAUSE_S": str(self._pause_s),
        }
        at_s = boottime_s()
        self.agents[node] = self.launch(node, self.launcher.command(place), environment)
        return at_s

    def settle_down(self, nodes: Iterable[str]) -> World:
        """Start these nodes, ``HOST`` a little ahead so that it hosts the store, and let them run for a while."""
        if self.launcher.store is not None:
            self.servers["store"] = self.launch("store", self.launcher.store(self.port, self.folder), {})
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
        """Return how many workers these nodes have."""
        return sum(self.slots[node] for node in nodes)

    def _hosts(self, node: str) -> bool:
        """Return whether a process of this node, such as that of the stores, listens at the scene's port."""
        agent, connections = psutil.Process(self.agents[node].pid), list[Any]()
        for process in (agent, *agent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                connections += process.net_connections("tcp")
        return any(found.status == "LISTEN" and found.laddr.port == self.port for found in connections)

    # -- what comes of it -----------------------------------------------------------------------

    def await_world(self, size: int, after_s: float, limit_s: float, stage: str = "collective") -> World:
        """Return the first world of this size whose workers all got to ``stage`` after ``after_s``.

        Raises:
            NoWorldError: every agent ended, or the time is up.
        """
        ends_s = time.monotonic() + limit_s
        while True:
            world = self.find_world(size, after_s, stage)
            if world is not None:
                return world
            if not any(agent.runs for agent in self.agents.values()):
                raise NoWorldError("job failed")
            if time.monotonic() >= ends_s:
                raise NoWorldError(f"not in {limit_s:.0f} s")
            time.sleep(LOOK_EVERY_S)

    def find_world(self, size: int, after_s: float, stage: str = "collective") -> World | None:
        """Return the same if it is there already."""
        stages: dict[int, dict[str, float]] = {}
        worlds: dict[str, list[Line]] = {}
        for event in self._lines.all():
            if event["boottime_s"] <= after_s:
                continue
            stages.setdefault(event["pid"], {})[event["event"]] = event["boottime_s"]
            if event["event"] == stage and event["world_size"] == size:
                worlds.setdefault(event["world"], []).append(event)
        for met in worlds.values():
            # A process that is kept gets to the stage in several worlds.
            workers = {
                worker["pid"]: {**stages[worker["pid"]], stage: worker["boottime_s"]} for worker in met
            }
            if len(workers) == size:
                pids = {(worker["node"], worker["rank"]): worker["pid"] for worker in met}
                return World(met[0]["generation"], workers, pids)
        return None

    def told(self, event: str) -> list[Line]:
        """Return what workers wrote down under this name."""
        return [line for line in self._lines.all() if line["event"] == event]

    def interruption_s(self, old: World, new: World, nodes: Iterable[str]) -> float:
        """Return how long these nodes' workers had no collective: from the last of the old world to all first ones.

        The first worker to stop and the last to go on count, so no single worker was interrupted for longer.
        """
        nodes = tuple(nodes)
        last_s = min(self._last_round_s(pid) for pid in old.pids_of(nodes))
        return new.latest_s("collective", nodes) - last_s

    def _last_round_s(self, pid: int) -> float:
        """Return when this worker, which may have ended, had its last collective."""
        (at_s,) = CELL.unpack((self._cells / str(pid)).read_bytes())
        return float(at_s)

    # -- harm -----------------------------------------------------------------------------------

    def kill_node(self, node: str) -> float:
        """Kill all of a node's processes at once; returns when it began."""
        at_s = boottime_s()
        self.agents[node].kill_node()
        self.agents[node].process.wait()
        return at_s

    def freeze_node(self, node: str) -> float:
        """Stop all of a node's processes; returns when it began."""
        at_s = boottime_s()
        self.agents[node].freeze_node()
        return at_s
