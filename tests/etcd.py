"""Real etcd servers, one or a cluster, on loopback; killed, frozen and restarted at will."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from elastic_agent.cli.secret import secret
from elastic_agent.testing.processes import freeze, thaw
from tests.ports import free_ports
from tests.processes import MARK
from tests.waiting import wait_for

ANSWERS_WITHIN_S = 60.0
"""A guard against hangs, no statement about speed."""
MISSING = shutil.which("etcd") is None or shutil.which("etcdctl") is None


def need_etcd() -> None:
    """Skip the test where etcd is not installed."""
    if MISSING:
        pytest.skip("etcd is not installed (Debian: etcd-server, etcd-client)")


def set_up_long_ago(endpoints: str, prefix: str) -> None:
    """Have agents find an etcd that others have used before: the first run in a new one waits a while."""
    put = ["etcdctl", "--endpoints", endpoints, "put", f"{prefix}/1/id", "d00d"]
    subprocess.run(
        put,
        env={"PATH": os.environ["PATH"], "ETCDCTL_API": "3"},
        capture_output=True,
        timeout=ANSWERS_WITHIN_S,
        check=True,
    )


@dataclass
class EtcdServer:
    """One member."""

    name: str
    folder: Path
    client_port: int
    peer_port: int
    cluster: str
    options: tuple[str, ...] = ()
    scheme: str = "http"
    hosts: tuple[str, ...] = ("127.0.0.1",)
    """On which addresses it listens to clients."""
    within: tuple[str, ...] = ()
    """The command that starts it somewhere, in a network namespace."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    def start(self) -> None:
        """Start it, with what it has on disk."""
        client, peer = f"{self.scheme}://{self.endpoint}", f"http://127.0.0.1:{self.peer_port}"
        listen = ",".join(f"{self.scheme}://{host}:{self.client_port}" for host in self.hosts)
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(*self.within, "etcd", "--name", self.name, "--data-dir", str(self.folder / self.name)),
                    *("--listen-client-urls", listen, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", self.cluster, "--unsafe-no-fsync"),
                    *("--heartbeat-interval", "20", "--election-timeout", "200"),
                    *("--logger", "zap", "--log-outputs", "stderr", *self.options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name in ("PATH", MARK)},
            )

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL; without effect on one that does not run."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def listens(self) -> bool:
        """Return whether it takes connections of clients, as far as can be seen from here."""
        if self.within:
            return True
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.client_port)) == 0

    def freeze(self) -> None:
        freeze(self.pid)

    def thaw(self) -> None:
        thaw(self.pid)


class EtcdCluster:
    """All members of one cluster."""

    def __init__(
        self,
        folder: Path,
        size: int = 1,
        options: Sequence[str] = (),
        scheme: str = "http",
        ctl_options: Sequence[str] = (),
        hosts: Sequence[str] = ("127.0.0.1",),
        within: Sequence[str] = (),
    ) -> None:
        """Prepare.

        Args:
            folder: for data and logs.
            size: how many members.
            options: more of etcd's options.
            scheme: http or https, for clients.
            ctl_options: more of etcdctl's options.
            hosts: on which addresses the members listen; the first must be 127.0.0.1.
            within: a command that starts things somewhere, in a network namespace.
        """
        need_etcd()
        ports = free_ports(2 * size)
        names = [f"n{number}" for number in range(size)]
        peers = ",".join(f"{name}=http://127.0.0.1:{ports[2 * i + 1]}" for i, name in enumerate(names))
        self.members = [
            EtcdServer(
                name,
                folder,
                ports[2 * i],
                ports[2 * i + 1],
                peers,
                tuple(options),
                scheme,
                tuple(hosts),
                tuple(within),
            )
            for i, name in enumerate(names)
        ]
        self.ctl_options = tuple(ctl_options)
        """What etcdctl is told besides; may change when the access does."""
        self._folder = folder
        self._within = tuple(within)

    @classmethod
    def with_secret(
        cls,
        folder: Path,
        secret_file: Path,
        size: int = 1,
        options: Sequence[str] = (),
        hosts: Sequence[str] = ("127.0.0.1",),
    ) -> Self:
        """Prepare one whose clients must have the secret in this file."""
        tls = folder / "tls"
        assert secret(["--certificates", str(tls), str(secret_file)]) == 0
        ca, cert, key = (f"{tls}/{name}.pem" for name in ("ca", "cert", "key"))
        required = ("--trusted-ca-file", ca, "--cert-file", cert, "--key-file", key, "--client-cert-auth")
        ctl_options = ("--cacert", ca, "--cert", cert, "--key", key)
        return cls(folder, size, (*required, *options), "https", ctl_options, hosts)

    def __enter__(self) -> Self:
        for member in self.members:
            member.start()
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self.members:
            member.kill()
            shutil.rmtree(self._folder / member.name, ignore_errors=True)  # 123 MB each

    @property
    def endpoints(self) -> str:
        """Every member, as ``--rdzv-endpoint`` takes them."""
        return ",".join(member.endpoint for member in self.members)

    def ctl(self, *words: str, timeout_s: float = ANSWERS_WITHIN_S) -> str:
        """Return what etcdctl says."""
        return self._run(*words, timeout_s=timeout_s).stdout

    def _run(self, *words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        scheme = self.members[0].scheme
        endpoints = ",".join(f"{scheme}://{member.endpoint}" for member in self.members)
        return subprocess.run(
            [
                *(*self._within, "etcdctl", "--endpoints", endpoints),
                *("--dial-timeout", f"{timeout_s:g}s", "--command-timeout", f"{timeout_s:g}s"),
                *(*self.ctl_options, *words),
            ],
            env={"PATH": os.environ["PATH"], "ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            errors="replace",  # values need not be text
            timeout=timeout_s + ANSWERS_WITHIN_S,
            check=True,
        )

    def enable_auth(self, root_password: str = "root's") -> None:
        """Require a login from now on; etcdctl has one."""
        self.ctl("user", "add", "root", "--new-user-password", root_password)
        self.ctl("user", "grant-role", "root", "root")
        self.ctl("auth", "enable")
        self.ctl_options += ("--user", f"root:{root_password}")

    def keys(self, prefix: str = "/") -> list[str]:
        """The names of all keys there are."""
        return self.ctl("get", "--prefix", prefix, "--keys-only").split()

    def leader(self) -> EtcdServer:
        """The member that leads, as soon as all members follow the same one.

        For a moment there may be no leader: a busy machine is enough for an election with time-outs as short as ours.
        """

        def common_leader() -> EtcdServer | None:
            views = json.loads(self.ctl("endpoint", "status", "--write-out", "json"))
            leaders = {view["Status"].get("leader", 0) for view in views}
            if len(leaders) != 1 or 0 in leaders:
                return None
            (leading,) = (v["Endpoint"] for v in views if v["Status"]["header"]["member_id"] in leaders)
            return next(member for member in self.members if leading.endswith(f"//{member.endpoint}"))

        return wait_for("a leader that all members of etcd follow", common_leader)

    def wait_ready(self) -> None:
        """Until a majority answers."""

        def answers() -> bool:
            with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
                return bool(self._run("get", "no-such-key", timeout_s=5.0))
            return False

        # etcdctl would look again after a second
        wait_for("a member of etcd that listens", lambda: any(member.listens() for member in self.members))
        wait_for("an answer of etcd", answers)
