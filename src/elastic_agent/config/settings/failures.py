"""Leases, restarts and stopping: one group of settings."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_agent.config import value_types
from elastic_agent.config.settings.spec import setting
from elastic_agent.values import LONGEST_LEASE_S, SHORTEST_LEASE_S


@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """See :class:`elastic_agent.config.settings.Settings`."""

    max_restarts: int = setting(
        value_types.whole_number(0),
        "3",
        "Restart budget: number of worker failures that the run survives, on all nodes together. Nodes "
        "that join, leave or fail do not count. Failures are forgiven after progress (--restart-window).",
        torchrun=True,
        why="torchrun's 0 ends the run at the first failure",
    )
    restart_window: float = setting(
        value_types.seconds(0),
        "3600",
        "Time of training progress after which one failure is forgiven, that is, no longer counts against "
        "--max-restarts. 0: never.",
    )
    lease_ttl: float = setting(
        value_types.seconds(SHORTEST_LEASE_S, most=LONGEST_LEASE_S),
        "5.0",
        "A node that does not renew its lease for this long is considered lost. By then, its guard has "
        "killed its workers.",
    )
    fence_margin: float = setting(
        value_types.seconds(0, above=True),
        "1.0",
        "How long the other nodes wait after the lease of a lost node has expired, to allow for the time "
        "to kill its workers.",
    )
    restart_grace: float = setting(
        value_types.seconds(0),
        "30",
        "Maximum time between SIGTERM and SIGKILL for workers before a restart. It ends earlier when the workers "
        "make no progress (--restart-idle).",
    )
    restart_idle: float = setting(
        value_types.seconds(0),
        "0.05",
        "Before a restart, workers that have received SIGTERM and make no progress for this long are killed. "
        "Progress is processor time, reads and writes, of the workers and their child processes.",
    )
    shutdown_timeout: float = setting(
        value_types.seconds(0),
        "30",
        "Time between SIGTERM and SIGKILL for workers when this node leaves or the run is stopped.",
        torchrun=True,
        other_variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    )
    hang_timeout: float | None = setting(
        value_types.seconds(0),
        None,
        "Workers that make no progress for this long, because some wait for others in a collective, hang: they are "
        "restarted. So is a worker that has called client.heartbeat and then does not call it for this long. 0: off.",
        shown_default="90 % of the time-out of the process group; 1800 for heartbeats",
    )
    signals_to_handle: tuple[str, ...] = setting(
        value_types.SIGNALS,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "Signals that make the agent stop its workers and leave the run. By default, signals that are "
        "ignored when the agent starts, for example under nohup, stay ignored. Add those that a scheduler sends "
        "before it ends a job, such as SIGXCPU or SIGUSR2; any other signal ends the agent, and its workers at once.",
        torchrun=True,
    )
    monitor_interval: float = setting(
        value_types.seconds(0),
        "0.1",
        "torchrun's polling interval for worker exits.",
        torchrun=True,
        no_effect="the agent is woken by a worker's exit and does not poll",
    )
