"""The process of an etcd member of this machine, and what it has on disk. Everything here blocks.

It is in a session of its own and outlives an agent that is killed; without a next one it runs until it is killed, too.
The agent that holds the lock of its folder supervises it; if that is the next agent, it finds the process by its number
and its data directory. Clocks need not agree: etcd's leases count the time of its leader's monotonic clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_agent.files import all_but_newest, locked, write_atomically
from elastic_agent.linux import await_exit, send_signal
from elastic_agent.transport import (
    Secret,
    TransportError,
    UnreachableError,
    connect,
    is_local,
    listen,
    own_addresses,
    resolve,
)
from elastic_agent.values import Endpoint

PROGRAM, FOLDER = "etcd", "members"
TIMING = ("--heartbeat-interval=50", "--election-timeout=500")
"""In ms; half of etcd's defaults: a leader that dies is replaced within a second, so that a lease suffices for all."""
ANSWER_S = 1.0
TERM_S, KILL_S = 5.0, 2.0
"""The time that it has to end: after SIGTERM, by which it hands its leadership over, and after SIGKILL."""
_SKIP = "peer-skip-client-san-verification"
KEPT_CLUSTERS = 4
"""The data of so many other clusters stay on a machine, those that were used last; each takes some 130 MB."""


class Member:
    """One member; each method may raise OSError."""

    def __init__(
        self, own: Endpoint, cluster: Endpoint, state_dir: Path, secret: Secret | None, local_addr: str | None
    ) -> None:
        """Touch nothing; ``own`` and ``cluster``: where clients reach it and all members; the rest: the agent's."""
        self.own = own
        self.is_supervised = False
        """This process supervises it."""
        self._secret, self._local_addr = secret, local_addr
        self._members = sorted(cluster.members, key=str)
        self._name = hashlib.sha256(",".join(map(str, self._members)).encode()).hexdigest()[:12]
        self._folder = state_dir.resolve() / FOLDER / f"{self._name}={own.host}"
        self.data = self._folder / "data"
        self.peer = Endpoint(own.host, own.port + 1)
        self.peer_url = self._url(own.host, self.peer.port)
        self._held = contextlib.ExitStack()
        """The lock."""
        self._turn = threading.Lock()
        """An agent that ends leaves a thread behind in which the member is just being started."""
        self._child: subprocess.Popen[bytes] | None = None

    def _url(self, host: str, port: int) -> str:
        return f"{'http' if self._secret is None else 'https'}://{Endpoint(host, port)}"

    @property
    def has_data(self) -> bool:
        """True if it has been a member already."""
        return any(self.data.glob("member/wal/*.wal"))

    def is_here(self) -> bool:
        """Return whether this machine is to host it; raises ``UnreachableError`` if its name does not resolve."""
        if any(member.host == self._local_addr for member in self._members):
            return self.own.host == self._local_addr
        return is_local(resolve(self.own.host))

    def known_members(self) -> list[dict[str, Any]] | None:
        """Ask it which members there are, as etcd's peers do: it answers without a majority, too.

        Returns:
            The members in etcd's words (``peerURLs``, ``name``, ``clientURLs`` once it has been up); None: nothing
            listens there.

        Raises:
            TransportError: it listens, and gives no such answer.
        """
        try:
            with connect(self.peer.host, self.peer.port, ANSWER_S) as sock:
                sock.settimeout(ANSWER_S)
                peer = http.client.HTTPConnection(self.peer.host)
                peer.sock = sock if self._secret is None else _context(self._secret).wrap_socket(sock)
                peer.request("GET", "/members")
                return list(json.load(peer.getresponse()))
        except (UnreachableError, ConnectionError):
            return None
        except (OSError, ValueError, TypeError, http.client.HTTPException) as error:
            raise TransportError(f"{self.peer} does not answer as etcd with this secret: {error}") from None

    def supervise(self) -> None:
        """Become the agent that supervises it, until :meth:`stop`; raises BlockingIOError if another one does."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.is_supervised:
            return
        (self._folder / "lock").touch(mode=0o600)
        self._held.enter_context(locked(self._folder / "lock"))
        self.is_supervised = True
        os.utime(self._folder)
        others = (each for each in self._folder.parent.iterdir() if not each.name.startswith(self._name))
        for _, folder in all_but_newest(others, KEPT_CLUSTERS):
            if _process_in(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)

    def process(self) -> int | None:
        """Return its process, if it runs."""
        child = self._child  # of a new one, /proc may not know the command yet
        return child.pid if child is not None and child.poll() is None else _process_in(self._folder)

    def free_address(self) -> str:
        """Return the address on which it is to listen; raises OSError if a port is taken."""
        for port in (self.own.port, self.own.port + 1):
            try:
                with listen(self.own.host, port) as sock:
                    address = str(sock.getsockname()[0])
            except OSError as error:
                raise OSError(f"port {port}: {error.strerror} ({self._how_to_free(port)})") from None
        return address

    def _how_to_free(self, port: int) -> str:
        """Return how to end what has a port: maybe the member of another cluster, whose agent was killed."""
        for folder in self._folder.parent.iterdir():
            if (pid := _process_in(folder)) is not None and f":{port}\0" in _command_of(pid):
                return f"by an etcd for other machines; unless an agent there uses it, end it: kill {pid}"
        return "`ss -ltnp` shows by what"

    def start(self, joined: Sequence[str] | None) -> None:
        """Start it; ``joined``: the cluster that it joins without data, by its members' URLs for peers; else None."""
        address, port = self.free_address(), self.own.port
        urls = {each.host: self._url(each.host, each.port + 1) for each in self._members}
        peers = ",".join(f"{host}={url}" for host, url in urls.items() if joined is None or url in joined)
        state = "new" if joined is None else "existing"
        command = [
            *(PROGRAM, f"--name={self.own.host}", f"--data-dir={self.data}"),
            f"--listen-client-urls={self._url(address, port)}",
            f"--advertise-client-urls={self._url(self.own.host, port)}",
            f"--listen-peer-urls={self._url(address, port + 1)}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            *(f"--initial-cluster={peers}", f"--initial-cluster-token={self._name}"),
            *(f"--initial-cluster-state={state}", "--pre-vote", *TIMING),  # 3.4 has pre-vote off
            "--auto-compaction-retention=1",  # hours: each renewal of a lease is a revision
            *("--logger=zap", "--log-outputs=stderr", "--log-level=warn"),
            *self._certificates(),
        ]
        with self._turn, (self._folder / "etcd.log").open("wb") as log:
            if not self.is_supervised:  # it was stopped meanwhile
                return
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={name: text for name, text in os.environ.items() if not name.startswith("ETCD_")},
            )
            write_atomically(self._folder / "pid", str(self._child.pid).encode())

    def _certificates(self) -> list[str]:
        """Write certificates that are valid for every member, and return etcd's options for them."""
        if self._secret is None:
            return []
        hosts = (member.host for member in self._members)
        pem = self._secret.issue(dict.fromkeys((*hosts, "localhost", "127.0.0.1", *own_addresses())))
        files = {"trusted-ca-file": pem.authorities, "cert-file": pem.certificate, "key-file": pem.key}
        for name, data in files.items():
            write_atomically(self._folder / name, data)
        options = [f"--{kind}{name}={self._folder / name}" for kind in ("", "peer-") for name in files]
        # They name the members, and not the address that one of them connects from.
        usage = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True, check=False)
        is_new = f" --{_SKIP} " in usage.stdout + usage.stderr  # from 3.6 on
        skip = f"--{_SKIP}" if is_new else f"--experimental-{_SKIP}"
        return [*options, "--client-cert-auth", "--peer-client-cert-auth", skip]

    def last_words(self) -> str:
        """Return why it ended, in etcd's words after a colon; empty: it left none."""
        words = ""
        for line in reversed((self._folder / "etcd.log").read_text(errors="replace").splitlines()):
            if line.startswith("panic: "):  # often logged before, with its cause
                words = line
            with contextlib.suppress(ValueError, AttributeError):
                entry = json.loads(line)
                if entry.get("level") in ("fatal", "panic") or (entry.get("level") == "error" and not words):
                    words = f"{entry.get('msg')}: {entry.get('error', '')}"
                    break
        return words and f": {words}"[:300]

    def stop(self) -> None:
        """End it, if this agent supervises it."""
        with self._turn:
            if not self.is_supervised:
                return
            for signum, patience_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
                if (pid := self.process()) is not None:
                    send_signal(pid, signum)
                    await_exit(pid, patience_s)
            self.process()  # else it stays a zombie
            self._held.close()
            self.is_supervised = False


def _context(secret: Secret) -> ssl.SSLContext:
    context = secret.new_client_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # the first releases of etcd 3.5 have no later one
    return context


def _process_in(folder: Path) -> int | None:
    """Return the process of the member in a folder; what has its number later has not its data directory."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / "pid").read_bytes())
        if str(folder / "data") in _command_of(pid):
            return pid
    return None


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes())
    return ""
