"""Everything that observes one node's part in a run: its history and reports, goodput, connections, the status page."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from elastic_agent.agent import events
from elastic_agent.agent.reporting.goodput_recorder import GoodputRecorder
from elastic_agent.agent.reporting.run_observer import Observed, RunObserver
from elastic_agent.agent.reporting.start_facts import start_facts
from elastic_agent.agent.reporting.status_files import StatusFiles
from elastic_agent.agent.worker_group.connection_watch import ConnectionWatch
from elastic_agent.config.settings import Settings
from elastic_agent.monitoring.status import RunStatus
from elastic_agent.protocol import Outcome
from elastic_agent.rendezvous.backends.base import RendezvousBackend
from elastic_agent.rendezvous.reports import Reports
from elastic_agent.web.loop_source import LoopSource
from elastic_agent.web.server import StatusServer, open_status_page

from .supervisor import Supervisor

EXPLAINED_S = 11.0
"""How long the explanation may take when the run has failed."""

READ_S = 3.0
"""How long the store of a run that has failed stays for nodes that have not read the reports of the others yet."""

SAVED_S = 1.0
"""How long writing the last status may take otherwise: there is nothing to explain."""


class Observation:
    """The observers of one node's part in a run; opened and closed with it."""

    def __init__(
        self,
        settings: Settings,
        run_id: str,
        node_id: str,
        backend: RendezvousBackend,
        supervisor: Supervisor,
        publisher: events.Publisher,
        log_dir: str,
        *,
        goes_on: bool,
        remedy: Callable[[], str],
    ) -> None:
        """Observe from now on what ``publisher`` publishes about ``supervisor``; workers write to ``log_dir``.

        ``goes_on``: the run has begun before, so that earlier agents may have recorded some of its history;
        ``remedy``: gives what to do about a store that does not answer.
        """
        self._run_id = run_id
        self._publisher = publisher
        self._goodput = GoodputRecorder(lambda: supervisor.progress)
        self._observer = RunObserver(
            Observed(
                run_id=run_id,
                node_id=node_id,
                endpoint=lambda: backend.shown,
                reports=Reports(backend.connect_reports),
                files=StatusFiles(settings.state_dir, run_id, node_id),
                goes_on=goes_on,
                progress=lambda: supervisor.progress,
                log_dir=log_dir,
                facts=start_facts(settings.script_args, os.environ),
                goodput=lambda: self._goodput.goodput,
                report_hang=supervisor.hang,
                remedy=remedy,
            )
        )
        self._watch = ConnectionWatch(node_id, lambda: supervisor.world, publisher)
        publisher.subscribe(self._goodput.on_event, first=True)
        for one in self._subscribers:
            publisher.subscribe(one)
        self._address = settings.status_port
        self._secret = backend.secret
        self._page: StatusServer | None = None

    @property
    def _subscribers(self) -> tuple[Callable[[events.Event], None], ...]:
        return self._observer.on_event, self._watch.on_event

    def open_page(self) -> None:
        """Serve the status page from now on, if there is to be one."""
        source = LoopSource("the agent", lambda: (self._run_id,), lambda run_id: self._observer.status())
        self._page = open_status_page(self._address, source, self._secret)

    async def status(self) -> RunStatus:
        """The status of the run."""
        return await self._observer.status()

    async def settle(
        self, outcome: Outcome, reason: str, *, hosts_readers: bool, serves: Sequence[str]
    ) -> None:
        """Wait until the last failure is explained and the status is saved.

        Args:
            outcome: of this node's part in the run.
            reason: of this outcome.
            hosts_readers: whether other nodes read reports in a store that ends with this agent.
            serves: the nodes that cannot go on without the store of this agent.
        """
        has_failed = outcome is Outcome.FAILED
        left = reason if outcome not in (Outcome.FINISHED, Outcome.FAILED, Outcome.STOPPED) else ""
        await self._observer.settle(EXPLAINED_S if has_failed else SAVED_S, left, serves)
        if outcome is Outcome.FINISHED or has_failed:
            await self._observer.log_goodput()
        if has_failed and hosts_readers:
            await self._observer.others_have_read(READ_S)

    def close(self) -> None:
        """Observe no more."""
        self._publisher.unsubscribe(self._goodput.on_event)
        self._goodput.close()
        for one in self._subscribers:
            self._publisher.unsubscribe(one)
        self._watch.stop()
        self._observer.close()
        if self._page is not None:
            self._page.close()
