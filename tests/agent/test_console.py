"""What the person at the terminal is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from msgspec.structs import replace
from elastic_agent.agent.events import AgentStarted
from elastic_agent.agent.reporting.console import ConsoleReporter
from elastic_agent.rendezvous.events import Connected, Disconnected, PlanSeen
from elastic_agent.logs import configure_logging
from elastic_agent.protocol.records import RECORD_VERSION, Address, Budget, Phase, Plan, Policy, Seat, World

async def nothing():
    return ""

async def main():
    configure_logging("console", "info", sys.stderr)
    shown = "host0:0"
    narrator = ConsoleReporter(lambda: shown, nothing)
    tell = narrator.on_event
    tell(AgentStarted("me", 1, 2, "boot", "pid:[1]"))
    print(narrator.headline())
    shown = "host0:29400"  # the port is known when the store is hosted
    tell(Disconnected("refused"))
    print(narrator.headline())
    tell(Connected("store", False))
    print(narrator.headline())
    world = World(3, (Seat("n1", "me", "10.0.0.1", 2, 0),), Address("10.0.0.1", 1234), "n1")
    sealed = Plan(RECORD_VERSION, 5, Phase.RUNNING, 3, "1 node, 2 workers", Policy(), world=world)
    tell(PlanSeen(sealed))
    print(narrator.headline(), narrator.headline(1200), sep="\\n")
    tell(PlanSeen(replace(sealed, version=6, budget=Budget(progress_s=60.0))))
    tell(PlanSeen(replace(sealed, version=6, reason="refused: node id n1 is held")))
    tell(PlanSeen(replace(sealed, version=7, generation=4, world=replace(world, generation=4))))
    tell(Disconnected("reset"))
    print(narrator.headline(1300))
    tell(PlanSeen(replace(sealed, version=8, phase=Phase.FORMING, generation=5, world=None)))
    print(narrator.headline())
    tell(AgentStarted("other", 1, 2, "boot", "pid:[1]"))
    tell(PlanSeen(replace(sealed, version=9, generation=5, world=replace(world, generation=5))))
    print(narrator.headline())
    tell(PlanSeen(replace(sealed, version=10, phase=Phase.FINISHED, generation=5, reason="done")))
    print(narrator.headline())
    narrator.close()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def told() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )


def test_a_world_is_logged_once_and_changes_to_it_as_updates(told: subprocess.CompletedProcess[str]) -> None:
    announced, news, following = [line for line in told.stderr.splitlines() if " generation " in line][:3]
    assert "generation 3: 1 node, 2 workers; ranks 0-1 here" in announced
    assert "generation 3 continues: refused: node id n1 is held" in news
    assert "generation 4: 1 node, 2 workers; ranks 0-1 here" in following


def test_the_headline_describes_the_status_in_one_line(told: subprocess.CompletedProcess[str]) -> None:
    assert told.stdout.splitlines() == [
        "connecting to host0:0",
        "waiting for the store at host0:29400: refused",
        "joining the run",
        "generation 3: 1 node, 2 workers",
        "generation 3: 1 node, 2 workers, step 1200",
        "generation 4: 1 node, 2 workers, step 1300; waiting for the store at host0:29400: reset",
        "forming generation 5",
        "on standby: generation 5 runs with 1 node (maximum 1)",
        "the run finished: done",
    ]
