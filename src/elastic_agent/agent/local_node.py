"""The parts of this node that all steps of its part in a run work with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastic_agent.agent import events
from elastic_agent.agent.reporting.console import ConsoleReporter
from elastic_agent.agent.reporting.event_log import EventLog
from elastic_agent.agent.slurm.job import SlurmJob
from elastic_agent.agent.worker_group.command import job_of
from elastic_agent.agent.worker_group.factory import WorkerFactory
from elastic_agent.agent.worker_group.warm_start import Guards
from elastic_agent.config.settings import Settings
from elastic_agent.logs import bind_context
from elastic_agent.protocol import Job, Policy
from elastic_agent.rendezvous.backends import RendezvousBackend

from .signals import SignalDesk


@dataclass(frozen=True)
class LocalNode:
    """This node, before it has a run and an id, and after."""

    settings: Settings
    slots: int
    """The number of workers that it runs."""
    scheduled: SlurmJob | None
    """The Slurm job that this agent is a task of, if it is."""
    backend: RendezvousBackend
    guards: Guards
    workers: WorkerFactory
    publish: events.Publisher
    event_log: EventLog
    console: ConsoleReporter
    signals: SignalDesk
    depending: Callable[[str], Sequence[str]]
    """Gives the nodes that cannot go on without the store here, from this node's id; none in a Slurm job, which is
    requeued without it."""

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
        self.console.node_id = node_id
        self.event_log.bind(node=node_id)
