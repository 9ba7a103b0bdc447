"""Notifications to systemd about an agent that runs as a service: readiness, status, watchdog keep-alives.

All of them are sent by one timer of the agent's own loop. When the loop hangs, systemd receives nothing, and its
watchdog ends the agent; another thread would keep sending keep-alives.
"""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import Callable
from dataclasses import dataclass

from elastic_agent.agent import events
from elastic_agent.protocol import Announce, State
from elastic_agent.rendezvous.events import LeaseLost, Registered
from elastic_agent.sd_notify import ALIVE, READY, STOPPING, SystemdNotifier, extend, status

LOOK_EVERY_S, LOOK_EVERY_AT_START_S = 1.0, 0.1
"""Short at the start, because other units may wait for that to complete."""

EXTENSION_S = 60.0
"""The time that a start or a stop may still take, from each notification on."""
EXTEND_EVERY_S = EXTENSION_S / 4

LAST_WORD_S = 1.0
"""The last notification is sent only once, so it may take this long."""

ANSWER_S = 0.5
"""After a registration the coordinator may refuse this node; that comes at once, or not at all."""


@dataclass(eq=False, repr=False)
class SystemdReporter:
    """Notifies systemd about one agent. Does nothing if no systemd is listening."""

    manager: SystemdNotifier
    headline: Callable[[], str]
    """Gives the agent's status in one line."""

    def __post_init__(self) -> None:
        self._registered_s: float | None = None
        """Since when the node is registered with the run; None: it is not."""
        self._runs = self._hosting = False
        """Its workers run; its part is over, but it may serve the store to others for an unknown time."""
        self._is_up, self._stopping = False, ""
        self._sent_status = ""
        self._alive_due_s = self._extend_due_s = 0.0

    def start(self) -> None:
        """Notify systemd from now on; to be called in the agent's loop."""
        if self.manager.watchdog_s is not None:
            faulthandler.enable()  # its SIGABRT writes down where we hang
        if self.manager.listens:
            self._tick()

    def on_event(self, event: events.Event) -> None:
        """Update the status from an event; the timer notifies systemd."""
        match event:
            case events.LeaveSignalled(reason=reason) if not self._stopping:
                self._stopping = reason
                self.manager.notify(STOPPING)
                self._extend_due_s = 0.0
                self._send()
            case events.AgentStarted():
                self._registered_s, self._runs = None, False
            case Registered():
                self._registered_s = asyncio.get_running_loop().time()
            case LeaseLost():
                self._registered_s = None
            case Announce(state=state):
                self._runs = state is State.RUNNING
            case events.WorkersStopping():
                self._runs = False
            case events.Hosting():
                self._hosting = True

    def ended(self, how: str, *, in_order: bool) -> None:
        """Notify that the agent's part is over, and so is the loop; ``how`` is what remains to be read.

        ``in_order``: it ended without an error. For systemd a start that ends before the service is ready is a
        failure, so readiness is reported even for an agent that started after the run was over.
        """
        # In a message of its own: of several states in one, systemd takes the last.
        if in_order and not self._is_up:
            self.manager.notify(READY, patience_s=LAST_WORD_S)
        self.manager.notify(STOPPING, status(how), patience_s=LAST_WORD_S)

    def _tick(self) -> None:
        self._send()
        pause_s = min(LOOK_EVERY_S, self.manager.alive_every_s) if self._is_up else LOOK_EVERY_AT_START_S
        asyncio.get_running_loop().call_later(pause_s, self._tick)

    def _send(self) -> None:
        """Send what has changed, and signs of life that are due; what systemd cannot take now, the next time."""
        now_s, lines = asyncio.get_running_loop().time(), []
        headline = self.headline()
        text = f"{self._stopping}: {headline}" if self._stopping else headline
        if text != self._sent_status:
            lines.append(status(text))
        # Not before it is connected to the store: then its workers run, or it waits for other nodes.
        is_accepted = self._registered_s is not None and now_s - self._registered_s >= ANSWER_S
        is_up = self._is_up or self._runs or is_accepted
        if is_up and not self._is_up:
            lines.append(READY)
        is_alive_due = self.manager.watchdog_s is not None and now_s >= self._alive_due_s
        if is_alive_due:
            lines.append(ALIVE)
        # Our own time-outs bound the wait for the store, and that for workers to save and end; systemd is to bound
        # neither, as long as the loop turns.
        waits = (not is_up or self._stopping) and not self._hosting
        is_extended = waits and now_s >= self._extend_due_s
        if is_extended:
            lines.append(extend(EXTENSION_S))
        if lines and self.manager.notify(*lines):
            self._sent_status, self._is_up = text, is_up
            self._alive_due_s = now_s + self.manager.alive_every_s if is_alive_due else self._alive_due_s
            self._extend_due_s = now_s + EXTEND_EVERY_S if is_extended else self._extend_due_s
