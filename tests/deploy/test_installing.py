"""Services are installed with the tested version of every dependency, in each of the ways that the docs show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["deploy/README.md", "docs/systemd.md"]


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_install_a_service_name_the_tested_versions(page: str) -> None:
    commands = re.findall(r"^\S*/bin/pip install .*$", (ROOT / page).read_text(), re.MULTILINE)
    assert commands
    assert [command for command in commands if "-c constraints.txt" not in command] == []


def test_the_playbook_installs_the_tested_versions() -> None:
    tasks = (ROOT / "deploy/ansible.yml").read_text().split("\n    - name: ")
    copied = next(task for task in tasks if "../constraints.txt" in task)
    destination = re.search(r"dest: (\S+)", copied)
    assert destination is not None
    installs = [task for task in tasks if "ansible.builtin.pip:" in task]
    assert len(installs) == 1
    assert f"extra_args: --constraint {destination[1]}\n" in installs[0]
    assert tasks.index(copied) < tasks.index(installs[0])
