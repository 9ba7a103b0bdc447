"""Examines this machine when a run does not start, and logs what may keep it from starting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from elastic_agent.agent.events import Event
from elastic_agent.config.settings import Settings
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Phase
from elastic_agent.rendezvous.asyncio_runner import run_abandonable
from elastic_agent.rendezvous.events import PlanSeen
from elastic_agent.transport import StoreLostError

if TYPE_CHECKING:
    from elastic_agent.doctor.local import LocalResult
    from elastic_agent.doctor.request import Request

PATIENCE_S = 10.0
"""A run that has not started after this time may have a problem."""

PREPARATION_S = 10.0


class StartCheck:
    """One examination of this machine, as ``elastic-agent doctor --alone``, if no generation has started in time."""

    def __init__(
        self, settings: Settings, environ: Mapping[str, str], patience_s: float = PATIENCE_S
    ) -> None:
        """Begin to wait; in the event loop.

        Args:
            settings: those of the run.
            environ: the environment that workers would inherit.
            patience_s: how long a run may take to start, seconds.
        """
        self._settings = settings
        self._environ = dict(environ)
        self._patience_s = patience_s
        self._log = get_logger()
        self.task = asyncio.create_task(self._examine())
        """Ends with the examination, or is cancelled."""

    def on_event(self, event: Event) -> None:
        """A generation that has started needs no examination."""
        match event:
            case PlanSeen(plan=plan) if plan.phase is Phase.RUNNING or plan.world is not None:
                self.close()

    def close(self) -> None:
        """Wait no longer."""
        self.task.cancel()

    async def _examine(self) -> None:
        await asyncio.sleep(self._patience_s)
        try:
            examine_alone, request = await run_abandonable(self._prepared, PREPARATION_S)
        except StoreLostError:
            return  # the name lookups of the endpoint do not end: the waiting line tells
        except Exception as error:
            self._log.debug("this machine is not examined", reason=str(error))
            return
        local = await examine_alone(request)
        for one in local.findings:
            if one.severity.value == "error":
                self._log.warning(f"{one.cause}. Remedy: {one.remedy}", check=one.check)
        self._log.info(
            "to examine all machines of the run, run elastic-agent doctor with the same options on each of them"
        )

    def _prepared(self) -> tuple[Callable[[Request], Awaitable[LocalResult]], Request]:
        """In a thread: importing takes a while, and the endpoint's name may be looked up."""
        from elastic_agent.agent.doctor_request import doctor_request
        from elastic_agent.doctor.local import examine_alone

        return examine_alone, doctor_request(self._settings, self._environ)
