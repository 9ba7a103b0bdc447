"""The parts of this node that all steps of its part in a run work with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path

import msgspec

from elastic_agent.agent import events
from elastic_agent.agent.reporting.console import ConsoleReporter
from elastic_agent.agent.reporting.event_log import EventLog
from elastic_agent.agent.reporting.log_lines import log_event
from elastic_agent.agent.reporting.outcome_file import OutcomeFile
from elastic_agent.agent.slurm.job import SlurmJob
from elastic_agent.agent.worker_group.command import job_of
from elastic_agent.agent.worker_group.factory import WorkerFactory
from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.agent.worker_group.warm_start import Guards, is_warm
from elastic_agent.config.settings import Settings
from elastic_agent.logs import bind_context
from elastic_agent.protocol import Job, Policy
from elastic_agent.rendezvous.backends import RendezvousBackend
from elastic_agent.worker_variables import LAUNCH_FOLDER

from .signals import SignalDesk


@dataclass(eq=False, repr=False)
class LocalNode:
    """This node, before it has a run and an id, and after; with what shows and records its events."""

    settings: Settings
    slots: int
    """The number of workers that it runs."""
    backend: RendezvousBackend
    guards: Guards
    workers: WorkerFactory
    event_log: EventLog
    stop_signals: InitVar[StopSignals]
    """Those that came since this process began."""

    def __post_init__(self, stop_signals: StopSignals) -> None:
        self.node_id = ""
        """Of this node in the run; empty before it is known."""
        self.scheduled = scheduled = SlurmJob.from_environment(os.environ)
        """The Slurm job that this agent is a task of, if it is."""
        self.publish = events.Publisher(log_event, self.event_log.on_event)
        if folder := os.environ.get(LAUNCH_FOLDER):
            self.publish.subscribe(OutcomeFile(Path(folder)).on_event)
        self.console = ConsoleReporter(
            lambda: self.backend.shown,
            how_to_reach=self.backend.how_to_reach,
            are_warm=is_warm(self.settings),
        )
        self.signals = SignalDesk(
            self.settings, scheduled, stop_signals, publish=self.publish, depending=self.depending
        )

    def depending(self) -> Sequence[str]:
        """Return the nodes that need the store here to go on; none in a Slurm job, which is requeued without it."""
        return self.backend.depending(self.node_id) if self.scheduled is None else ()

    @property
    def job(self) -> Job:
        """The job that the run is started for."""
        return job_of(self.settings, self.scheduled)

    @property
    def policy(self) -> Policy:
        """The rules of a run that this node begins."""
        return msgspec.structs.replace(self.settings.policy(), job=self.job)

    @property
    def run_id(self) -> str:
        """The run that this node takes part in; empty before it is known."""
        return self.backend.run_id

    @property
    def folder(self) -> Path:
        """Where the locks of this machine's agents in the run are."""
        return self.settings.state_dir / "nodes" / self.run_id

    def is_called(self, node_id: str) -> None:
        """Name the node in what is logged and recorded from now on."""
        bind_context(node=node_id)
        self.node_id = self.console.node_id = node_id
        self.event_log.bind(node=node_id)
