"""A real Slurm of three nodes, in namespaces of its own: munged, slurmctld and three slurmd on this machine.

Everything runs in one PID namespace, whose end is the end of all of it, whatever a test left running; and in one
mount namespace, where /etc/hosts knows the nodes. The controller and each node have a network namespace of their own,
joined by a bridge: an agent that found another node's address on its own machine would host the store there.
Slurm was built for this ("multiple slurmd"): a node is a slurmd with a name and a port of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import pytest

from elastic_agent import linux

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "ip", "setpriv", "unshare", "nsenter")
PATIENCE_S = 60.0
LOOK_EVERY_S = 0.1  # Slurm's commands have no way to wait for a job's state
MARK = "ELASTIC_TEST_MARK"

NODES = {"n0": "CPUs=2 Gres=gpu:2", "n1": "CPUs=2 Gres=gpu:1", "n2": "CPUs=2 Gres=gpu:1"}
"""Unequal on purpose. The GPUs are empty files: Slurm counts them and looks no further."""

CONF = """\
ClusterName=lab
SlurmctldHost=head
SlurmctldPort=6817
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
KillWait=3
SlurmdTimeout=5
TCPTimeout=4
"""

ADDRESSES = {"head": "10.213.78.1", **{name: f"10.213.78.{10 + number}" for number, name in enumerate(NODES)}}
"""Of the controller, and of each node."""

NETWORK = """\
set -e
mount --bind hosts /etc/hosts
hostname head
mkdir -p /run/netns
mount -t tmpfs none /run/netns
ip link set lo up
ip link add br0 type bridge
ip addr add {ADDRESSES[head]}/24 dev br0
ip link set br0 up
"""

NODE_NETWORK = """\
ip netns add {name}
ip link add port-{name} type veth peer name eth0 netns {name}
ip link set port-{name} master br0 up
ip -n {name} link set lo up
ip -n {name} addr add {address}/24 dev eth0
ip -n {name} link set eth0 up
"""


def need_slurm() -> None:
    """Skip where Slurm cannot be had."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(
            f"no {', '.join(missing)} here (Debian: slurmctld, slurmd, slurm-client, munge, iproute2, util-linux)"
        )
    if os.geteuid() != 0:
        pytest.skip("a Slurm of our own needs root, for its namespaces")


