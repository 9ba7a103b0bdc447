"""Publishes the metrics and events of torchrun's agent, under its names, for handlers that were written for it.

torchrun measures methods of its agent and reports each poll of its workers. Here each name is published when the same
happens: a rendezvous is over when this node has a seat in the running world, and the state of the workers is published
when it changes. Names of methods that have no counterpart here are not published (docs/monitoring.md lists them).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

from torch.distributed.elastic.events.api import Event, EventSource, NodeState, RdzvEvent

from elastic_agent.agent import events
from elastic_agent.agent.worker_group.command import worker_command
from elastic_agent.agent.worker_group.environment import role_ranks
from elastic_agent.config.settings import Settings
from elastic_agent.protocol import Failure, Outcome, Phase, Plan, Seat, World
from elastic_agent.rendezvous.events import LeaseLost, PlanSeen, PrepareFailed, Registered, Renewed
from elastic_agent.workers.guard.client import Exited, Spawned

from .torch_handlers import TorchHandlers

AGENT = "SimpleElasticAgent"
LOCAL_AGENT = "LocalElasticAgent"
HANDLER = "dynamic_rendezvous.py:DynamicRendezvousHandler"
EXECUTOR = "dynamic_rendezvous.py:_DistributedRendezvousOpExecutor"
"""Where torchrun's names come from: its classes, and the file of its rendezvous."""

HANDLERS_PATIENCE_S = 2.0
"""How long the handlers may take with the last metrics and events at the end."""

IN_ORDER = (Outcome.FINISHED, Outcome.FAILED, Outcome.DRAINED, Outcome.STOPPED)
"""Outcomes of an agent that did its part; torchrun calls it a success also if the workers failed."""


