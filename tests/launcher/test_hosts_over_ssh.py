"""``--hosts`` with real sshd on machines of their own: network namespaces, each with a host name."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.cli.support import COMMAND, clean_environment
from tests.faults.cluster import HANDLING_NOTICES
from tests.faults.machines import Machines, built
from tests.names import unique
from tests.terminal import Terminal
from tests.waiting import GUARD_S, wait_for

pytestmark = [pytest.mark.system, pytest.mark.prove]
LABS = ("lab1", "lab2", "lab3")
SSHD = "/usr/sbin/sshd"

SSHD_CONFIG = """\
Port 22
HostKey %(folder)s/host-key
AuthorizedKeysFile %(folder)s/user-key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
SetEnv ELASTIC_AGENT_STATE_DIR=%(folder)s/state-%(lab)s ELASTIC_AGENT_LEASE_TTL=%(lease)s
"""


class Lab:
    """Three machines with sshd, and a fourth one where the user types."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines, self.folder, self.run_id = machines, folder, unique("lab")
        self.sshd: dict[str, subprocess.Popen[bytes]] = {}
        for key in ("host-key", "user-key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        hosts = [f"Host {lab}\n  HostName {machines.address(lab)}\n" for lab in LABS]
        mine = f"Host *\n  IdentityFile {folder}/user-key\n  UserKnownHostsFile {folder}/known\n"
        (folder / "ssh-config").write_text("".join([*hosts, mine]))
        key = " ".join((folder / "host-key.pub").read_text().split()[:2])
        (folder / "known").write_text("".join(f"{machines.address(lab)} {key}\n" for lab in LABS))
        (folder / "bin").mkdir()
        (folder / "bin" / "ssh").write_text(
            f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh-config "$@"\n'
        )
        (folder / "bin" / "ssh").chmod(0o755)

    def switch_on(self, lab: str, lease_s: float = 30) -> None:
        config = self.folder / f"sshd-{lab}"
        config.write_text(SSHD_CONFIG % {"folder": self.folder, "lab": lab, "lease": lease_s})
        boot = f"hostname {lab}; mkdir -p /run/sshd; exec {SSHD} -D -e -f {config}"
        with (self.folder / f"sshd-{lab}.log").open("ab") as log:
            command = [*self.machines.within(lab), "unshare", "--uts", "sh", "-c", boot]
            self.sshd[lab] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log_file = self.folder / f"sshd-{lab}.log"
        wait_for(f"sshd of {lab}", lambda: "Server listening" in log_file.read_text() or None)

    def processes(self, lab: str) -> list[int]:
        """Return the processes on the machine, without sshd itself."""
        tag = self.machines.within(lab)[-1]
        found = subprocess.run(
            ["ip", "netns", "pids", tag], capture_output=True, text=True, check=True
        ).stdout
        own = self.sshd[lab].pid if lab in self.sshd else 0
        return [int(pid) for pid in found.split() if int(pid) != own]

    def wait_empty(self, *labs: str) -> None:
        for lab in (*labs, "desk"):
            wait_for(f"the end of all processes on {lab}", lambda lab=lab: not self.processes(lab) or None)

    def kill(self, lab: str) -> None:
        """Cut the power."""
        self.machines.cut_off(lab)
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (*self.processes(lab), self.sshd[lab].pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
        self.sshd[lab].wait()

    def type(self, *options: str) -> Terminal:
        """Type the command at the desk, in a terminal of its own."""
        endpoint = f"{self.machines.address('lab1')}:29400"  # no machine resolves the names
        command = [
            *self.machines.within("desk"),
            *(*COMMAND, "--hosts", "lab1,lab2:2,lab3", "--rdzv-id", self.run_id),
            *("--settle", "0.4", "--rdzv-endpoint", endpoint, *options),
            *(str(HANDLING_NOTICES), "--folder", str(self.folder)),
        ]
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        environ = clean_environment({"PATH": path, "GLOO_SOCKET_IFNAME": "eth0"})
        return Terminal(command, environ, self.folder)

    def trained(self) -> list[dict[str, object]]:
        """Return what workers did, in order of time."""
        file = self.folder / "steps.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_training(self, workers: int, after: int = 0) -> int:
        """Wait until so many workers train in a generation after this one; returns its number."""

        def look() -> int | None:
            steps = [
                (line["generation"], line["worker_id"]) for line in self.trained() if line["kind"] == "step"
            ]
            newest = max((int(str(generation)) for generation, _ in steps), default=0)
            count = len({worker for generation, worker in steps if generation == newest})
            return newest if newest > after and count == workers else None

        return wait_for(f"{workers} workers after generation {after}", look)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        pytest.skip("this needs sshd and ssh (Debian: openssh-server, openssh-client)")
    with built(*LABS, "desk") as machines:
        lab = Lab(machines, tmp_path)
        try:
            for name in LABS:
                lab.switch_on(name)
            yield lab
        finally:
            for name in (*LABS, "desk"):
                for pid in lab.processes(name):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            for sshd in lab.sshd.values():
                sshd.kill()
                sshd.wait(GUARD_S)


def test_ctrl_c_stops_the_run_on_all_machines_and_leaves_nothing(lab: Lab) -> None:
    with lab.type() as terminal:
        generation = lab.wait_training(4)
        for text in ("lab1: ", "lab2: ", "lab3: ", "4 workers"):
            terminal.wait_shown(text)
        terminal.type(b"\x03")
        assert terminal.ended() == ExitCode.STOPPED, terminal.shown
    left = [line for line in lab.trained() if (line["kind"], line["generation"]) == ("left", generation)]
    assert [line["reason"] for line in left] == ["operator"] * 4
    lab.wait_empty(*LABS)


def test_a_closed_terminal_ends_nothing(lab: Lab) -> None:
    with lab.type() as terminal:
        generation = lab.wait_training(4)
        terminal.close()
        terminal.ended()
    wait_for("the end of ssh", lambda: not lab.processes("desk") or None)
    assert lab.wait_training(4) == generation
    (lab.folder / "finish").touch()
    lab.wait_empty(*LABS)
    assert len([line for line in lab.trained() if line["kind"] == "done"]) == 4
    assert "the run finished" in next((lab.folder / "state-lab2").glob("hosts/*/lab2.log")).read_text()


def test_a_host_that_dies_is_one_line_and_the_others_go_on(lab: Lab) -> None:
    with lab.type("--lease-ttl", "4") as terminal:
        first = lab.wait_training(4)
        lab.kill("lab3")
        lab.wait_training(3, after=first)
        terminal.wait_shown("elastic-agent: the connection to lab3 was lost; the run goes on")
        (lab.folder / "finish").touch()
        assert terminal.ended() == ExitCode.FINISHED, terminal.shown
    lab.wait_empty("lab1", "lab2")


def test_a_folder_that_a_host_does_not_have_is_one_line(lab: Lab, tmp_path: Path) -> None:
    (lab.folder / "only-here").mkdir()
    mount = 'mount -t tmpfs none "$1" && mkdir "$1/here" && cd "$1/here" && touch t.py && shift && exec "$@"'
    done = subprocess.run(
        [
            *(*lab.machines.within("desk"), "sh", "-c", mount, "sh", str(lab.folder / "only-here")),
            *(*COMMAND, "--hosts", "lab1", "t.py"),
        ],
        env=clean_environment({"PATH": f"{lab.folder}/bin:{os.environ['PATH']}"}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (ExitCode.TOO_FEW_NODES, "")
    missing = f"'{lab.folder}/only-here/here'"
    assert f"lab1: [Errno 2] No such file or directory: {missing}; expected the same folders" in done.stderr
    lab.wait_empty("lab1")
