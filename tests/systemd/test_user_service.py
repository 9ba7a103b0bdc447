"""An agent as a service of a user without privileges, under a systemd of the user's own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .container import ROOT, USER, USER_ID, Container, booted
from .jobs import PORT, TRAIN

pytestmark = [pytest.mark.system, pytest.mark.prove]

UNIT = ROOT / "deploy" / "systemd" / "user" / "elastic-agent@.service"
HOME = "/srv/home"
RUNTIME = f"/run/user/{USER_ID}"
MANAGER = f"user@{USER_ID}.service"
MANAGER_UNIT = f"""\
[Service]
Type=notify
User={USER}
Slice=user-{USER_ID}.slice
Delegate=yes
ExecStart=/lib/systemd/systemd --user
Environment=HOME={HOME} XDG_RUNTIME_DIR={RUNTIME} OMP_NUM_THREADS=1
RuntimeDirectory=user/{USER_ID}
"""
"""What a login, or ``loginctl enable-linger``, starts where there is a logind."""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Container]:
    with booted(tmp_path, "n1") as (machine,):
        (machine.disk / "etc-systemd" / MANAGER).write_text(MANAGER_UNIT)
        machine.boot()
        yield machine


def systemctl(machine: Container, *words: str) -> str:
    """``systemctl --user``, as that user."""
    variables = (f"HOME={HOME}", f"XDG_RUNTIME_DIR={RUNTIME}")
    done = machine.run("env", *variables, "systemctl", "--user", *words, user=USER)
    assert done.returncode == 0, f"systemctl --user {' '.join(words)}: {done.stderr}\n{machine.story()}"
    return done.stdout


def install(home: Path) -> None:
    """As docs/systemd.md says, with the program that is on the machine already."""
    settings = {
        "rdzv_endpoint": f"n1:{PORT}",
        "rdzv_id": "mine",
        "nnodes": "1",
        "nproc_per_node": "1",
        "script": f"{HOME}/train.py",
    }
    config, program = home / ".config", home / ".local/share/elastic-agent/bin/elastic-agent"
    for folder in (config / "elastic-agent", config / "systemd/user", program.parent):
        folder.mkdir(parents=True)
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    (config / "elastic-agent" / "mine.toml").write_text(text)
    shutil.copy(UNIT, config / "systemd/user")
    shutil.copy(TRAIN, home)
    program.symlink_to("/opt/elastic-agent/bin/elastic-agent")
    for folder, _, files in os.walk(home):
        for path in (folder, *(os.path.join(folder, file) for file in files)):
            os.chown(path, USER_ID, USER_ID, follow_symlinks=False)


def test_a_user_runs_an_agent_without_root(machine: Container) -> None:
    home = machine.shared / "home"
    home.mkdir()
    install(home)
    machine.systemctl("start", MANAGER)
    systemctl(machine, "enable", "--now", "elastic-agent@mine")

    def stepping() -> str | None:
        words = systemctl(machine, "status", "elastic-agent@mine")
        return words if ", step " in words else None

    shown = machine.wait("a status with a step", stepping)
    assert "active (running)" in shown
    assert 'Status: "generation 1: 1 node, 1 worker, step ' in shown
    assert (home / ".local/state/elastic-agent").is_dir()
    found = machine.journal("_TRANSPORT=stdout", "_SYSTEMD_USER_UNIT=elastic-agent@mine.service")
    assert {entry["_UID"] for entry in found} == {str(USER_ID)}

    systemctl(machine, "stop", "elastic-agent@mine")
    assert json.loads((home / "checkpoint.json").read_text())["why"] == "told"
    ended = systemctl(machine, "show", "elastic-agent@mine", "--property=Result,ExecMainStatus")
    assert sorted(ended.split()) == ["ExecMainStatus=75", "Result=success"]
