"""A node's part in a run, without I/O: its state machine, its session with the store, and the action interpreter.

    session ──events──▶ Participant.take_in ──▶ Node ──actions──▶ Participant.perform ──▶ session, owner

The same for all kinds of workers: those of an agent, those of a stock torchrun, or simulated ones. The owner
reports to the node what happens to the workers, and passes the node's actions to :meth:`Participant.perform`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elastic_agent.protocol import (
    Action,
    Announce,
    Cause,
    Depart,
    Node,
    Notice,
    Notify,
    Prepare,
    Rejoin,
    RequestStop,
    StartWorkers,
    StopRequest,
    StopWorkers,
    WarmUp,
    World,
)

from . import events
from .session import Session

ANSWER_PATIENCE_S = 2.0
"""The time beyond the workers' for which this node waits for the coordinator's answer before it leaves without.

A node without workers stays so long in any case: a signal to all nodes reaches them at slightly different times.
"""


@dataclass(frozen=True)
class Owner:
    """The port to this node's workers, and to what shows or records its steps.

    Nothing here blocks; the owner reports to the node what happens to the workers.
    """

    set_deadline: Callable[[float | None], None]
    """No worker may run after this moment (CLOCK_BOOTTIME); None: none may run."""
    warm_up: Callable[[], None]
    start: Callable[[World], None]
    stop: Callable[[StopWorkers], None]
    notify: Callable[[Notice], None]
    departs: Callable[[Depart], None]
    """The node's part is over."""
    rejoins: Callable[[str, str], None] = lambda incarnation, reason: None
    """The new incarnation, and why; it is not registered yet."""
    announced: Callable[[Announce], None] = lambda announced: None
    handles_notices: Callable[[], bool] = lambda: False
    """Returns whether workers that run now handle notices."""
    call_later: Callable[[float, Callable[[], None]], object] = lambda after_s, act: None
    """Calls a function after a number of seconds; for the requests to leave and to stop."""


@dataclass(eq=False, repr=False)
class Participant:
    """One node that takes part in a run."""

    session: Session
    """With the run history; its owner passes every event of it to :meth:`take_in`."""
    owner: Owner
    new_incarnation: Callable[[], str]

    def __post_init__(self) -> None:
        member = self.session.member
        self.node = Node(member.incarnation, self.session.history, warms_up=member.warms_up)

    def take_in(self, event: events.SessionEvent) -> None:
        """Handle an event of the session."""
        match event:
            case events.Connected(replaced=True):
                self.perform(self.node.store_replaced())
            case events.Disconnected():
                self.perform(self.node.stop_lingering())  # the store's host has ended too
            case events.Registered(deadline_s=deadline_s):
                self.owner.set_deadline(deadline_s)
                self.perform(self.node.registered())
            case events.Renewed(deadline_s=deadline_s):
                self.owner.set_deadline(deadline_s)
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
                self.session.announce(action)
                self.owner.announced(action)
            case RequestStop(stop_request=stop_request):
                self.session.request_stop(stop_request)
            case Notify(notice=notice):
                self.owner.notify(notice)
            case Prepare(world=world):
                self.session.prepare(world)
            case WarmUp():
                self.owner.warm_up()
            case StartWorkers(world=world):
                self.owner.start(world)
            case StopWorkers():
                self.owner.stop(action)
            case Rejoin(reason=reason):
                self._rejoin(reason)
            case Depart():
                self.owner.departs(action)

    def _rejoin(self, reason: str) -> None:
        self.owner.set_deadline(None)
        incarnation = self.new_incarnation()
        self.owner.rejoins(incarnation, reason)
        self.session.rejoin(incarnation)
        self.perform(self.node.rejoined(incarnation))

    # -- requests by signals, commands and the scheduler ------------------------------------------

    def leave(self, reason: str, left_s: float) -> float:
        """Have this node leave after its workers and all others have saved, for which they get this much time.

        Returns:
            For how many seconds the coordinator's answer is awaited at most.
        """
        node_id = self.session.member.node_id
        self.perform(self.node.stop_lingering())
        stop_request = self._new(Cause.DRAIN, left_s, f"{node_id} leaves ({reason})", node_id)
        self.perform(self.node.drain(reason, stop_request))
        patience_s = left_s + ANSWER_PATIENCE_S if self.owner.handles_notices() else ANSWER_PATIENCE_S
        self._in_the_end(patience_s, self.node.leave_now)
        return patience_s

    def remove(self, node_id: str, left_s: float, reason: str) -> StopRequest:
        """Have another node leave."""
        stop_request = self._new(Cause.DRAIN, left_s, reason, node_id)
        self.perform(self.node.request_stop(stop_request))
        return stop_request

    def end_run(self, cause: Cause, left_s: float, reason: str) -> StopRequest:
        """Have the whole run end after all workers have saved."""
        stop_request = self._new(cause, left_s, reason, None)
        self.perform(self.node.request_stop(stop_request))
        self._in_the_end(left_s + ANSWER_PATIENCE_S, lambda: self.node.drain(reason))
        return stop_request

    def _new(self, cause: Cause, left_s: float, reason: str, leaver: str | None) -> StopRequest:
        # They may have begun to since the last check; the coordinator has to know it now.
        if self.owner.handles_notices():
            self.perform(self.node.handles_notices(self.node.generation))
        return StopRequest(self.node.next_stop_request, cause, left_s, reason[:512], leaver)

    def _in_the_end(self, after_s: float, act: Callable[[], Iterable[Action]]) -> None:
        """Do, at the time given, what has not been done by then."""
        self.owner.call_later(after_s, lambda: self.perform(act()))
