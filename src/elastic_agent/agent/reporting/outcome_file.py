"""Tells `elastic_agent.launch`, which started this agent, how the agent's part ended."""

from __future__ import annotations

from pathlib import Path

from elastic_agent.agent import events
from elastic_agent.launch_outcome import FailedWorker, LaunchOutcome
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Phase, Plan, Seat, World
from elastic_agent.rendezvous.events import PlanSeen
from elastic_agent.workers.guard.client import Exited, Spawned


class OutcomeFile:
    """Follows the workers of this node, and writes the outcome when the agent's part is over."""

    def __init__(self, folder: Path) -> None:
        """Write nothing yet; ``folder``: of the launch."""
        self._folder = folder
        self._incarnation = ""
        self._seat: Seat | None = None
        """Of this node in the newest world."""
        self._generation = 0
        self._ranks = range(0)
        self._exits: list[Exited] = []
        self._stopping = 0

    def on_event(self, event: events.Event) -> None:
        """Follow the workers of this node."""
        match event:
            case events.AgentStarted(incarnation=incarnation) | events.Rejoining(incarnation=incarnation):
                self._incarnation = incarnation
            case PlanSeen(plan=Plan(phase=Phase.RUNNING, world=World() as world)):
                self._seat = world.seat_of(self._incarnation)
            case Spawned(generation=generation):
                seat = self._seat
                self._generation = generation
                self._ranks = range(seat.first_rank, seat.first_rank + seat.slots) if seat else range(0)
                self._exits = [exited for exited in self._exits if exited.generation == generation]
            case Exited(generation=generation) if event.returncode != 0 and generation > self._stopping:
                self._exits.append(event)
            case events.WorkersStopping(generation=generation):
                self._stopping = generation
            case events.AgentEnded(reason=reason):
                self._write(reason, started=True)
            case events.NotStarted(reason=reason):
                self._write(reason, started=False)

    def _write(self, reason: str, *, started: bool) -> None:
        failed = (
            FailedWorker(self._ranks[exited.slot], exited.slot, exited.pid, exited.returncode)
            for exited in self._exits
            if exited.generation == self._generation and exited.slot < len(self._ranks)
        )
        outcome = LaunchOutcome(started, reason, self._generation, tuple(self._ranks), tuple(failed))
        try:
            outcome.write(self._folder)
        except OSError as error:
            get_logger().warning("cannot tell elastic_agent.launch how the run ended", error=str(error))
