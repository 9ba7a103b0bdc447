"""What the person at the terminal is told."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, sys
from msgspec.structs import replace
from elastic_agent.agent.narrator import Narrator
from elastic_agent.logs import configure_logging
from elastic_agent.protocol.records import RECORD_VERSION, Address, Phase, Plan, Policy, Seat, World

async def nothing():
    return ""

async def main():
    configure_logging("console", "info", sys.stderr)
    narrator = Narrator("host0:29400", nothing)
    world = World(3, (Seat("n1", "me", "10.0.0.1", 2, 0),), Address("10.0.0.1", 1234), "n1")
    sealed = Plan(RECORD_VERSION, 5, Phase.RUNNING, 3, "1 node, 2 workers", Policy(), world=world)
    narrator.plan(sealed, "me")
    narrator.plan(replace(sealed, version=6, reason="refused: node id n1 is held"), "me")
    narrator.plan(replace(sealed, version=7, generation=4, world=replace(world, generation=4)), "me")
    narrator.close()

asyncio.run(main())
"""


def test_a_world_is_announced_once_and_news_about_it_as_such() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    announced, news, following = done.stderr.splitlines()
    assert "generation 3: 1 node, 2 workers; ranks 0-1 here" in announced
    assert "generation 3 goes on: refused: node id n1 is held" in news
    assert "generation 4: 1 node, 2 workers; ranks 0-1 here" in following
