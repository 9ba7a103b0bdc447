"""Hosts the c10d store and its coordinator on a machine that takes no part: ``elastic-agent serve``.

The state of this process is recovered when it restarts: the agents redial and publish in the new store what they
run, and the state directory contains the last decisions. If this is done within the leases, running worlds
continue.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from elastic_agent.logs import get_logger
from elastic_agent.protocol import Phase, Plan
from elastic_agent.sd_notify import ALIVE, READY, STOPPING, SystemdNotifier, status
from elastic_agent.values import DEFAULT_PORT, Endpoint

if TYPE_CHECKING:
    from elastic_agent.transport import Secret
    from elastic_agent.transport.c10d import C10dHost, ServeStore

    from .hosted_runs import HostedRuns

DIAL_TIMEOUT_S = 5.0
JOIN_S = 2.0
"""How long the coordinator's thread is waited for at the end; its store is closed by then."""

MOST_NAMED = 8
"""So many runs are named in a line."""

EVERYWHERE = "0.0.0.0"

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class CannotServeError(Exception):
    """The endpoint is not this machine's, or another program listens there; the message is one line."""


class StopRequests:
    """Receives SIGTERM and SIGINT from now on; a wait for them can also be woken for other reasons.

    The signals come through a pipe, which the C handler writes to: a signal that comes just before the wait begins
    runs no Python handler until the wait ends, and would not end a wait for a queue.
    """

    def __init__(self) -> None:
        """Take the signals over, until the process ends; one that is ignored (``serve &`` in a script) stays so."""
        self._news, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for signum in _STOP_SIGNALS:
            if signal.getsignal(signum) == signal.SIG_IGN:
                get_logger().info(f"ignoring {signum.name}, which was ignored when this program was started")
            else:
                signal.signal(signum, _keep_running)

    def report(self) -> None:
        """Wake the waiting thread (from any thread)."""
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._writing, b"\0")

    def wait(self) -> str:
        """The name of the next signal; empty if something else is to be looked at."""
        number = os.read(self._news, 1)[0]
        return signal.Signals(number).name if number in _STOP_SIGNALS else ""


def _keep_running(signum: int, frame: FrameType | None) -> None:
    """The signal's number is in the pipe."""


