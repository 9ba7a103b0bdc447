"""What holds for the package as a whole: what an import costs, what is installed."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import elastic_agent
from elastic_agent import installed_version


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = "import sys; before = set(sys.modules); import elastic_agent; print(*set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == ["elastic_agent"]


def test_the_command_and_the_plug_in_for_torchrun_are_installed() -> None:
    command = next(iter(entry_points(group="console_scripts", name="elastic-agent")))
    assert callable(command.load())
    # torch calls what it loads, and takes the result for the function that creates handlers.
    plugin = next(iter(entry_points(group="torchrun.handlers", name="elastic")))
    assert callable(plugin.load()())


def test_the_installed_version_is_the_packages_own() -> None:
    assert version("elastic-agent") == elastic_agent.__version__


def test_installations_of_different_sources_have_different_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clones of two commits, installed on two machines, have the same number."""

    def installed(commit: str, source: bytes) -> str:
        folder = tmp_path / commit / f"elastic_agent-{elastic_agent.__version__}.dist-info"
        folder.mkdir(parents=True)
        digest = base64.urlsafe_b64encode(hashlib.sha256(source).digest()).rstrip(b"=").decode()
        (folder / "METADATA").write_text(f"Name: elastic-agent\nVersion: {elastic_agent.__version__}\n")
        record = f"elastic_agent/agent.py,sha256={digest},{len(source)}\nelastic_agent/agent.pyc,,\n"
        (folder / "RECORD").write_text(record + f"{commit}/direct_url.json,sha256={commit},1\n")
        monkeypatch.syspath_prepend(tmp_path / commit)
        return installed_version()

    first, other, same = installed("a", b"first"), installed("b", b"other"), installed("c", b"first")
    assert first == same != other
    assert first.startswith(f"{elastic_agent.__version__}+")


def test_the_tested_versions_of_python_are_declared() -> None:
    root = Path(__file__).parents[2]
    classifiers = tomllib.loads((root / "pyproject.toml").read_text())["project"]["classifiers"]
    declared = [entry.split()[-1] for entry in classifiers if entry.startswith("Programming Language")]
    assert f"(tested are {' and '.join(declared)})" in (root / "README.md").read_text()
