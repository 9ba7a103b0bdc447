"""The containers that the other tests here use: they boot, forget what they should, and leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .container import Container, booted, cgroup_root

pytestmark = [pytest.mark.system, pytest.mark.prove]

NAPPER = """\
[Service]
ExecStart=sleep 600
[Install]
WantedBy=multi-user.target
"""


def test_a_container_keeps_its_disk_only_over_a_power_cut(tmp_path: Path) -> None:
    with booted(tmp_path, "n1") as (machine,):
        (machine.disk / "etc-systemd" / "napper.service").write_text(NAPPER)
        machine.boot()
        machine.systemctl("enable", "--now", "napper")
        (napper,) = machine.processes("napper.service")
        assert machine.run("hostname").stdout.strip() == "n1"
        boot_id = machine.run("cat", "/proc/sys/kernel/random/boot_id").stdout
        machine.run("touch", "/etc/in-memory", "/var/lib/on-disk")
        machine.cut_power()
        assert not os.path.exists(f"/proc/{napper}")

        machine.boot()
        machine.wait_state("napper.service", "active")
        assert machine.run("ls", "/var/lib/on-disk").returncode == 0
        assert machine.run("ls", "/etc/in-memory").returncode != 0
        assert machine.run("cat", "/proc/sys/kernel/random/boot_id").stdout != boot_id


def test_a_container_of_a_failed_test_is_removed(tmp_path: Path) -> None:
    def fail(machine: Container) -> None:
        machine.boot()
        pytest.fail("as it happens")

    with pytest.raises(pytest.fail.Exception, match="as it happens"), booted(tmp_path, "n1") as (machine,):
        fail(machine)
    assert machine.everything() == []
    root = cgroup_root()
    assert root is not None
    assert list(root.glob(f"elastic-{os.getpid()}-*")) == []
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