def serve(
    endpoint: Endpoint | None,
    state_dir: Path,
    stop: StopRequests,
    serve_store: ServeStore,
    show: Callable[[HostedRuns], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    secret: Secret | None = None,
) -> bool:
    """Serve until a signal to stop.

    Args:
        endpoint: the rendezvous endpoint; None: this machine's name and the default port.
        state_dir: the directory for the run history, read at the next start.
        stop: signals that came since the program began.
        serve_store: serves the store.
        show: makes the runs known to users until it is exited.
        secret: what the agents of all its runs share; None: every agent is let in.

    Returns:
        Whether it was stopped by a signal; False if the coordinator failed.

    Raises:
        CannotServeError: the endpoint is not this machine's, or is taken.
    """
    shown = endpoint or Endpoint(socket.gethostname(), DEFAULT_PORT)
    with _hosted(endpoint or Endpoint(EVERYWHERE, DEFAULT_PORT), shown, secret, serve_store) as host:
        server = Server(host, shown, state_dir, stop)
        with show(server.runs):
            as_asked = server.run()
    server.join()
    return as_asked


class Server:
    """The coordinator of a hosted store, and the log lines about its runs."""

    def __init__(self, host: C10dHost, endpoint: Endpoint, state_dir: Path, stop: StopRequests) -> None:
        from elastic_agent.rendezvous.coordinator_driver import IDLE_S
        from elastic_agent.rendezvous.run_history import RunHistoryStore, c10d_store

        from .coordinator_thread import CoordinatorThread
        from .hosted_runs import HostedRuns

        self._endpoint = endpoint
        self._state_dir = state_dir
        self._stop = stop
        self._manager = SystemdNotifier.taken_from(os.environ)
        self._alive_due_s = 0.0
        self._log = get_logger()
        self._open: set[str] = set()
        """Runs that began and have no outcome yet."""
        self._coordinator = CoordinatorThread(
            host.inbox(),
            host.coordinator_records,
            RunHistoryStore(state_dir, c10d_store(host.port)),
            stop.report,
            on_plan=self._on_plan,
            on_turn=self._turned,
            idle_s=min(IDLE_S, self._manager.alive_every_s),
        )

        self.runs = HostedRuns(str(endpoint), host.report_records)
        """Of this store."""

    def run(self) -> bool:
        """Coordinate until a signal to stop; whether that is why it ended."""
        if self._manager.watchdog_s is not None:
            faulthandler.enable()  # its SIGABRT writes down where we hang
        self._coordinator.start()
        self._log.info(f"serving at {self._endpoint}", state_dir=str(self._state_dir))
        self._manager.notify(READY, self._status(), patience_s=DIAL_TIMEOUT_S)
        while not (signal_name := self._stop.wait()) and not self._coordinator.failed:
            self._manager.notify(self._status())
        self._end(signal_name)
        return bool(signal_name)

    def _end(self, signal_name: str) -> None:
        self._manager.notify(STOPPING)
        needed_by = list(self._coordinator.busy_with)
        self._coordinator.stop()
        if not signal_name:
            return
        if needed_by:
            self._log.warning(
                f"{signal_name} received: closing the store, which is still used by {_enumerated(needed_by)}; "
                "workers keep running if it is back within the lease"
            )
        else:
            self._log.info(f"{signal_name} received: closing the store, which no run uses")

    def join(self) -> None:
        """After the store was closed: wait for the thread."""
        self._coordinator.join(JOIN_S)

    def _status(self) -> str:
        return status(f"at {self._endpoint}, {_enumerated(self._coordinator.busy_with)}")

    def _turned(self) -> None:
        """In the coordinator's thread: it does not hang."""
        now_s = time.monotonic()
        if self._manager.watchdog_s is not None and now_s >= self._alive_due_s:
            self._alive_due_s = now_s + self._manager.alive_every_s / 2  # the next turn may be that late
            self._manager.notify(ALIVE)

    def _on_plan(self, run_id: str, plan: Plan) -> None:
        """In the coordinator's thread."""
        self.runs.on_plan(run_id, plan)
        self._log_plan(run_id, plan)

    def _log_plan(self, run_id: str, plan: Plan) -> None:
        """A line when a run begins, or is back, and one when it ends."""
        if plan.is_terminal:
            if run_id in self._open:
                self._open.discard(run_id)
                say = self._log.info if plan.phase is Phase.FINISHED else self._log.warning
                say(f"run {plan.phase.value}", run=run_id, generation=plan.generation, why=plan.reason)
        elif run_id not in self._open:
            self._open.add(run_id)
            what = "run started" if plan.world is None else "run resumed"
            self._log.info(what, run=run_id, generation=plan.generation, why=plan.reason)


@contextlib.contextmanager
def _hosted(
    endpoint: Endpoint, shown: Endpoint, secret: Secret | None, serve_store: ServeStore
) -> Iterator[C10dHost]:
    """The store, hosted by this process alone."""
    from elastic_agent.transport import TransportError, c10d, is_local, resolve

    try:
        addresses = resolve(endpoint.host)
        if not is_local(addresses):
            where = ", ".join(address for _, address in addresses)
            raise CannotServeError(
                f"{shown.host} ({where}) is not this machine; run elastic-agent serve on the machine of "
                "the endpoint, or pass an endpoint of this machine"
            )
        host = c10d.find_or_host(endpoint, DIAL_TIMEOUT_S, secret, serve_store)
    except TransportError as error:
        problem = str(error).replace(str(endpoint), str(shown))
        raise CannotServeError(f"cannot serve at {shown}: {problem}") from None
    if host is None:
        problem = _who_answers(endpoint, secret).replace(str(endpoint), str(shown))
        raise CannotServeError(f"cannot serve at {shown}: {problem}")
    try:
        yield host
    finally:
        host.close()


def _who_answers(endpoint: Endpoint, secret: Secret | None) -> str:
    """The program at the endpoint, in words."""
    from elastic_agent.transport import TransportError, c10d

    try:
        table = c10d.open_table(endpoint, DIAL_TIMEOUT_S, secret)
    except TransportError as error:
        return str(error)
    table.close()
    return (
        "the port is in use by a store of elastic-agent (another elastic-agent serve, or an agent that "
        "hosts it); stop that process first"
    )


def _enumerated(run_ids: list[str]) -> str:
    if not run_ids:
        return "no runs"
    named = ", ".join(run_ids[:MOST_NAMED]) + (", …" if len(run_ids) > MOST_NAMED else "")
    return f"{len(run_ids)} run{'s' if len(run_ids) > 1 else ''} ({named})"
