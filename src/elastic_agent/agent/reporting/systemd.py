"""Notifications to systemd about an agent that runs as a service: readiness, status, watchdog keep-alives.

All of them are sent by one timer of the agent's own loop. When the loop hangs, systemd receives nothing, and its
watchdog ends the agent; another thread would keep sending keep-alives.
"""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import Callable

from elastic_agent.agent import events
from elastic_agent.protocol import Announce, State
from elastic_agent.rendezvous.events import LeaseLost, Registered
from elastic_agent.sd_notify import ALIVE, READY, STOPPING, SystemdNotifier, extend, status

LOOK_EVERY_S = 0.5
LOOK_EVERY_RUNNING_S = 5.0
"""While workers run and are not to stop, only the step in the status changes."""
LOOK_EVERY_AT_START_S = 0.1
"""Short, because other units may wait for the start to complete."""

EXTENSION_S = 60.0
"""How much longer a start or a stop may take, from each notification on."""
EXTEND_EVERY_S = EXTENSION_S / 4

LAST_WORD_S = 1.0
"""The last notification is sent only once, so it may take this long."""

ANSWER_S = 0.5
"""After a registration the coordinator may refuse this node; that comes at once, or not at all."""


class SystemdReporter:
    """Notifies systemd about one agent. Does nothing if no systemd is listening."""

    def __init__(self, manager: SystemdNotifier, headline: Callable[[], str]) -> None:
        """Notify of nothing yet; ``headline``: the agent's status in one line."""
        self._manager = manager
        self._headline = headline
        self._registered = False
        """The node is registered with the run."""
        self._runs = False
        """Its workers run."""
        self._hosting = False
        """Its part is over, but it may serve the store to others for an unknown time."""
        self._sent_status = ""
        self._up = False
        self._stopping = ""
        self._registered_since_s: float | None = None
        self._alive_due_s = 0.0
        self._extend_due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Notify systemd from now on; to be called in the agent's loop."""
        if self._manager.watchdog_s is not None:
            faulthandler.enable()  # its SIGABRT writes down where we hang
        if self._manager.listens:
            self._tick()

    def on_event(self, event: events.Event) -> None:
        """Update the status from an event; the timer notifies systemd."""
        was_undisturbed = self._trains_undisturbed
        self._take_in(event)
        if was_undisturbed and not self._trains_undisturbed and self._timer is not None:
            self._timer.cancel()
            self._tick()

    @property
    def _trains_undisturbed(self) -> bool:
        return self._up and self._runs and not self._stopping

    def _take_in(self, event: events.Event) -> None:
        match event:
            case events.LeaveSignalled(reason=reason):
                self._stop(reason)
            case events.AgentStarted():
                self._registered = self._runs = False
            case Registered():
                self._registered = True
            case LeaseLost():
                self._registered = False
            case Announce(state=state):
                self._runs = state is State.RUNNING
            case events.WorkersStopping():
                self._runs = False
            case events.Hosting():
                self._hosting = True

    def _stop(self, reason: str) -> None:
        if not self._stopping:
            self._stopping = reason
            self._manager.notify(STOPPING)
            self._extend_due_s = 0.0
            self._send_status()

    def ended(self, how: str, *, in_order: bool) -> None:
        """Notify that the agent's part is over, and so is the loop; ``how`` is what remains to be read.

        ``in_order``: it ended without an error. For systemd a start that ends before the service is ready is a
        failure, so readiness is reported even for an agent that started after the run was over.
        """
        # In a message of its own: of several states in one, systemd takes the last.
        if in_order and not self._up:
            self._manager.notify(READY, patience_s=LAST_WORD_S)
        self._manager.notify(STOPPING, status(how), patience_s=LAST_WORD_S)

    def _tick(self) -> None:
        self._send_status()
        if self._trains_undisturbed:
            pause_s = min(LOOK_EVERY_RUNNING_S, self._manager.alive_every_s / 2)
        else:
            pause_s = LOOK_EVERY_S if self._up else LOOK_EVERY_AT_START_S
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._tick)

    def _send_status(self) -> None:
        now_s = asyncio.get_running_loop().time()
        headline = self._headline()
        before = (self._sent_status, self._up, self._alive_due_s, self._extend_due_s)
        lines = [*self._news(headline, now_s), *self._signs_of_life(now_s)]
        if lines and not self._manager.notify(*lines):  # systemd's socket is full: retried at the next tick
            self._sent_status, self._up, self._alive_due_s, self._extend_due_s = before

    def _news(self, headline: str, now_s: float) -> list[str]:
        lines = []
        text = f"{self._stopping}: {headline}" if self._stopping else headline
        if text != self._sent_status:
            self._sent_status = text
            lines.append(status(text))
        if not self._up and self._is_up(now_s):
            self._up = True
            lines.append(READY)
        return lines

    def _is_up(self, now_s: float) -> bool:
        """Return whether its workers run, or it waits for other nodes; not before it is connected to the store."""
        if not self._registered:
            self._registered_since_s = None
        elif self._registered_since_s is None:
            self._registered_since_s = now_s
        since_s = self._registered_since_s
        return self._runs or (since_s is not None and now_s - since_s >= ANSWER_S)

    def _signs_of_life(self, now_s: float) -> list[str]:
        lines = []
        if self._manager.watchdog_s is not None and now_s >= self._alive_due_s:
            self._alive_due_s = now_s + self._manager.alive_every_s
            lines.append(ALIVE)
        # Our own time-outs bound the wait for the store, and that for workers to save and end; systemd is to bound
        # neither, as long as the loop turns.
        waits = (not self._up or self._stopping) and not self._hosting
        if waits and now_s >= self._extend_due_s:
            self._extend_due_s = now_s + EXTEND_EVERY_S
            lines.append(extend(EXTENSION_S))
        return lines
