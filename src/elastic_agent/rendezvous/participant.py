"""A node's part in a run, without I/O: its state machine, its session with the store, and the action interpreter.

    session ──events──▶ Participant.take_in ──▶ Node ──actions──▶ Participant.perform ──▶ session, workers, reporter

The same for all kinds of workers: those of an agent, those of a stock torchrun, or simulated ones. The owner
reports to the node what happens to the workers, and passes the node's actions to :meth:`Participant.perform`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elastic_agent.protocol import (
    Action,
    Announce,
    Depart,
    Node,
    Notice,
    Notify,
    Prepare,
    Rejoin,
    RequestStop,
    StartWorkers,
    StopWorkers,
    World,
)

from . import events
from .session import Session


@dataclass(frozen=True)
class Workers:
    """The port to this node's workers. Nothing here blocks; the owner reports the results to the node."""

    set_deadline: Callable[[float | None], None]
    """No worker may run after this moment (CLOCK_BOOTTIME); None: none may run."""
    start: Callable[[World], None]
    stop: Callable[[StopWorkers], None]
    notify: Callable[[Notice], None]


@dataclass(frozen=True)
class Reporter:
    """The port to what shows or records this node's steps."""

    announced: Callable[[Announce], None]
    rejoins: Callable[[str, str], None]
    """The new incarnation, and why; it is not registered yet."""
    departs: Callable[[Depart], None]
    """The node's part is over."""


class Participant:
    """One node that takes part in a run."""

    def __init__(
        self, session: Session, workers: Workers, reporter: Reporter, new_incarnation: Callable[[], str]
    ) -> None:
        """``session``: with the run history; its owner passes every event of it to :meth:`take_in`."""
        self.node = Node(session.member.incarnation, session.history)
        self._session = session
        self._workers = workers
        self._reporter = reporter
        self._new_incarnation = new_incarnation

    def take_in(self, event: events.SessionEvent) -> None:
        """Handle an event of the session."""
        match event:
            case events.Connected(replaced=True):
                self.perform(self.node.store_replaced())
            case events.Disconnected():
                self.perform(self.node.stop_lingering())  # the store's host has ended too
            case events.Registered(deadline_s=deadline_s) | events.Renewed(deadline_s=deadline_s):
                self._workers.set_deadline(deadline_s)
            case events.LeaseLost(reason=reason):
                self.perform(self.node.lease_lost(reason))
            case events.PlanSeen(plan=plan):
                self.perform(self.node.plan_changed(plan))
            case events.Prepared(generation=generation):
                self.perform(self.node.prepared(generation))
            case events.PrepareFailed(generation=generation, failure=failure):
                self.perform(self.node.prepare_failed(generation, failure))

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out the node's actions, in order."""
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Announce():
                self._session.announce(action)
                self._reporter.announced(action)
            case RequestStop(stop_request=stop_request):
                self._session.request_stop(stop_request)
            case Notify(notice=notice):
                self._workers.notify(notice)
            case Prepare(world=world):
                self._session.prepare(world)
            case StartWorkers(world=world):
                self._workers.start(world)
            case StopWorkers():
                self._workers.stop(action)
            case Rejoin(reason=reason):
                self._rejoin(reason)
            case Depart():
                self._reporter.departs(action)

    def _rejoin(self, reason: str) -> None:
        self._workers.set_deadline(None)
        incarnation = self._new_incarnation()
        self._reporter.rejoins(incarnation, reason)
        self._session.rejoin(incarnation)
        self.perform(self.node.rejoined(incarnation))
