"""Hosts the c10d store and its coordinator on a machine that takes no part: ``elastic-agent serve``.

The state of this process is recovered when it restarts: the agents redial and publish in the new store what they
run, and the state directory contains the last decisions. If this is done within the leases, running worlds
continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
from collections.abc import Awaitable
from pathlib import Path

from elastic_agent.logs import get_logger
from elastic_agent.printable import listed
from elastic_agent.protocol import Phase, Plan, count
from elastic_agent.rendezvous.run_history import RunHistoryStore, c10d_store
from elastic_agent.rendezvous.waits import until_one_ends
from elastic_agent.sd_notify import ALIVE, READY, STOPPING, SystemdNotifier, status
from elastic_agent.transport import Secret, TransportError, c10d, is_local, resolve
from elastic_agent.values import DEFAULT_PORT, Endpoint

from .coordinator import StoreCoordinator

DIAL_TIMEOUT_S = 5.0

MOST_NAMED = 8
"""So many runs are named in a line."""

EVERYWHERE = "0.0.0.0"

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class CannotServeError(Exception):
    """The endpoint is not this machine's, or another program listens there; the message is one line."""


def signals_to_stop() -> asyncio.Queue[str]:
    """Return where the names of signals come from now on; one that is ignored (``serve &`` in a script) stays so."""
    loop, names = asyncio.get_running_loop(), asyncio.Queue[str]()
    for signum in _STOP_SIGNALS:
        if signal.getsignal(signum) == signal.SIG_IGN:
            get_logger().info(f"ignoring {signum.name}, which was ignored when this program was started")
        else:
            loop.add_signal_handler(signum, names.put_nowait, signum.name)
    return names


async def show_life(manager: SystemdNotifier) -> None:
    """Tell the watchdog that the event loop runs."""
    while True:
        manager.notify(ALIVE)
        await asyncio.sleep(manager.alive_every_s)


async def serve(
    endpoint: Endpoint | None,
    state_dir: Path,
    serve_store: c10d.ServeStore,
    secret: Secret | None = None,
) -> bool:
    """Serve until a signal to stop.

    Args:
        endpoint: the rendezvous endpoint; None: this machine's name and the default port.
        state_dir: the directory for the run history, read at the next start.
        serve_store: serves the store.
        secret: what the agents of all its runs share; None: every agent is let in.

    Returns:
        Whether it was stopped by a signal; False if the coordinator failed.

    Raises:
        CannotServeError: the endpoint is not this machine's, or is taken.
    """
    stop = signals_to_stop()
    shown = endpoint or Endpoint(socket.gethostname(), DEFAULT_PORT)
    host = await _host(endpoint or Endpoint(EVERYWHERE, DEFAULT_PORT), shown, secret, serve_store)
    with contextlib.closing(host):
        return await Server(host, shown, state_dir).run(stop)


class Server:
    """The coordinator of a hosted store, and the log lines about its runs."""

    def __init__(self, host: c10d.C10dHost, endpoint: Endpoint, state_dir: Path) -> None:
        self._endpoint = endpoint
        self._state_dir = state_dir
        self._manager = SystemdNotifier.taken_from(os.environ)
        self._log = get_logger()
        self._open: set[str] = set()
        """Runs that began and have no outcome yet."""
        self._coordinator = StoreCoordinator(
            host.inbox,
            RunHistoryStore(state_dir, c10d_store(host.port)),
            self._show_status,
            on_plan=self._log_plan,
        )

    async def run(self, stop: asyncio.Queue[str]) -> bool:
        """Coordinate until a signal to stop; whether that is why it ended."""
        self._log.info(f"serving at {self._endpoint}", state_dir=str(self._state_dir))
        self._manager.notify(READY, self._status(), patience_s=DIAL_TIMEOUT_S)
        signalled = asyncio.ensure_future(stop.get())
        parts: list[Awaitable[object]] = [self._coordinator.run(), signalled]
        if self._manager.watchdog_s is not None:
            faulthandler.enable()  # its SIGABRT writes down where we hang
            parts.append(show_life(self._manager))
        await until_one_ends(*parts)
        self._manager.notify(STOPPING)
        name = "" if signalled.cancelled() else signalled.result()
        if needed_by := self._coordinator.busy_with:
            self._log.warning(
                f"{name} received: closing the store, which is still used by {_enumerated(needed_by)}; "
                "workers keep running if it is back within the lease"
            )
        elif name:
            self._log.info(f"{name} received: closing the store, which no run uses")
        return bool(name)

    def _show_status(self) -> None:
        self._manager.notify(self._status())

    def _status(self) -> str:
        return status(f"at {self._endpoint}, {_enumerated(self._coordinator.busy_with)}")

    def _log_plan(self, run_id: str, plan: Plan) -> None:
        """Log a line when a run begins, or is back, and one when it ends."""
        if plan.is_terminal:
            if run_id in self._open:
                self._open.discard(run_id)
                say = self._log.info if plan.phase is Phase.FINISHED else self._log.warning
                say(f"run {plan.phase.value}", run=run_id, generation=plan.generation, why=plan.reason)
        elif run_id not in self._open:
            self._open.add(run_id)
            event = "run started" if plan.world is None else "run resumed"
            self._log.info(event, run=run_id, generation=plan.generation, why=plan.reason)


async def _host(
    endpoint: Endpoint, shown: Endpoint, secret: Secret | None, serve_store: c10d.ServeStore
) -> c10d.C10dHost:
    """Return the store, hosted by this process alone."""
    try:
        addresses = resolve(endpoint.host)
        if not is_local(addresses):
            where = ", ".join(address for _, address in addresses)
            raise CannotServeError(
                f"{shown.host} ({where}) is not this machine; run elastic-agent serve on the machine of "
                "the endpoint, or pass an endpoint of this machine"
            )
        host = await c10d.find_or_host(endpoint, DIAL_TIMEOUT_S, secret, serve_store)
        if host is not None:
            return host
        (await c10d.open_table(endpoint, DIAL_TIMEOUT_S, secret)).close()
        problem = (
            "the port is in use by a store of elastic-agent (another elastic-agent serve, or an agent that "
            "hosts it); stop that process first"
        )
    except TransportError as error:  # or what answers is no store of ours, or not one with this secret
        problem = str(error)
    raise CannotServeError(f"cannot serve at {shown}: {problem.replace(str(endpoint), str(shown))}")


def _enumerated(run_ids: list[str]) -> str:
    if not run_ids:
        return "no runs"
    return f"{count(len(run_ids), 'run')} ({listed(run_ids, MOST_NAMED)})"
