"""Starting the real command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

COMMAND = [sys.executable, "-m", "elastic_agent"]


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without anything that is a setting."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ELASTIC_AGENT_", "TORCH"))}
    return {**kept, "COLUMNS": "100", **(more or {})}


def elastic_agent(*argv: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``elastic-agent`` to its end."""
    return subprocess.run(
        [*COMMAND, *argv],
        env=clean_environment(variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
