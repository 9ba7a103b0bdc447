"""What holds for the package as a whole: what an import costs, what is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import elastic_agent
from elastic_agent.exit_codes import ExitCode


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = "import sys; before = set(sys.modules); import elastic_agent; print(*set(sys.modules) - before)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
    )
    assert loaded.stdout.split() == ["elastic_agent"]


def test_the_command_and_the_plug_in_for_torchrun_are_installed() -> None:
    command = next(iter(entry_points(group="console_scripts", name="elastic-agent")))
    assert callable(command.load())
    # torch calls what it loads, and takes the result for the function that creates handlers.
    plugin = next(iter(entry_points(group="torchrun.handlers", name="elastic")))
    assert callable(plugin.load()())


def test_the_installed_version_is_the_packages_own() -> None:
    assert version("elastic-agent") == elastic_agent.__version__


def test_the_readme_lists_every_exit_code() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    table = readme.partition("## Exit codes")[2].partition("\n## ")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)] == [
        int(code) for code in ExitCode
    ]
