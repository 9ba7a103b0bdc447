"""The event log: one JSON object per event and line, for tests and post-mortems."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from elastic_agent.agent import events
from elastic_agent.linux import boottime_s
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Announce, Depart, Phase, Plan
from elastic_agent.rendezvous.events import Connected, LeaseLost, PlanSeen, Registered
from elastic_agent.workers.guard.client import (
    Cold,
    Exited,
    Fenced,
    GuardLost,
    Spawned,
    SpawnerDied,
    Stopped,
    Warm,
)

_RECORDS: dict[type, tuple[str, ...]] = {
    events.AgentStarted: ("agent_started", "incarnation", "pid", "slots"),
    events.NotStarted: ("not_started", "reason"),
    events.AgentEnded: ("agent_ended", "outcome", "reason"),
    events.Requeued: ("requeued", "failed", "words"),
    events.Rejoining: ("rejoin", "incarnation"),
    events.StopRequested: ("stop", "cause", "left_s", "reason"),
    events.WorkersStopping: ("stopping", "generation", "reason", "grace"),
    Connected: ("connected", "store_id", "replaced"),
    Registered: ("registered", "incarnation"),
    LeaseLost: ("lease_lost", "reason"),
    Depart: ("depart", "outcome", "reason"),
    Spawned: ("workers_started", "generation", "pids"),
    Stopped: ("workers_stopped", "generation", "unkillable"),
    Fenced: ("fenced", "generation", "late_s"),
    Cold: ("workers_cold", "reason"),
    SpawnerDied: ("spawner_died", "how"),
    GuardLost: ("guard_lost", "returncode"),
}
"""Name and fields of the records that have the names of the event's attributes."""


class EventLog:
    """Appends events to a file with one write each, so that several agents may share it."""

    def __init__(self, path: Path | None, **context: Any) -> None:
        """Open the file; ``path`` None: record nothing; ``context`` goes into every line.

        Raises:
            OSError: the file cannot be opened for writing.
        """
        self._context = context
        self._handle: int | None = None
        self._warned = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The loop must not wait for the reader of a FIFO, neither here nor when it writes.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            self._handle = os.open(path, flags, 0o644)

    def bind(self, **context: Any) -> None:
        """Add to what goes into every line from now on."""
        self._context.update(context)

    def on_event(self, event: events.Event) -> None:
        """Record it, if it is one of those that are recorded."""
        match event:
            case PlanSeen(plan=plan):
                self._plan(plan)
            case Announce():
                handles_notices = {"handles_notices": True} if event.handles_notices else {}
                self.write("state", state=event.state, generation=event.generation, **handles_notices)
            case events.DrainRequested(node=node, reason=reason):
                self.write("drain", **({"node": node} if node is not None else {}), reason=reason)
            case events.NoticeGiven(generation=generation, notice=notice, workers=workers) if (
                workers.is_delivered
            ):
                fields = {name: getattr(notice, name) for name in ("serial", "cause", "left_s", "ends")}
                self.write("notice", generation=generation, **fields)
            case Exited():
                fields = {name: getattr(event, name) for name in ("generation", "slot", "pid", "returncode")}
                self.write("worker_exited", **fields, exited_boottime_s=event.at_boottime_s)
            case Warm(ready_s=ready_s, modules=modules):
                self.write("spawner_ready", import_s=ready_s, modules=modules)
            case _ if (record := _RECORDS.get(type(event))) is not None:
                name, *attributes = record
                self.write(name, **{attribute: getattr(event, attribute) for attribute in attributes})

    def _plan(self, plan: Plan) -> None:
        world = plan.world if plan.phase is Phase.RUNNING else None
        self.write(
            "plan",
            version=plan.version,
            phase=plan.phase,
            generation=plan.generation,
            reason=plan.reason,
            charged=plan.charged,
            world=[[seat.node_id, seat.incarnation, seat.slots, seat.first_rank] for seat in world.seats]
            if world is not None
            else None,
        )

    def write(self, event: str, **details: Any) -> None:
        """Write an event with CLOCK_BOOTTIME and the time of day; it is lost where it cannot be written (disk full)."""
        if self._handle is None:
            return
        line = {"event": event, "boottime_s": boottime_s(), "time_s": time.time(), **self._context, **details}
        try:
            os.write(self._handle, (json.dumps(line, default=str) + "\n").encode())
        except OSError as error:  # the run matters more than its record
            if not self._warned:
                self._warned = True
                get_logger().warning(
                    "cannot write the event journal; some events are missing from it", error=str(error)
                )

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
