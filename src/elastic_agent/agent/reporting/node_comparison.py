"""Compares how the nodes of a run were started, and logs the differences on every node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_agent.diagnosis.differences import differences, member_facts, policy_facts
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Member, Phase, World, names
from elastic_agent.rendezvous.reports import RunReports
from elastic_agent.transport import Snapshot, TransportError

from .node_reports import NodeReports

COMPARE_AFTER_S = 3.0
"""After this time of waiting for other nodes, those that wait are compared; then after twice as long, and so on."""

FACTS_S = 10.0
"""The longest wait for the facts of the other nodes of the first world."""

SHOWN_DIFFERENCES = 8


@dataclass(eq=False, repr=False)
class NodeComparison:
    """Compares the nodes that wait for a world, and those of each world with other nodes than before."""

    reports: NodeReports
    """Of all nodes, with the plans so far."""

    def __post_init__(self) -> None:
        self._logged: set[str] = set()
        self._has_taken_part = False
        self._compared: set[str] = set()
        """The incarnations of the nodes of worlds so far."""
        self._wait_s = COMPARE_AFTER_S
        self._waiting: asyncio.Task[None] | None = None

    def on_plan(self) -> None:
        """Take note of a new plan in the log."""
        plan = self.reports.log.plan
        if plan is None:
            return
        is_idle = self._waiting is None or self._waiting.done()
        if plan.phase is Phase.FORMING and is_idle and not self._has_taken_part:
            self._waiting = self.reports.tasks.start(self._compare_waiting())
        world = plan.world if plan.phase is Phase.RUNNING else None
        if world is None:
            return
        self._has_taken_part |= world.seat_of(self.reports.incarnation) is not None
        fresh = {seat.incarnation for seat in world.seats} - self._compared
        if fresh:  # also without this node: a difference may be why there is no place for it
            self._compared |= fresh
            self.reports.tasks.start(self._compare_world(plan.generation, world))

    def stop(self) -> None:
        """Stop comparing nodes that wait."""
        if self._waiting is not None:
            self._waiting.cancel()

    async def _compare_waiting(self) -> None:
        """Compare the nodes that wait, from time to time: a difference may be why no world is formed."""
        while True:
            await asyncio.sleep(self._wait_s)
            self._wait_s *= 2
            plan = self.reports.log.plan
            if plan is None or plan.phase is not Phase.FORMING:
                return
            with contextlib.suppress(TransportError):
                known = await self.reports.store.read()
                self._tell(known, {})
                if plan.world is None:
                    own = known.view.snapshot.members.get(self.reports.incarnation)
                    others = await self.reports.store.read_waiting_runs()
                    self._log_lines([] if own is None else _waiting(own, others))

    async def _compare_world(self, generation: int, world: World) -> None:
        gathered = await self.reports.gather(generation, world, lambda _: True, FACTS_S)
        with contextlib.suppress(TransportError):
            known = await self.reports.store.read()
            # Its own, too: a spare node is not in the world.
            own = {self.reports.node_id: self.reports.start_facts}
            self._tell(known, own | {node: report.facts for node, report in gathered.items()})

    def _tell(self, known: RunReports, reported: Mapping[str, Mapping[str, str]]) -> None:
        plan = known.view.plan
        facts = {
            member.node_id: {**member_facts(member), **reported.get(member.node_id, {})}
            for member in _alive(known.view.snapshot)
        }
        found = differences(facts, policy_facts(plan.policy) if plan is not None else None)
        self._log_lines([f"nodes differ in {each.text}; {each.rule.remedy}" for each in found])

    def _log_lines(self, found: Sequence[str]) -> None:
        fresh = [line for line in found if line not in self._logged]
        self._logged.update(fresh)
        for line in fresh[:SHOWN_DIFFERENCES]:
            get_logger().warning(line)
        if len(fresh) > SHOWN_DIFFERENCES:
            hidden = len(fresh) - SHOWN_DIFFERENCES
            get_logger().warning(f"{hidden} more differences between nodes are not shown")


def _alive(snapshot: Snapshot) -> list[Member]:
    leases = snapshot.leases
    alive = [
        member for name, member in snapshot.members.items() if name in leases and not leases[name].revoked
    ]
    return sorted(alive, key=lambda member: (member.preferred_rank or 0, member.node_id))


def _waiting(own: Member, runs: Mapping[str, Snapshot]) -> list[str]:
    """Return a line for each of the runs that may have been meant to be this one."""
    lines: list[str] = []
    for run_id, snapshot in runs.items():
        nodes = _alive(snapshot)
        if not nodes:
            continue
        is_same = any(member.fingerprint.script == own.fingerprint.script for member in nodes)
        difference, remedy = (
            ("with the same script", "pass the same --rdzv-id on all machines")
            if is_same
            else (
                "with another script, or another version of it",
                "copy the same version of the script to all machines, or pass the same --rdzv-id",
            )
        )
        shown = names(f"{member.node_id} ({member.address})" for member in nodes)
        lines.append(
            f"run {run_id} of {shown} waits for nodes at the same endpoint, {difference}; if it is to be the same run, "
            f"{remedy}"
        )
    return lines
