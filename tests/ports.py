"""Ports for servers that a test starts, each given once."""

from __future__ import annotations

from elastic_agent.testing import ports

_given: set[int] = set()


def free_port() -> int:
    """One without a listener, which is given to no other caller."""
    port = ports.free_port(_given)
    _given.add(port)
    return port


def free_ports(count: int) -> list[int]:
    """Several."""
    return [free_port() for _ in range(count)]
