"""Starting the real command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

COMMAND = [sys.executable, "-m", "elastic_agent"]


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without anything that is a setting."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ELASTIC_AGENT_", "TORCH"))}
    return {**kept, "COLUMNS": "100", **(more or {})}


def elastic_agent(
    *argv: str, variables: Mapping[str, str] | None = None, under: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``elastic-agent`` to its end; ``under``: a command that runs the command that follows it."""
    return subprocess.run(
        [*under, *COMMAND, *argv],
        env=clean_environment(variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def without_overrides() -> list[str]:
    """A command that runs another as a user whom permissions stop, root included."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("as root this needs setpriv (util-linux)")
    overrides = "-dac_override,-dac_read_search"
    return ["setpriv", f"--inh-caps={overrides}", f"--bounding-set={overrides}"]
