"""torch's ``RendezvousHandler`` for stock torchrun: ``torchrun --rdzv-backend elastic …``.

torchrun gets its worlds from a *sidecar process*, which takes part in the run for it (:mod:`.sidecar`): its event loop,
logs and signals are its own, whatever the program does that calls torch's launcher. The two communicate over a socket
pair; when one end closes, the other detects it.

Limitations with torchrun: its workers are not fenced (no guard kills them at the lease's deadline), it counts
restarts for each of its agents separately, and a torchrun that gives up leaves the run to the others.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic_agent.linux import signals_blocked
from elastic_agent.values import new_incarnation

from .messages import (
    Begin,
    Channel,
    Finishing,
    FromSidecar,
    FromTorchrun,
    Leave,
    NextWorld,
    Over,
    Sealed,
    Stale,
    Trouble,
)

STORE_TIMEOUT_S = 300.0
"""How long torchrun's own exchange of ranks may take."""

LEAVE_PATIENCE_S = 20.0
"""How long the sidecar gets to leave after a failure (see :data:`.sidecar.LEAVE_TIMEOUT_S`)."""

LAST_MOMENT_S = 3.0
"""The same at the interpreter's exit, after a signal."""

MEANT_FOR_TORCHRUN: frozenset[int] = frozenset(
    (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
)
"""Never delivered to the sidecar: torchrun makes it leave by a message. Without SIGTSTP: a torchrun that the terminal
stops is not responsive."""

EXIT_BARRIER = "torchelastic/agent/terminal_state"
"""Prefix of the keys of torchrun's exit barrier; torch's private name, which a test compares."""


class ElasticRendezvous(RendezvousHandler):
    """The rendezvous for stock torchrun. One worker seat stands for each node; torchrun assigns the ranks."""

    def __init__(self, backend: str, run_id: str, begin: Begin, timeout_s: float) -> None:
        """Start the sidecar, so that it is up by the time a world is requested.

        Args:
            backend: the name this handler was registered under.
            run_id: the run's id as the user gave it.
            begin: the first message to the sidecar.
            timeout_s: how long ``next_rendezvous`` waits at most, seconds.
        """
        self._backend = backend
        self._run_id = run_id
        self._begin = begin
        self._timeout_s = timeout_s
        self._trouble = ""
        self._stale = False
        self._over: Over | None = None
        self._sidecar = _Sidecar(begin)
        atexit.register(self._leave_at_exit)

    # -- torch's interface ----------------------------------------------------------------------

    def get_backend(self) -> str:
        """The name this handler was registered under."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """The workers' store is hosted by a sidecar, fresh in every generation."""
        return True

    def get_run_id(self) -> str:
        """The run's id."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next world; blocks until it is sealed with this node in it."""
        if self._sidecar.is_gone:
            self._replace_sidecar()
        self._sidecar.send(NextWorld())
        sealed = self._await_world(time.monotonic() + self._timeout_s)
        address = sealed.bootstrap
        try:
            store = TCPStore(
                address.host,
                address.port,
                is_master=False,
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise RendezvousConnectionError(
                f"the bootstrap store at {address} cannot be reached: {reason}"
            ) from None
        return RendezvousInfo(
            _AgentStore(store, lambda: self._sidecar.send(Finishing())),
            sealed.rank,
            sealed.size,
            RendezvousStoreInfo(address.host, address.port),
        )

    def num_nodes_waiting(self) -> int:
        """More than 0 as soon as the world of the last rendezvous is over, so that torchrun starts the next one."""
        with contextlib.suppress(EOFError):
            for message in self._sidecar.received():
                self._take(message)
        return 1 if self._stale or self._over is not None or self._sidecar.is_gone else 0

    def is_closed(self) -> bool:
        """Whether there will be no other world."""
        return self._over is not None

    def set_closed(self) -> None:
        """torchrun gives up: leave the run to the others."""
        self._over = Over("torchrun closed the rendezvous")
        self._sidecar.send(Leave(succeeded=False))

    def shutdown(self) -> bool:
        """Leave the run, once the others need nothing of this node any more.

        torchrun calls this at its end, after its workers have exited; if they failed, while that exception is being
        propagated.
        """
        atexit.unregister(self._leave_at_exit)
        succeeded = sys.exception() is None
        self._sidecar.send_leave(Leave(succeeded), None if succeeded else LEAVE_PATIENCE_S)
        return True

    def _leave_at_exit(self) -> None:
        """After a signal torchrun does not shut its rendezvous down; its workers are stopped by then."""
        self._sidecar.send_leave(Leave(succeeded=False), LAST_MOMENT_S)

    # -- the sidecar --------------------------------------------------------------------------

    def _await_world(self, deadline_s: float) -> Sealed:
        while True:
            try:
                message = self._sidecar.listen(deadline_s - time.monotonic())
            except EOFError:
                raise RendezvousConnectionError(
                    "the process that takes part in the rendezvous for torchrun exited unexpectedly "
                    f"({self._sidecar.exit_code}); see its output above"
                ) from None
            if message is None:
                raise RendezvousTimeoutError(self._too_late())
            if isinstance(message, Sealed):
                self._trouble = ""
                self._stale = False  # what was unread until now was about an earlier world
                return message
            self._take(message)
            if self._over is not None:
                kind = RendezvousConnectionError if self._over.unreachable else RendezvousClosedError
                raise kind(self._over.reason)

    def _take(self, message: FromSidecar) -> None:
        match message:
            case Stale():
                self._stale = True
            case Over():
                self._over = message
            case Trouble(reason=reason):
                self._trouble = reason
            case Sealed():
                pass  # for a request that was given up

    def _too_late(self) -> str:
        why = f": {self._trouble}" if self._trouble else ""
        return f"no world was formed within {self._timeout_s:g} s at {self._begin.endpoint}{why}"

    def _replace_sidecar(self) -> None:
        """The sidecar died; torchrun has stopped its workers, so the new sidecar can report that."""
        old = self._begin.member
        incarnation = new_incarnation()
        replaces = (*old.replaces, old.incarnation)[-64:]
        member = msgspec.structs.replace(old, incarnation=incarnation, replaces=replaces)
        self._begin = msgspec.structs.replace(self._begin, member=member)
        self._sidecar = _Sidecar(self._begin)


class _AgentStore(PrefixStore):
    """The store over which torchrun's agents exchange ranks; detects when this one enters the exit barrier."""

    def __init__(self, store: TCPStore, on_finishing: Callable[[], None]) -> None:
        super().__init__("torchelastic-agents", store)
        self._on_finishing = on_finishing

    def add(self, key: str, amount: int) -> int:
        """Count up; the exit barrier begins with it."""
        if key.startswith(EXIT_BARRIER):
            self._on_finishing()
        return super().add(key, amount)


class _Sidecar:
    """The sidecar process, as torchrun sees it."""

    def __init__(self, begin: Begin) -> None:
        ours, theirs = socket.socketpair()
        with theirs, signals_blocked(MEANT_FOR_TORCHRUN):
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "elastic_agent.torchrun.sidecar"),
                    *(str(theirs.fileno()), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._channel: Channel[FromSidecar] = Channel(ours, FromSidecar)
        self._messages: deque[FromSidecar] = deque()
        self.is_gone = False
        self.send(begin)

    def send(self, message: FromTorchrun) -> None:
        self._channel.send(message)

    def received(self) -> list[FromSidecar]:
        """The messages received so far, without waiting. Raises EOFError when it is gone."""
        try:
            self._messages.extend(self._channel.arrived())
        except EOFError:
            self.is_gone = True
            raise
        received = list(self._messages)
        self._messages.clear()
        return received

    def listen(self, timeout_s: float) -> FromSidecar | None:
        """Its next message; None at the time-out. Raises EOFError when it is gone."""
        deadline_s = time.monotonic() + timeout_s
        while not self._messages:
            if not self._channel.wait(deadline_s - time.monotonic()):
                return None
            self._messages.extend(self.received())
        return self._messages.popleft()

    @property
    def exit_code(self) -> str:
        """How it ended, in words."""
        try:
            return f"exit code {self._process.wait(5.0)}"
        except subprocess.TimeoutExpired:
            return "still running"

    def send_leave(self, message: Leave, timeout_s: float | None) -> None:
        """Wait until the other nodes do not need it any more, at most ``timeout_s``."""
        self.send(message)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.is_gone = True
        self._channel.close()