class Slurm:
    """The cluster: n0, n1 and n2, in the partitions ``main`` and ``urgent``, which preempts ``main``."""

    def __init__(self, folder: Path, proctrack: str = "pgid", *, names_resolve: bool = True) -> None:
        """Prepare.

        Args:
            folder: for everything it writes.
            proctrack: how Slurm finds the processes of a step. With ``pgid`` its signals reach the agents alone, as
                with ``cgroup``; with ``linuxproc`` they reach every process.
            names_resolve: whether the names of nodes are host names too; otherwise only Slurm knows them.
        """
        self.folder = folder
        self._proctrack = proctrack
        self._names_resolve = names_resolve
        self.mark = secrets.token_hex(8)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._init: subprocess.Popen[bytes] | None = None

    # -- begin and end --------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._write_files()
            self._begin_namespaces()
            self._start_daemons()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _write_files(self) -> None:
        (self.folder / "home").mkdir()
        (self.folder / "state").mkdir()
        known = {"localhost": "127.0.0.1", "head": ADDRESSES["head"]}
        hosts = {**known, **(ADDRESSES if self._names_resolve else {})}
        (self.folder / "hosts").write_text("".join(f"{hosts[name]} {name}\n" for name in hosts))
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        lines = [
            f"NodeName={name} NodeHostname=head NodeAddr={ADDRESSES[name]} Port={17001 + number} {what} "
            "RealMemory=1000"
            for number, (name, what) in enumerate(NODES.items())
        ]
        lines += [
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=20",
            "PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF",
        ]
        conf = CONF.format(folder=self.folder, proctrack=self._proctrack)
        (self.folder / "slurm.conf").write_text(conf + "\n".join(lines) + "\n")
        with (self.folder / "gres.conf").open("w") as gres:
            for name, what in NODES.items():
                for gpu in range(int(what.partition("gpu:")[2])):
                    device = self.folder / f"{name}-gpu{gpu}"
                    device.touch()
                    gres.write(f"NodeName={name} Name=gpu File={device}\n")

    def _begin_namespaces(self) -> None:
        """The first process of the PID namespace waits for orphans; bash reaps them."""
        networks = [NODE_NETWORK.format(name=name, address=ADDRESSES[name]) for name in NODES]
        begin = "".join(
            (NETWORK.format(ADDRESSES=ADDRESSES), *networks, "touch begun\nsleep infinity & wait\n")
        )
        with (self.folder / "namespaces.log").open("wb") as log:
            self._init = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),  # should the tests be killed
                    *(
                        "unshare",
                        "--mount",
                        "--pid",
                        "--net",
                        "--uts",
                        "--fork",
                        "--kill-child",
                        "--mount-proc",
                    ),
                    *("--propagation", "private", "bash", "-c", begin),
                ],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._environment(),
            )
        ends_s = time.monotonic() + PATIENCE_S
        while not (self.folder / "begun").exists():
            if self._init.poll() is not None:
                why = (self.folder / "namespaces.log").read_text().strip()
                pytest.skip(f"no namespaces for a Slurm of our own here: {why}")
            assert time.monotonic() < ends_s, "unshare does not come to an end"
            time.sleep(0.01)

    def _start_daemons(self) -> None:
        self._daemon("munged", "munged", "--foreground", "--force", *self._munge_files())
        self.wait("munged to listen", lambda: (self.folder / "munge.socket").exists())
        self._daemon("slurmctld", "slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf"))
        for name in NODES:
            self.start_node(name)
        self._wait_idle()

    def _wait_idle(self) -> None:
        idle = [f"{name} idle" for name in sorted(NODES)]
        self.wait("all nodes to be idle", lambda: self._node_states() == idle)

    def _munge_files(self) -> list[str]:
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        return [f"--socket={self.folder}/munge.socket", *files]

    def _daemon(self, name: str, *command: str, **variables: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                self._inside(*command, node=name if name in NODES else ""),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**self._environment(), **variables},
            )

    def _inside(self, *command: str, node: str = "") -> list[str]:
        """The command, in the namespaces; on the network as this node, else as the controller."""
        assert self._init is not None
        first = linux.children(self._init.pid)[0]
        inside = Path("/proc", str(first), "root")  # its mounts, as seen from here
        network = f"--net={inside / 'run/netns' / node}" if node else "--net"
        return ["nsenter", "--target", str(first), "--mount", "--pid", "--uts", network, *command]

    def _environment(self) -> dict[str, str]:
        """What daemons, commands and jobs see: little of ours, so that a test says the same everywhere."""
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.folder / "home"),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",  # every node calls itself "head", as slurmd finds its settings by that name
            MARK: self.mark,
        }

    def _end(self) -> None:
        """The end of the first process of a PID namespace is the end of all processes in it."""
        if self._init is not None:
            for pid in linux.children(self._init.pid):
                linux.send_signal(pid, signal.SIGKILL)
            self._init.wait()
        for daemon in self._daemons.values():
            daemon.send_signal(signal.SIGCONT)  # nsenter stops with the slurmd of a node that hangs
            daemon.wait()

    # -- nodes ----------------------------------------------------------------------------------

    def start_node(self, name: str) -> None:
        conf = str(self.folder / "slurm.conf")
        self.connect_node(name)
        self._daemon(name, "slurmd", "-D", "-c", "-N", name, "-f", conf, SLURMD_NODENAME=name)

    def lose_node(self, name: str) -> None:
        """As a power cut: the node's cable is dead, and SIGKILL ends slurmd and all that runs there."""
        self.ask("ip", "link", "set", f"port-{name}", "down")
        pids = self.processes(SLURMD_NODENAME=name)  # Slurm's own inherit it from slurmd
        for pid in sorted(pids):
            linux.send_signal(pid, signal.SIGSTOP)
        # Children first: at the death of its parent the kernel continues a stopped process group, with SIGHUP, at which
        # srun ends the step on all other nodes.
        for pid in sorted(pids, reverse=True):
            linux.send_signal(pid, signal.SIGKILL)
        self._daemons[name].wait()

    def hang_node(self, name: str) -> None:
        """The node's slurmd answers nobody any more; what it has started runs on."""
        for pid in linux.children(self._daemons[name].pid):
            linux.send_signal(pid, signal.SIGSTOP)

    def wake_node(self, name: str) -> None:
        """Continue its slurmd."""
        self._daemons[name].send_signal(signal.SIGCONT)  # nsenter has stopped with it, and continues it

    def connect_node(self, name: str) -> None:
        """The cable of a lost node works again: its machine, on which nothing runs, refuses connections at once."""
        self.ask("ip", "link", "set", f"port-{name}", "up")

    def give_up(self, name: str) -> None:
        """Slurm counts a node as down; by itself it takes 25 s to."""
        self.ask("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=lost")

    def _node_states(self) -> list[str]:
        listing = self.command("sinfo", "-h", "-p", "main", "-N", "-o", "%N %T").stdout  # fails at first
        return sorted(line.strip() for line in listing.splitlines())

    # -- commands and jobs ----------------------------------------------------------------------

    def command(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands."""
        return subprocess.run(
            self._inside(*words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            cwd=self.folder,
            env={**self._environment(), **variables},
        )

    def ask(self, *words: str) -> str:
        """What a command prints; it must succeed."""
        result = self.command(*words)
        assert result.returncode == 0, f"{' '.join(words)}: {result.stdout}{result.stderr}\n{self.story()}"
        return result.stdout.strip()

    def submit(self, script: Path, *options: str, folder: Path, **variables: str) -> Job:
        """``sbatch`` a script that runs in ``folder`` and writes its output there."""
        output = ["--output", str(folder / "%x-%j.out"), "--open-mode", "append", "--chdir", str(folder)]
        words = ["sbatch", "--parsable", *output, *options, str(script)]
        result = self.command(*words, **variables)
        assert result.returncode == 0, f"{' '.join(words)}: {result.stderr}"
        return Job(self, result.stdout.strip(), folder)

    def clear(self) -> None:
        """No jobs, all nodes idle."""
        self.command("scancel", "--user", "root")
        self.command("scancel", "--user", "root", "--signal", "KILL")
        for name in NODES:
            self.wake_node(name)
            if self._daemons[name].poll() is not None:
                self.start_node(name)
        self._wait_idle()

    def processes(self, **variables: str) -> list[int]:
        """Processes that have all of these in the environment they were started with, and this cluster's mark."""
        wanted = {MARK: self.mark, **variables}.items()
        found = []
        for process in linux.all_processes():
            with contextlib.suppress(OSError):
                if wanted <= linux.environment(process.pid).items():
                    found.append(process.pid)
        return found

    # -- waiting and telling --------------------------------------------------------------------

    def wait(self, what: str, look: Callable[[], T | None]) -> T:
        """Wait until ``look`` finds something; the failure tells the story."""
        ends_s = time.monotonic() + PATIENCE_S
        while not (found := look()):
            assert time.monotonic() < ends_s, f"waited {PATIENCE_S:g} s for {what}\n{self.story()}"
            time.sleep(LOOK_EVERY_S)
        return found

    def story(self) -> str:
        """What Slurm says of its jobs and nodes, and the end of the daemons' logs."""
        parts = [self.command(*words).stdout for words in (("squeue", "-a"), ("sinfo", "-N", "-l"))]
        for log in sorted(self.folder.glob("*.log")):
            lines = [
                line for line in log.read_text(errors="replace").splitlines() if "pmix" not in line.lower()
            ]
            parts.append("\n".join((f"--- {log.name}", *lines[-15:])))
        return "\n".join(parts)


@dataclass
class Job:
    """A submitted job."""

    slurm: Slurm
    id: str
    folder: Path

    def facts(self) -> dict[str, str]:
        """``scontrol show job`` by key; of an array or a heterogeneous job, its first."""
        text = self.slurm.ask("scontrol", "show", "job", "-o", self.id).split("\n")[0]
        return {key: value for key, _, value in (word.partition("=") for word in text.split(" "))}

    @property
    def state(self) -> str:
        return self.facts()["JobState"]

    @property
    def output(self) -> str:
        """What the job wrote so far, in all its lives."""
        return "".join(
            f"--- {file.name}\n{file.read_text(errors='replace')}"
            for file in sorted(self.folder.glob("*.out"))
        )

    def wait(self, what: str, look: Callable[[], T | None]) -> T:
        """Wait until ``look`` finds something; the failure shows the job's output too."""
        try:
            return self.slurm.wait(what, look)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output[-8000:]}") from None

    def wait_state(self, *states: str) -> str:
        """Until the job is in one of these states; in which."""
        return self.wait(f"job {self.id} to be {' or '.join(states)}", lambda: self._in(states))

    def _in(self, states: Iterable[str]) -> str | None:
        state = self.state
        return state if state in states else None

    def wait_said(self, *words: str) -> str:
        """Until a line of its output has all of these words; that line."""

        def look() -> str | None:
            lines = self.output.splitlines()
            return next((line for line in lines if all(word in line for word in words)), None)

        return self.wait(f"the job to say {' … '.join(words)}", look)

    def start_soon(self) -> None:
        """Do not wait out the pause of 6 s or more that Slurm makes before it starts a requeued job again.

        Some of it must be: nodes reject credentials that are not newer, by their clock of seconds, than the end of
        the life before. On a busy machine the pause may be over by now: then there is nothing to update.
        """
        self.slurm.command("scontrol", "update", f"JobId={self.id}", "StartTime=now+2")

    def cancel(self) -> None:
        self.slurm.command("scancel", self.id)
        self.wait(f"the processes of job {self.id} to end", lambda: not self.processes())

    def processes(self) -> list[int]:
        """Those that its steps started, wherever they hang now."""
        return self.slurm.processes(SLURM_JOB_ID=self.id)
