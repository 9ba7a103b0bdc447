"""Examines this machine at the start of a run, and logs what may keep the run from starting.

The script's source is looked at in every start, which takes milliseconds; the endpoint's name only if no generation
has started after some seconds, or this node starts alone. ``elastic-agent doctor`` looks at everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from elastic_agent.agent.events import Event, LeaveSignalled, RunAgreed
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.config.settings import Settings
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Phase
from elastic_agent.rendezvous.events import Connected, Disconnected, PlanSeen, Unusable
from elastic_agent.transport import (
    Obstacle,
    StoreLostError,
    is_loopback_name,
    run_abandonable,
)
from elastic_agent.values import Endpoint

if TYPE_CHECKING:
    from elastic_agent.doctor.findings import Finding

PATIENCE_S = 10.0
"""A run that has not started after this time may have a problem."""

PREPARATION_S = 10.0

ALONE_S = 5.0
"""After this time, another agent of this machine would have joined a run whose endpoint is named as loopback."""

LOOPBACK = "loopback-endpoint"
"""A finding of the doctor's: it cannot know whether all agents run on one machine."""

_HINTS = (b"MASTER_ADDR", b"MASTER_PORT")
"""A script without any of these is not parsed."""

LONGEST_SCRIPT = 2**20


class StartCheck:
    """Examines this machine once."""

    def __init__(self, settings: Settings, patience_s: float = PATIENCE_S) -> None:
        """Begin; in the event loop.

        Args:
            settings: those of the run.
            patience_s: how long a run may take to start, seconds.
        """
        self._settings = settings
        self._patience_s = patience_s
        self._log = get_logger()
        self._problem = ""
        """Why the store does not answer."""
        self._obstacle: Obstacle | None = None
        self._run_id = settings.rdzv_id
        self._nodes = 0
        """Of the newest world; 0: there was none yet."""
        self._tasks = BackgroundTasks()
        self.task = self._tasks.start(self._check_endpoint())
        """For a run that does not start; cancelled when it does."""
        if settings.nnodes.most > 1 and not (settings.runs_program or settings.runs_module):
            self._tasks.start(self._check_script(settings.script))

    def on_event(self, event: Event) -> None:
        """Stop the examination when the run starts or ends, unless this node may be alone in it by mistake."""
        match event:
            case PlanSeen(plan=plan) if plan.phase is not Phase.FORMING or plan.world is not None:
                self.task.cancel()
                self._world_formed(len(plan.world.seats) if plan.world is not None else 0)
            case LeaveSignalled():
                self.close()
            case RunAgreed(run_id=run_id):
                self._run_id, self._problem, self._obstacle = run_id, "", None
            case Connected():
                self._problem, self._obstacle = "", None
            case Disconnected(reason=reason, obstacle=obstacle):
                self._problem, self._obstacle = reason, obstacle
            case Unusable(reason=reason):
                self._problem, self._obstacle = reason, None

    def close(self) -> None:
        """Examine no more."""
        self._tasks.cancel()

    # -- at every start -------------------------------------------------------------------------

    async def _check_script(self, script: str) -> None:
        """Log what the script does that agents do for it, unless it cannot be read: the workers report that."""
        with contextlib.suppress(StoreLostError, OSError):
            self._tell(await run_abandonable(lambda: _script_findings(script), PREPARATION_S))

    # -- if the run starts on this node alone ---------------------------------------------------

    def _world_formed(self, nodes: int) -> None:
        before, self._nodes = self._nodes, nodes
        endpoint = self._settings.rdzv_endpoint
        if before or not nodes or endpoint is None or self._settings.nnodes.most < 2:
            return
        if all(is_loopback_name(member.host) for member in endpoint.members):
            self._tasks.start(self._check_alone(endpoint))

    async def _check_alone(self, endpoint: Endpoint) -> None:
        """Check whether the agents of other machines may each train alone, because the endpoint means themselves."""
        await asyncio.sleep(min(ALONE_S, self._patience_s))
        if self._nodes <= 1:
            await self._tell_of(endpoint)

    # -- if the run does not start --------------------------------------------------------------

    async def _check_endpoint(self) -> None:
        await asyncio.sleep(self._patience_s)
        endpoint = self._settings.rdzv_endpoint
        if endpoint is None or self._settings.nnodes.most < 2:
            return
        await self._tell_of(endpoint)
        self._log.info(
            "to examine all machines of the run, run elastic-agent doctor with the same options on each of them"
        )

    async def _tell_of(self, endpoint: Endpoint) -> None:
        """Report an endpoint that means another machine here than elsewhere, or none, unless that was told."""
        if self._obstacle is Obstacle.UNKNOWN_NAME:
            return
        with contextlib.suppress(StoreLostError):  # a name server that does not answer: doctor looks into it
            found = await run_abandonable(lambda: _endpoint_findings(endpoint), PREPARATION_S)
            errors = [finding for finding in found if finding.severity == "error"]
            if any(finding.check == LOOPBACK for finding in errors) and await self._loopback_is_meant():
                errors = [finding for finding in errors if finding.check != LOOPBACK]
            self._tell(errors)

    async def _loopback_is_meant(self) -> bool:
        """Return whether a loopback endpoint is right, or not what keeps the run from starting."""
        if self._problem:  # this machine's port is not free for the store
            return True
        from elastic_agent.agent.control.socket import agents_here, describe_all

        others = [agent for agent in agents_here() if agent.pid != os.getpid()]
        return any(agent.run_id == self._run_id for agent in (await describe_all(others)).values())

    def _tell(self, found: Iterable[Finding]) -> None:
        for finding in found:
            self._log.warning(f"{finding.cause}. Remedy: {finding.remedy}", check=finding.check)


def _script_findings(script: str) -> list[Finding]:
    with open(script, "rb") as file:
        source = file.read(LONGEST_SCRIPT)
    if not any(hint in source for hint in _HINTS):
        return []
    from elastic_agent.doctor.script import check_addresses

    return list(check_addresses(source, os.path.basename(script)))


def _endpoint_findings(endpoint: Endpoint) -> list[Finding]:
    from elastic_agent.doctor.network import check_endpoint

    return list(check_endpoint(endpoint))
