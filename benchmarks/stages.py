"""Where the time goes: stages of a start or a recovery, from the agents' journals and the workers' notes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from elastic_agent.testing.processes import Line

from .figures import print_table, show
from .scene import World

_FROM_THE_PLAN_ON = (
    "plan running seen",
    "workers started",
    "first line",
    "torch imported",
    "process group",
    "first collective",
)
START_STAGES = ("agents up", "registered", "spawners ready", *_FROM_THE_PLAN_ON)
RECOVERY_STAGES = ("exit noticed", "plan forming seen", "stopped", *_FROM_THE_PLAN_ON)

Stages = dict[str, float]
"""Seconds from the launch or fault until the last process got there; a stage that did not occur is missing."""


def breakdown(names: Iterable[str], journal: list[Line], world: World, since_s: float) -> Stages:
    """Return when the last one reached each stage on the way to this world."""
    found = {**_of_agents(journal, world.generation, since_s), **_of_workers(world)}
    return {name: round(found[name] - since_s, 5) for name in names if name in found}


def _of_agents(journal: list[Line], generation: int, since_s: float) -> Stages:
    new = [event for event in journal if event["boottime_s"] >= since_s]

    def named(name: str, **wanted: object) -> list[float]:
        return [
            event["boottime_s"]
            for event in new
            if event["event"] == name and all(event.get(key) == value for key, value in wanted.items())
        ]

    moments = {
        "agents up": named("agent_started"),
        "registered": named("registered"),
        "spawners ready": named("spawner_ready"),
        "exit noticed": named("worker_exited")[:1],
        "plan forming seen": named("plan", phase="forming", generation=generation),
        "stopped": named("workers_stopped", generation=generation - 1),
        "plan running seen": named("plan", phase="running", generation=generation),
        "workers started": named("workers_started", generation=generation),
    }
    return {name: max(times) for name, times in moments.items() if times}


def _of_workers(world: World) -> Stages:
    names = {
        "first line": "first_line",
        "torch imported": "imported",
        "process group": "process_group",
        "first collective": "collective",
    }
    reached = set.intersection(*(set(stages) for stages in world.workers.values()))
    return {name: world.latest_s(stage) for name, stage in names.items() if stage in reached}


def median_stages(names: Iterable[str], samples: list[Stages]) -> Stages:
    """The median of each stage over those runs in which it occurred."""
    return {
        name: statistics.median(sample[name] for sample in samples if name in sample)
        for name in names
        if any(name in sample for sample in samples)
    }


def print_stages(names: tuple[str, ...], rows: dict[str, Stages]) -> None:
    """The time from the fault to each stage, medians, one line per fault."""
    print("\nUntil the last process reached each stage (medians):")
    table = [("", "", *names)]
    for what, stages in rows.items():
        table.append((what, "", *(show(stages[name], "s") if name in stages else "–" for name in names)))
    print_table(table)
