"""A machine of its own with a real systemd: PID 1 of fresh namespaces, booted in a quarter of a second.

It sees this machine's file system with an overlay in memory on top, and has a network of its own, joined to that of the
other containers of its test and to nothing else. What a machine keeps on its disk (settings, units, state) is kept from
one boot to the next; ``cut_power`` and ``boot`` are what a reset is to a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pytest

from tests.faults.machines import Machines, built
from tests.processes import status_field

T = TypeVar("T")
Entry = dict[str, Any]
"""One entry of the journal: its fields."""

ROOT = Path(__file__).parents[2]
BOOT = Path(__file__).parent / "boot.sh"
SYSTEMD = Path("/lib/systemd/systemd")
USER = "elastic-agent"
USER_ID = 990
MASKED = (
    *(
        "systemd-resolved",
        "systemd-timesyncd",
        "systemd-logind",
        "systemd-udevd",
        "systemd-machine-id-commit",
    ),
    *("systemd-networkd", "systemd-update-utmp", "systemd-update-utmp-runlevel"),
)
"""Services that a machine in a test has no use for, or that are the host's business."""

PATIENCE_S = 60.0
"""How long anything may take before a test fails; on a busy machine importing torch takes much of it."""
LOOK_EVERY_S = 0.02

VENV = "/opt/elastic-agent/venv"
PROGRAM = f"""\
#!/bin/sh
PYTHONPATH=/opt/elastic-agent/src exec {VENV}/bin/python -m elastic_agent "$@"
"""
"""What is installed as ``elastic-agent`` in the container: the sources as they are, with the Python of the tests."""


