"""Starts agents as users do, with leases and patience that outlast a stall of the machine."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

from tests.cli import support
from tests.cli.support import COMMAND
from tests.processes import status_field
from tests.waiting import wait_for

__all__ = ["COMMAND", "clean_environment", "elastic_agent", "wait_until_asleep"]

PATIENT = {
    "ELASTIC_AGENT_LEASE_TTL": "60",
    "ELASTIC_AGENT_START_TIMEOUT": "300",
    "ELASTIC_AGENT_WORKER_START": "cold",
}
"""Cold workers start sooner where scripts import little, and no spawner imports torch."""


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without settings, except for these."""
    return support.clean_environment({**PATIENT, **(more or {})})


def elastic_agent(
    *argv: str, variables: Mapping[str, str] | None = None, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``elastic-agent`` to its end; ``how``: as in tests/cli/support.py."""
    return support.elastic_agent(*argv, variables={**PATIENT, **(variables or {})}, patience_s=300.0, **how)


def wait_until_asleep(pid: int) -> None:
    """Wait until a process that is about to wait for something does so."""
    wait_for(f"process {pid} to sleep", lambda: status_field(pid, "State").startswith("S"))
