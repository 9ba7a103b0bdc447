"""Ports for servers that a test starts, each given once."""

from __future__ import annotations

import os

from elastic_agent.testing import processes

_given: set[int] = set()


def _range_of_this_lane() -> range:
    """Return ports that no other process of pytest-xdist gives to its tests."""
    lane = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    share = (processes.LAST_PORT - processes.FIRST_PORT) // 4
    return range(processes.FIRST_PORT + lane * share, processes.FIRST_PORT + (lane + 1) * share)


def free_port() -> int:
    """Return a port without a listener, which is given to no other caller."""
    port = processes.free_port(_given, within=_range_of_this_lane())
    _given.add(port)
    return port


def free_ports(count: int) -> list[int]:
    """Return several."""
    return [free_port() for _ in range(count)]
