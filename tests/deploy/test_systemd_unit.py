"""The service files are such that systemd accepts them, and their example is such that the agent accepts it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from elastic_agent.config.load import load_settings
from elastic_agent.config.settings import Settings
from elastic_agent.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "deploy" / "systemd"
UNIT = SYSTEMD / "elastic-agent@.service"
USERS_UNIT = SYSTEMD / "user" / "elastic-agent@.service"
RENDEZVOUS = SYSTEMD / "elastic-rendezvous.service"
PAGE = ROOT / "docs" / "systemd.md"
FILES = (UNIT, USERS_UNIT, RENDEZVOUS)
PROGRAM = re.compile(r"(?<=^ExecStart=)\S+", re.M)

every = pytest.mark.parametrize("file", FILES, ids=("agent", "user", "rendezvous"))
agents = pytest.mark.parametrize("file", [UNIT, USERS_UNIT], ids=("agent", "user"))

needs_systemd_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (Debian: systemd)"
)


def analyze(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},  # a user's systemd wants one
        check=False,
    )


@pytest.mark.prove
@needs_systemd_analyze
@every
def test_systemd_accepts_the_unit(tmp_path: Path, file: Path) -> None:
    instance = tmp_path / file.name.replace("@", "@digits")
    instance.write_text(PROGRAM.sub("/bin/true", file.read_text()))  # a program that exists on this machine
    whose = ("--user",) if file is USERS_UNIT else ()
    result = analyze(*whose, "verify", "--recursive-errors=yes", instance, folder=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# -- privileges ---------------------------------------------------------------------------------


def privileges_section() -> str:
    return PAGE.read_text().partition("## Sandboxing")[2].partition("\n## ")[0]


@pytest.mark.prove
@needs_systemd_analyze
@pytest.mark.parametrize("file", [UNIT, RENDEZVOUS], ids=("agent", "rendezvous"))
def test_the_exposure_of_the_service_matches_the_page(tmp_path: Path, file: Path) -> None:
    of_agent, of_rendezvous = re.findall(r"exposure level\s+of\s+\*\*([\d.]+)\*\*", privileges_section())
    instance = tmp_path / file.name.replace("@", "@digits")
    instance.write_text(file.read_text())
    most = of_agent if file is UNIT else of_rendezvous
    threshold = f"--threshold={round(float(most) * 10)}"
    result = analyze("security", "--offline=true", threshold, instance, folder=tmp_path)
    assert result.returncode == 0, result.stdout
    assert f": {most} " in result.stdout.splitlines()[-1]


@pytest.mark.prove
@needs_systemd_analyze
def test_the_page_explains_each_remaining_privilege(tmp_path: Path) -> None:
    instance = tmp_path / "elastic-agent@digits.service"
    instance.write_text(UNIT.read_text())
    result = analyze("security", "--offline=true", "--json=short", instance, folder=tmp_path)
    left = {check["name"] for check in json.loads(result.stdout) if not check["set"] and check["exposure"]}
    rows = [row.split(" | ")[0] for row in privileges_section().splitlines() if row.startswith("| `")]
    explained = {name.replace("\\|", "|") for row in rows for name in re.findall(r"`([A-Z]\w+=[^`]*)`", row)}
    assert explained == left


# -- what happens when --------------------------------------------------------------------------


def settings_of(unit: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))


@agents
def test_exit_codes_that_prevent_a_restart_are_the_permanent_ones(file: Path) -> None:
    """tests/systemd tries each of them."""
    settings = settings_of(file.read_text())
    final = {ExitCode(int(code)) for code in settings["RestartPreventExitStatus"].split()}
    assert final == {ExitCode.FAILED, ExitCode.USAGE, ExitCode.REFUSED}
    success = {int(code) for code in settings["SuccessExitStatus"].split()}
    assert success == {ExitCode.DRAINED, ExitCode.STOPPED, ExitCode.INTERRUPTED, ExitCode.TERMINATED}


def test_the_user_unit_differs_only_where_root_is_required() -> None:
    system, user = settings_of(UNIT.read_text()), settings_of(USERS_UNIT.read_text())
    places = {"Environment", "ExecStart", "AssertPathExists", "WorkingDirectory", "WantedBy"}
    assert {name: system[name] for name in user.keys() - places} == {
        name: user[name] for name in user.keys() - places
    }


def test_the_rendezvous_service_is_restarted_unless_its_settings_are_wrong() -> None:
    settings = settings_of(RENDEZVOUS.read_text())
    assert settings["Restart"] == "always"
    assert ExitCode(int(settings["RestartPreventExitStatus"])) is ExitCode.USAGE
    assert settings["RestartSec"] == "100ms", "within the shortest lease, with the time to import torch"


@agents
def test_systemd_waits_longer_than_the_agent_waits_for_its_workers(file: Path) -> None:
    assert float(settings_of(file.read_text())["TimeoutStopSec"]) > 2 * Settings().shutdown_timeout


def test_the_example_settings_are_accepted(tmp_path: Path) -> None:
    script = tmp_path / "digits_ddp.py"
    script.touch()
    example = tmp_path / "digits.toml"
    example.write_text(
        (SYSTEMD / "example.toml").read_text().replace("/srv/digits/digits_ddp.py", str(script))
    )
    found = load_settings(["--config", str(example)], {"STATE_DIRECTORY": str(tmp_path / "state")}).settings
    assert found.script == str(script)
    assert found.script_args == ("--checkpoint-dir", "/srv/shared/digits")
    assert (found.rdzv_id, str(found.state_dir)) == ("digits", str(tmp_path / "state"))
