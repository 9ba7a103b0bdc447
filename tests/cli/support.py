"""Starting the real command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from sysconfig import get_path
from typing import Any

import pytest

import elastic_agent as elastic_agent_package
from tests.waiting import GUARD_S

COMMAND = [sys.executable, "-m", "elastic_agent"]
LONG_LEASE = {"ELASTIC_AGENT_LEASE_TTL": "30"}
"""For runs: no pause of a loaded machine costs their lease."""


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without anything that is a setting."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ELASTIC_AGENT_", "TORCH"))}
    return {**kept, "COLUMNS": "100", **(more or {})}


def elastic_agent(
    *argv: str,
    variables: Mapping[str, str] | None = None,
    under: Sequence[str] = (),
    command: Sequence[str] = COMMAND,
    patience_s: float = GUARD_S,
    pass_fds: tuple[int, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run ``elastic-agent`` to its end; ``under``: a command that runs the command that follows it."""
    return subprocess.run(
        [*under, *command, *argv],
        env=clean_environment(variables),
        capture_output=True,
        text=True,
        timeout=patience_s,
        check=False,
        stdin=subprocess.DEVNULL,
        pass_fds=pass_fds,
    )


def refusal(*argv: str, **how: Any) -> str:
    """Run ``elastic-agent`` with a mistake (see :func:`elastic_agent`); returns its one line on standard error."""
    done = elastic_agent(*argv, **how)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    return done.stderr


def without_overrides() -> list[str]:
    """A command that runs another one as a user to whom permissions apply, also for root."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("as root this needs setpriv (util-linux)")
    overrides = "-dac_override,-dac_read_search"
    return ["setpriv", f"--inh-caps={overrides}", f"--bounding-set={overrides}"]


def command_of_another_user(uid: int) -> list[str]:
    """The command as another user would run it; as it is, without root. Skips where that user has no such Python."""
    if os.geteuid() != 0:
        return COMMAND
    if shutil.which("setpriv") is None:
        pytest.skip("as root this needs setpriv (util-linux)")
    packages = os.pathsep.join((str(Path(elastic_agent_package.__file__).parents[1]), get_path("purelib")))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "env"]
        command += [f"PYTHONPATH={packages}", "HOME=/nonexistent", python]
        if (
            subprocess.run([*command, "-c", "import elastic_agent, torch"], capture_output=True).returncode
            == 0
        ):
            return [*command, "-m", "elastic_agent"]
    return pytest.skip("another user has no Python of this version, or cannot read these packages")
