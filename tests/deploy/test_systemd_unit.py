"""The service file is one that systemd accepts, and its example is one that the agent accepts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from elastic_agent.config.load import load_settings
from elastic_agent.config.settings import Settings
from elastic_agent.exit_codes import ExitCode

SYSTEMD = Path(__file__).parents[2] / "deploy" / "systemd"
UNIT = SYSTEMD / "elastic-agent@.service"
RENDEZVOUS = SYSTEMD / "elastic-rendezvous.service"
INSTANCES = {UNIT: "elastic-agent@digits.service", RENDEZVOUS: "elastic-rendezvous.service"}

both = pytest.mark.parametrize("file", INSTANCES, ids=INSTANCES.values())

needs_systemd_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (Debian: systemd)"
)


def verify(folder: Path, file: Path, unit: str) -> subprocess.CompletedProcess[str]:
    """What systemd says to `unit` in that file's place, with a program that exists on this machine."""
    instance = folder / INSTANCES[file]
    instance.write_text(unit.replace("/opt/elastic-agent/bin/elastic-agent", "/bin/true"))
    return subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=yes", instance],
        capture_output=True,
        text=True,
        timeout=30,
    )


@needs_systemd_analyze
@both
def test_systemd_accepts_the_unit(tmp_path: Path, file: Path) -> None:
    result = verify(tmp_path, file, file.read_text())
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@needs_systemd_analyze
@both
@pytest.mark.parametrize("line", ["RestartPreventExitCodes=1", "KillMode=gently"])
def test_systemd_would_notice_a_mistake(tmp_path: Path, file: Path, line: str) -> None:
    result = verify(tmp_path, file, file.read_text().replace("[Service]\n", f"[Service]\n{line}\n"))
    # A bad value is reported without failing, hence the empty stderr that the test above wants.
    assert line.split("=")[1] in result.stderr or line.split("=")[0] in result.stderr


@needs_systemd_analyze
@pytest.mark.parametrize(("file", "most"), [(UNIT, 45), (RENDEZVOUS, 20)], ids=INSTANCES.values())
def test_the_service_is_not_left_wide_open(tmp_path: Path, file: Path, most: int) -> None:
    instance = tmp_path / INSTANCES[file]
    instance.write_text(file.read_text())
    result = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={most}", instance],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 0, result.stdout


def settings_of(unit: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))


def test_exit_codes_that_end_the_service_are_those_where_another_try_is_pointless() -> None:
    settings = settings_of(UNIT.read_text())
    final = {ExitCode(int(code)) for code in settings["RestartPreventExitStatus"].split()}
    assert final == {ExitCode.FAILED, ExitCode.USAGE, ExitCode.REFUSED}
    assert ExitCode(int(settings["SuccessExitStatus"])) is ExitCode.DRAINED


def test_the_rendezvous_is_started_again_unless_its_settings_are_wrong() -> None:
    settings = settings_of(RENDEZVOUS.read_text())
    assert settings["Restart"] == "always"
    assert ExitCode(int(settings["RestartPreventExitStatus"])) is ExitCode.USAGE
    assert settings["RestartSec"] == "100ms", "within the shortest lease, with the time to import torch"


def test_systemd_waits_longer_than_the_agent_waits_for_its_workers() -> None:
    assert float(settings_of(UNIT.read_text())["TimeoutStopSec"]) > 2 * Settings().shutdown_timeout


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
