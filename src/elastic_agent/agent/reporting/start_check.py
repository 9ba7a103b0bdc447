"""Examines this machine at the start of a run, and logs what may keep the run from starting.

The script's source is looked at in every start, which takes milliseconds; the endpoint's name only if no generation
has started after some seconds, or one of this node alone at an endpoint on loopback. ``elastic-agent doctor`` looks at
everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_agent.agent.events import Event, LeaveSignalled, RunAgreed
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.config.settings import Settings
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Phase
from elastic_agent.rendezvous.events import PlanSeen
from elastic_agent.transport import StoreLostError, is_loopback_name, run_abandonable
from elastic_agent.values import Endpoint

if TYPE_CHECKING:
    from elastic_agent.agent.preflight import Finding

PATIENCE_S = 10.0
"""A run that has not started after this time may have a problem, and so may a node that is alone in it."""
PREPARATION_S = 10.0
LONGEST_SCRIPT = 2**20
DOCTORS_PROBE = "elastic_agent.doctor.probe"
"""The worker of the doctor's own run, which needs no advice to start it."""


@dataclass(eq=False, repr=False)
class StartCheck:
    """Examines this machine once, for a run of several nodes. Begins when it is made, in the event loop."""

    settings: Settings
    store_problem: Callable[[], str]
    """Gives why the store does not answer; empty: it does."""
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        several = self.settings.nnodes.most > 1
        self._is_doctor = self.settings.script == DOCTORS_PROBE
        self._run_id = self.settings.rdzv_id
        self._is_alone = False
        """The newest world is of this node, and the endpoint may be another machine on every machine."""
        self._tasks = BackgroundTasks()
        endpoint = self.settings.rdzv_endpoint if several else None
        self._is_loopback = endpoint is not None and all(
            is_loopback_name(each.host) for each in endpoint.members
        )
        self._waiting = None if endpoint is None else self._tasks.start(self._wait(endpoint, self.patience_s))
        if several and not (self.settings.runs_program or self.settings.runs_module):
            self._tasks.start(self._tell(lambda: _script_findings(self.settings.script)))

    def on_event(self, event: Event) -> None:
        """Stop the examination when the run starts or ends, unless this node may be alone in it by mistake."""
        match event:
            case PlanSeen(plan=plan) if plan.phase is not Phase.FORMING or plan.world is not None:
                world = plan.world
                self._is_alone = self._is_loopback and world is not None and len(world.seats) == 1
                if self._waiting is not None and not self._is_alone:
                    self._waiting.cancel()
            case LeaveSignalled():
                self.close()
            case RunAgreed(run_id=run_id):
                self._run_id = run_id

    def close(self) -> None:
        """Examine no more."""
        self._tasks.cancel()

    async def _wait(self, endpoint: Endpoint, patience_s: float) -> None:
        """Check the endpoint of a run that does not start, or starts with this node alone."""
        await asyncio.sleep(patience_s)
        if not self.store_problem():
            is_meant = await self._has_another_agent()
            if is_meant and self._is_alone:
                return
            await self._tell(lambda: _endpoint_findings(endpoint, may_be_loopback=is_meant))
        if not self._is_doctor:
            get_logger().info(
                "to examine all machines of the run, run elastic-agent doctor with the same options on each of them"
            )

    async def _has_another_agent(self) -> bool:
        """Return whether another agent of this machine takes part in the run: then a loopback endpoint is right."""
        from elastic_agent.agent.control.socket import agents_here, describe_all

        others = [agent for agent in agents_here() if agent.pid != os.getpid()]
        return any(agent.run_id == self._run_id for agent in (await describe_all(others)).values())

    async def _tell(self, check: Callable[[], list[Finding]]) -> None:
        """Log what a check finds; nothing where a file or a name cannot be read: workers and doctor report that."""
        with contextlib.suppress(StoreLostError, OSError):
            for finding in await run_abandonable(check, PREPARATION_S):
                get_logger().warning(f"{finding.cause}. Remedy: {finding.remedy}", check=finding.check)


def _endpoint_findings(endpoint: Endpoint, *, may_be_loopback: bool) -> list[Finding]:
    from elastic_agent.agent.preflight import LOOPBACK, check_endpoint

    return [found for found in check_endpoint(endpoint) if not (may_be_loopback and found.check == LOOPBACK)]


def _script_findings(script: str) -> list[Finding]:
    with open(script, "rb") as file:
        source = file.read(LONGEST_SCRIPT)
    if b"MASTER_" not in source:
        return []
    from elastic_agent.agent.preflight import check_addresses

    return list(check_addresses(source, os.path.basename(script)))