def why_not() -> str | None:
    """Why no container can be booted here; None if it can."""
    if os.geteuid() != 0:
        return "a systemd of its own needs root"
    missing = [name for name in ("unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if missing or not SYSTEMD.exists():
        return f"no {', '.join(missing) or SYSTEMD} here (Debian: systemd, util-linux)"
    root = cgroup_root()
    if root is None:
        return "no cgroup2 file system is mounted here"
    probe = root / f"elastic-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return f"cgroups cannot be made in {root}: {error.strerror}"
    return None


def cgroup_root() -> Path | None:
    """Where the unified hierarchy of cgroups is mounted."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return next((Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"), None)


@dataclass
class Container:
    """One machine. Used as a context; nothing of it is left afterwards."""

    name: str
    folder: Path
    shared: Path
    """``/srv`` inside: a file system that all machines of a test see, and the services' user may write."""
    network: Machines
    """Its network is the one of its name there."""
    _process: subprocess.Popen[bytes] | None = None
    _cgroup: Path = field(init=False)
    _init: int = 0

    def __post_init__(self) -> None:
        root = cgroup_root()
        assert root is not None  # why_not says so
        self._cgroup = root / f"elastic-{os.getpid()}-{self.name}-{secrets.token_hex(3)}"
        self.disk = self.folder / "disk"
        for place in ("etc-elastic-agent", "etc-systemd", "var-lib"):
            (self.disk / place).mkdir(parents=True, mode=0o755)
        lines = [f"{self.network.address(name)} {name}\n" for name in self.network.names]
        (self.disk / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        (self.disk / "machine-id").write_text(f"{uuid.uuid4().hex}\n")
        (self.disk / "passwd").write_text(
            f"{USER}:x:{USER_ID}:{USER_ID}::/var/lib/{USER}:/usr/sbin/nologin\n"
        )
        (self.disk / "group").write_text(f"{USER}:x:{USER_ID}:\n")
        (self.disk / "elastic-agent").write_text(PROGRAM)
        (self.disk / "elastic-agent").chmod(0o755)
        for service in MASKED:
            (self.disk / "etc-systemd" / f"{service}.service").symlink_to("/dev/null")

    # -- its disk -------------------------------------------------------------------------------

    def install(self, unit: Path) -> None:
        """Put a unit in its place."""
        shutil.copy(unit, self.disk / "etc-systemd")

    def edit(self, unit: str, drop_in: str) -> None:
        """As ``systemctl edit`` does; a machine that is up reads it at the next ``daemon-reload``."""
        folder = self.disk / "etc-systemd" / f"{unit}.d"
        folder.mkdir(exist_ok=True)
        (folder / "override.conf").write_text(drop_in)

    def configure(self, job: str, text: str) -> None:
        """Write ``/etc/elastic-agent/JOB.toml``."""
        (self.disk / "etc-elastic-agent" / f"{job}.toml").write_text(text)

    # -- power ----------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start it, and return when systemd has brought up what is enabled, or tries to."""
        self._cgroup.mkdir()
        inside = (
            f"{sys.prefix}={VENV}",
            f"{sys.base_prefix}={sys.base_prefix}",
            f"{ROOT / 'src'}=/opt/elastic-agent/src",
            f"{self.disk / 'elastic-agent'}=/opt/elastic-agent/bin/elastic-agent",
        )
        script = f'echo $$ >"{self._cgroup}/cgroup.procs" && exec "$@"'
        # Should this process be killed, so is unshare, and with it PID 1 of the container, and with that everything.
        unshare = "unshare --mount --propagation private --pid --fork --kill-child --uts --ipc --cgroup"
        with (self.folder / "console").open("ab") as console:
            self._process = subprocess.Popen(
                [
                    *("bash", "-c", script, "bash", *self.network.within(self.name)),
                    *("setpriv", "--pdeathsig", "KILL", *unshare.split()),
                    *("bash", BOOT, self.folder, self.name, str(uuid.uuid4()), f"{self.shared}=/srv"),
                    *inside,
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        self._init = self.wait("PID 1", self._find_init)
        self.wait("systemd", lambda: self.run("systemctl", "is-system-running").stdout.strip() in UP)

    def _find_init(self) -> int | None:
        process = self._process
        assert process is not None
        assert process.poll() is None, f"it did not boot:\n{(self.folder / 'console').read_text()}"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ready = children and os.path.realpath(f"/proc/{children[0]}/exe") == os.path.realpath(SYSTEMD)
        return int(children[0]) if ready else None

    def cut_power(self) -> None:
        """Everything is gone at once; the disk stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._remove_cgroup()

    def wait_off(self) -> None:
        """Until it went down by itself (``systemctl poweroff``)."""
        process = self._process
        assert process is not None
        self.wait("the end of the container", lambda: process.poll() is not None)
        self.cut_power()

    def _remove_cgroup(self) -> None:
        def removed() -> bool:
            try:
                _remove(self._cgroup)
            except OSError:  # a process in it is still on its way out
                return False
            return True

        if self._cgroup.exists():
            self.wait("the container's last process", removed)

    # -- what goes on inside --------------------------------------------------------------------

    def run(self, *command: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as root unless ``user`` is given."""
        return subprocess.run(
            [
                "nsenter",
                "-t",
                str(self._init),
                "-a",
                *(("runuser", "-u", user, "--") if user else ()),
                *command,
            ],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def systemctl(self, *words: str) -> str:
        """What ``systemctl`` prints; it must succeed."""
        done = self.run("systemctl", *words)
        assert done.returncode == 0, f"systemctl {' '.join(words)}: {done.stderr}\n{self.story()}"
        return done.stdout

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Properties of a unit."""
        lines = self.systemctl("show", unit, "--property", ",".join(properties)).splitlines()
        return dict(line.split("=", 1) for line in lines)

    def journal(self, *words: str) -> list[Entry]:
        """Entries of the journal that match, oldest first; see journalctl for what may be given."""
        done = self.run("journalctl", "--output=json", "--all", "--no-pager", *words)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def group(self, unit: str) -> Path:
        """The unit's cgroup, seen from outside."""
        group = self.show(unit, "ControlGroup")["ControlGroup"]
        assert group, f"{unit} has no processes\n{self.story()}"
        return self._cgroup / group.lstrip("/")

    def processes(self, unit: str) -> list[int]:
        """The unit's processes, by their ids outside."""
        return _processes(self.group(unit))

    def everything(self) -> list[int]:
        """All its processes, by their ids outside."""
        return _processes(self._cgroup)

    def main_process(self, unit: str) -> int:
        """The unit's main process, by its id outside."""
        within = self.show(unit, "MainPID")["MainPID"]
        found = [pid for pid in self.processes(unit) if _pid_within(pid) == within]
        assert found, f"{unit} has no main process\n{self.story()}"
        return found[0]

    def outside(self, pid: int) -> int:
        """The id outside of a process that has this one inside."""
        return next(found for found in self.everything() if _pid_within(found) == str(pid))

    def wait(self, what: str, look: Callable[[], T | None]) -> T:
        """Wait until ``look`` finds something; the failure tells the story."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not (found := look()):
            if time.monotonic() > deadline_s:
                raise AssertionError(f"waited {PATIENCE_S:g} s for {what} in {self.name}\n{self.story()}")
            time.sleep(LOOK_EVERY_S)  # another machine's systemd sends no events
        return found

    def wait_state(self, unit: str, *states: str) -> str:
        """Until the unit is in one of these states, as ``active`` or ``active (running)``."""

        def look() -> str | None:
            now = self.show(unit, "ActiveState", "SubState")
            full = f"{now['ActiveState']} ({now['SubState']})"
            return full if {full, now["ActiveState"]} & {*states} else None

        return self.wait(f"{unit} to be {' or '.join(states)}", look)

    def story(self) -> str:
        """The journal's end, for a failure's message."""
        if self._process is None:
            return f"{self.name} is off"
        command = ("journalctl", "--no-pager", "--output=short-monotonic", "--lines=150")
        return f"--- journal of {self.name}\n{self.run(*command).stdout}"

    # -- the end --------------------------------------------------------------------------------

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut_power()


UP = ("running", "degraded", "starting")
"""Words of ``systemctl is-system-running`` once it answers; it starts as long as an enabled service does."""


def _processes(group: Path) -> list[int]:
    found = []
    for file in group.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):  # the group was removed in between
            found += [int(pid) for pid in file.read_text().split()]
    return found


def _pid_within(pid: int) -> str:
    with contextlib.suppress(OSError):
        return status_field(pid, "NSpid").split()[-1]
    return ""


def _sweep() -> None:
    """Remove the empty cgroups of test sessions that were killed; their processes ended with them."""
    root = cgroup_root()
    assert root is not None  # why_not says so
    for group in root.glob("elastic-*-*-*"):
        if not Path("/proc", group.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):
                _remove(group)


def _remove(group: Path) -> None:
    """Remove a cgroup and those below it; OSError while a process is in one."""
    below = [folder for folder in group.rglob("*") if folder.is_dir()]
    for folder in [*sorted(below, reverse=True), group]:
        folder.rmdir()


@contextlib.contextmanager
def booted(folder: Path, *names: str) -> Iterator[list[Container]]:
    """Containers of these names, made but not booted yet; skips the test where there can be none."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    shared = folder / "shared"
    shared.mkdir()
    os.chown(shared, USER_ID, USER_ID)
    _sweep()
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(built(*names))
        yield [stack.enter_context(Container(name, folder / name, shared, network)) for name in names]