class TorchEvents:
    """Subscribes to the agent's events; torch's handlers get what torchrun's agent would have published."""

    def __init__(self, settings: Settings, run_id: Callable[[], str]) -> None:
        """``run_id`` gives the run's id, once it is known.

        Raises:
            ValueError: there is no handler for events of this name.
        """
        self._handlers = TorchHandlers(settings.event_log_handler)
        self._settings = settings
        self._run_id = run_id
        self._incarnation = ""
        self._began_s: float | None = None
        """When the agent began to take part; times are of the monotonic clock."""
        self._plan: Plan | None = None
        self._world: World | None = None
        """The last one that this node had a seat in."""
        self._pids: dict[int, int] = {}
        self._exits: dict[int, Exited] = {}
        self._errors: dict[int, str] = {}
        """Of the workers of that world, by slot."""
        self._interrupted: set[int] = set()
        """Slots of workers that were ended by a signal which the agent received, too."""
        self._waits_since_s: float | None = None
        """Since when the node waits for its next world."""
        self._initializes_since_s = 0.0
        self._starts_since_s = 0.0
        self._stops_since_s: float | None = None
        self._restarts_since_s: float | None = None
        self._run_time_s = 0

    # -- the agent's events ---------------------------------------------------------------------

    def on_event(self, event: events.Event) -> None:
        """Publish what follows from it."""
        match event:
            case PlanSeen(plan=plan):
                self._plan_seen(plan)
            case Spawned():
                self._started(event)
            case Exited() | events.GenerationEnded() | events.WorkersInterrupted():
                self._take_note_of_end(event)
            case events.WorkersFailed(failure=failure):
                self._failed(failure)
            case events.WorkersSucceeded():
                self._put_state("succeeded")
            case events.WorkersStopping():
                self._stops_since_s = time.monotonic()
            case events.WorkersCleared():
                self._stopped()
            case _:
                self._session_event(event)

    def _session_event(self, event: events.Event) -> None:
        match event:
            case events.AgentStarted(incarnation=incarnation) | events.Rejoining(incarnation=incarnation):
                self._incarnation = incarnation
                if self._began_s is None:
                    self._began_s = self._waits_since_s = time.monotonic()
            case Registered():
                self._record_rendezvous(f"{EXECUTOR}._add_to_participants", "registered at the store")
            case Renewed():
                self._record_rendezvous(f"{EXECUTOR}._keep_alive", "renewed its lease")
            case LeaseLost(reason=reason):
                self._record_rendezvous(
                    f"{HANDLER}._keep_alive", f"lost its lease: {reason}", NodeState.FAILED
                )
            case PrepareFailed(failure=failure):
                self._record_rendezvous(f"{HANDLER}.next_rendezvous", failure.summary, NodeState.FAILED)

    # -- the rendezvous -------------------------------------------------------------------------

    def _plan_seen(self, plan: Plan) -> None:
        before, self._plan = self._plan, plan
        is_new = before is None or (before.phase, before.generation) != (plan.phase, plan.generation)
        if plan.phase is Phase.FORMING and is_new:
            if self._waits_since_s is None and self._stops_since_s is None:
                self._waits_since_s = time.monotonic()
            self._record_rendezvous(
                f"{HANDLER}.next_rendezvous", f"attempts to join generation {plan.generation}"
            )
        elif plan.phase is Phase.RUNNING and plan.world is not None:
            seat = plan.world.seat_of(self._incarnation)
            known = self._world
            if seat is not None and (
                known is None
                or known.generation != plan.generation
                or known.seat_of(self._incarnation) is None
            ):
                self._joined(plan.world, seat)
        elif plan.is_terminal and is_new:
            self._record_rendezvous(
                f"{EXECUTOR}._mark_rendezvous_closed", f"the run {plan.phase.value}", NodeState.SUCCEEDED
            )
            self._record_rendezvous(f"{HANDLER}._close", plan.reason, NodeState.SUCCEEDED)

    def _joined(self, world: World, seat: Seat) -> None:
        """The node has a seat in a running world: torchrun's rendezvous and assignment of ranks are over."""
        now_s = time.monotonic()
        since_s = self._waits_since_s if self._waits_since_s is not None else now_s
        self._world, self._waits_since_s = world, None
        self._initializes_since_s, self._starts_since_s = since_s, now_s
        self._pids, self._exits, self._errors, self._interrupted = {}, {}, {}, set()
        rank = world.node_rank(self._incarnation)
        self._record_rendezvous(
            f"{EXECUTOR}._mark_rendezvous_complete",
            f"completed generation {world.generation}",
            NodeState.SUCCEEDED,
        )
        self._record_rendezvous(
            f"{HANDLER}.next_rendezvous",
            f"has joined generation {world.generation} as rank {rank} in a world of {len(world.seats)} nodes",
            rank=rank,
        )
        self._record("RENDEZVOUS", duration_ms=1e3 * (now_s - since_s))
        self._put_duration(f"{AGENT}._assign_worker_ranks", 0.0)
        self._record("ASSIGN_WORKER_RANKS", duration_ms=0.0)  # they are part of the plan
        self._put_duration(f"{AGENT}._rendezvous", now_s - since_s)

    # -- workers --------------------------------------------------------------------------------

    def _started(self, event: Spawned) -> None:
        if self._world is None or event.generation != self._world.generation:
            return
        now_s = time.monotonic()
        self._pids = dict(event.pids)
        self._put_duration(f"{LOCAL_AGENT}._start_workers", now_s - self._starts_since_s)
        for slot in sorted(self._pids):
            self._record("START", slot=slot)
        self._put_duration(f"{AGENT}._initialize_workers", now_s - self._initializes_since_s)
        if self._restarts_since_s is not None:
            self._put_duration(f"{AGENT}._restart_workers", now_s - self._restarts_since_s)
            self._restarts_since_s = None
        self._put_state("healthy")

    def _take_note_of_end(self, event: Exited | events.GenerationEnded | events.WorkersInterrupted) -> None:
        if self._world is None or event.generation != self._world.generation:
            return
        match event:
            case Exited(slot=slot):
                self._exits[slot] = event
            case events.GenerationEnded(workers=workers):
                failures = {one.slot: one.failure for one in workers if one.failure is not None}
                for slot, one in failures.items():
                    self._errors[slot] = _raw_error(one.message or "<NONE>", one.tail)
            case events.WorkersInterrupted(failure=Failure(slot=int(slot))):
                self._interrupted.add(slot)

    def _failed(self, failure: Failure) -> None:
        if failure.slot is not None:
            self._errors.setdefault(failure.slot, _raw_error(failure.summary, failure.tail))
        self._put_state("failed")
        self._record_rendezvous(f"{EXECUTOR}._remove_from_participants", failure.summary)

    def _stopped(self) -> None:
        now_s = time.monotonic()
        if self._stops_since_s is not None:
            self._put_duration(f"{LOCAL_AGENT}._stop_workers", now_s - self._stops_since_s)
            self._restarts_since_s, self._stops_since_s = self._stops_since_s, None
        self._waits_since_s = now_s

    # -- the end --------------------------------------------------------------------------------

    def ended(self, outcome: Outcome | None, reason: str) -> None:
        """Publish how the agent's part ended; ``outcome`` None: it was terminated."""
        now_s = time.monotonic()
        took_s = now_s - (self._began_s if self._began_s is not None else now_s)
        self._run_time_s = int(took_s)
        if outcome in (Outcome.FINISHED, Outcome.FAILED):
            self._put_outcome(is_failed=outcome is Outcome.FAILED)
        if outcome is not None:
            for slot in sorted(self._pids):
                self._record_worker_end(slot, outcome)
        in_order = outcome in IN_ORDER
        self._handlers.put_metric(f"{AGENT}.run.{'success' if in_order else 'failure'}", 1)
        self._handlers.put_metric(f"{AGENT}.run.duration.ms", int(took_s * 1e3))
        self._record("SUCCEEDED" if in_order else "FAILED", raw_error=None if in_order else reason)

    def finish(self) -> None:
        """Wait until the handlers have received everything, but not for long."""
        self._handlers.finish(HANDLERS_PATIENCE_S)

    def _put_outcome(self, *, is_failed: bool) -> None:
        restarts, limit = self._restarts, self._settings.max_restarts
        flakiness = 100.0 if is_failed else 100.0 - 100.0 * (limit - restarts + 1) / (limit + 1)
        self._put("flakiness", int(flakiness))
        self._put("run_total", 1)
        self._put("run_success_with_retries", int(not is_failed and restarts > 0))
        self._put("run_success_no_retries", int(not is_failed and restarts == 0))
        self._put("run_failed_with_retries", int(is_failed and restarts > 0))
        self._put("run_failed_no_retries", int(is_failed and restarts == 0))

    def _record_worker_end(self, slot: int, outcome: Outcome) -> None:
        end = self._exits.get(slot)
        has_failed = (
            end is not None and end.returncode != 0 and not end.stopping and slot not in self._interrupted
        )
        if outcome is Outcome.FINISHED or (
            end is not None and end.returncode == 0 and outcome in IN_ORDER[2:]
        ):
            self._record("SUCCEEDED", slot=slot)
        elif end is not None and has_failed:
            error = self._errors.get(slot, _raw_error("<NONE>", ""))
            self._record("FAILED", slot=slot, raw_error=error, exit_code=end.returncode, pid=end.pid)
        else:
            self._record("TERMINATED", slot=slot)

    # -- torch's records ------------------------------------------------------------------------

    @property
    def _restarts(self) -> int:
        """Restarts that count against the budget now."""
        plan = self._plan
        return max(0, plan.charged - plan.budget.forgiven) if plan is not None else 0

    def _put(self, name: str, value: int) -> None:
        self._handlers.put_metric(f"workers.{self._settings.role}.{name}", value)

    def _put_state(self, state: str) -> None:
        self._put("remaining_restarts", max(0, self._settings.max_restarts - self._restarts))
        self._put(state, 1)

    def _put_duration(self, method: str, took_s: float) -> None:
        self._handlers.put_metric(f"{method}.success", 1)
        self._handlers.put_metric(f"{method}.duration.ms", int(took_s * 1e3))

    def _record(
        self,
        state: str,
        *,
        slot: int | None = None,
        duration_ms: float | None = None,
        raw_error: str | None = None,
        exit_code: int | None = None,
        pid: int | None = None,
    ) -> None:
        """An event of the agent, or of the worker in this slot, with the fields and types that torchrun gives it."""
        settings, world = self._settings, self._world
        seat = world.seat_of(self._incarnation) if world is not None else None
        detail: dict[str, object] = {
            "group_world_size": len(world.seats) if world is not None else None,
            "entry_point": worker_command(settings, 0)[0],
        }
        rank: int | None = None
        if slot is not None and world is not None and seat is not None:
            rank = seat.first_rank + slot
            first, size = role_ranks(world, seat)
            # Lists of one value, as torchrun has it.
            detail.update(local_rank=[slot], role_rank=[first + slot], role_world_size=[size])
            detail.update(exit_code=[exit_code], worker_pid=[pid])
        metadata: dict[str, str | int | float | bool | None] = {
            "run_id": self._run_id(),
            "global_rank": rank,
            "group_rank": world.node_rank(self._incarnation)
            if world is not None and seat is not None
            else None,
            "worker_id": str(self._pids[slot]) if slot in self._pids else None,
            "role": settings.role,
            "hostname": "",  # it is determined in the thread
            "state": state,
            "total_run_time": self._run_time_s,
            "rdzv_backend": settings.rdzv_backend,
            "raw_error": raw_error,
            "metadata": json.dumps(detail),
            "agent_restarts": self._restarts,
            "duration_ms": duration_ms,
        }
        source = EventSource.AGENT if slot is None else EventSource.WORKER
        name = f"torchelastic.worker.status.{state}"
        self._handlers.record(Event(name, source, int(time.time() * 1e3), metadata))

    def _record_rendezvous(
        self, name: str, message: str, state: NodeState = NodeState.RUNNING, rank: int | None = None
    ) -> None:
        if self._handlers.records_rendezvous:
            event = RdzvEvent(name, self._run_id(), message, "", os.getpid(), state, rank=rank, local_id=0)
            self._handlers.record_rendezvous(event)


def _raw_error(message: str, tail: str) -> str:
    """An error as torch's error file has it."""
    if not tail:
        return json.dumps({"message": message})
    extra = {"py_callstack": tail, "timestamp": str(int(time.time()))}
    return json.dumps({"message": {"message": message, "extraInfo": extra}})
