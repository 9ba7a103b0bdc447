"""Every setting, once: its name, type, default, what it means, and how it is given.

``Settings`` is what the agent works with. Each field carries its ``Spec``, from which the command line, the
variables, the settings file, ``--help`` and ``docs/settings.md`` are made. Each heading has a class.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING

from elastic_agent.config.settings.changes import FailureSettings, NoticeSettings
from elastic_agent.config.settings.node import AgentSettings, OutputSettings, WorkerSettings
from elastic_agent.config.settings.run import RendezvousSettings, WorldSettings
from elastic_agent.config.settings.spec import Spec

if TYPE_CHECKING:
    from elastic_agent.protocol import Policy

__all__ = ["GROUPS", "Settings", "Spec", "spec_by_name", "specs"]


_GROUPS: dict[type, str] = {
    WorldSettings: "World: nodes and workers",
    RendezvousSettings: "Rendezvous: store and time-outs",
    FailureSettings: "Failures: leases, restarts, stopping",
    NoticeSettings: "Notices: graceful shutdown, scaling and requeueing",
    WorkerSettings: "Workers: how the script is started",
    OutputSettings: "Output of the workers",
    AgentSettings: "The agent itself",
}
"""Each group and its heading, in the order of the help."""

GROUPS = tuple(_GROUPS.values())


@dataclass(frozen=True, kw_only=True)
class Settings(
    WorldSettings,
    RendezvousSettings,
    FailureSettings,
    NoticeSettings,
    WorkerSettings,
    OutputSettings,
    AgentSettings,
):
    """The settings in force. Times are seconds; paths are absolute; None means "not set"."""

    script: str = ""
    """The script, module (``module``) or program (``no_python``) that the workers run."""

    script_args: tuple[str, ...] = ()
    """Its arguments, untouched."""

    def policy(self) -> Policy:
        """Return the run's rules as this node would have them."""
        # Imported here: --help and mistakes in the settings are answered without it.
        from elastic_agent.protocol import Growth, Policy

        return Policy(
            min_nodes=self.nnodes.least,
            max_nodes=self.nnodes.most,
            max_restarts=self.max_restarts,
            lease_ttl_s=self.lease_ttl,
            fence_margin_s=self.fence_margin,
            settle_s=self.settle,
            join_timeout_s=self.join_timeout,
            start_timeout_s=self.start_timeout,
            grow=Growth(self.grow),
            notice_s=self.notice_time,
            node_counts=self.node_unit,
            finishes_once=self.finish_once,
            restart_window_s=self.restart_window,
        )


@cache
def specs() -> tuple[Spec, ...]:
    """Return every setting, in the order of the help. The script and its arguments are not among them."""
    return tuple(
        f.metadata["spec"](f.name, heading) for group, heading in _GROUPS.items() for f in fields(group)
    )


@cache
def spec_by_name() -> dict[str, Spec]:
    """Return the specs by field name."""
    return {spec.name: spec for spec in specs()}
