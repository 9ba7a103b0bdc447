"""Failures, notices, growing and stopping: two groups of settings."""

from __future__ import annotations

import signal
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
    shutdown_timeout: float = setting(
        value_types.seconds(0),
        "30",
        "Maximum time between SIGTERM and SIGKILL for workers: before a restart, when this node leaves, or when the "
        "run is stopped. Before a restart it ends as soon as they make no progress (--restart-idle).",
        torchrun=True,
        other_variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    )
    restart_idle: float = setting(
        value_types.seconds(0),
        "0.05",
        "Before a restart, workers that have received SIGTERM and make no progress for this long are killed. "
        "Progress is processor time, reads and writes, of the workers and their child processes.",
    )
    survive: str = setting(
        value_types.choice(("restart", "memory", "keep"), metavar="HOW"),
        "restart",
        "What is left of training when a worker fails, and when nodes join or leave: restart (all workers are started "
        "again; scripts that use elastic_agent.survive continue with their state from memory), memory (the trainers of "
        "Lightning and transformers, too), keep (and the other workers of elastic_agent.survive keep their processes, "
        "and new ones start beside the running world; experimental, on CPUs only).",
    )
    hang_timeout: float | None = setting(
        value_types.seconds(0),
        None,
        "Workers that make no progress for this long, because some wait for others in a collective, hang: they are "
        "restarted. So is a worker that has called client.heartbeat and then does not call it for this long. 0: off.",
        shown_default="90 % of the time-out of the process group; 1800 for heartbeats",
        example="600",
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


@dataclass(frozen=True, kw_only=True)
class NoticeSettings:
    """See :class:`elastic_agent.config.settings.Settings`."""

    notice_signal: str = setting(
        value_types.SIGNAL,
        "SIGUSR1",
        "Signal to any agent that stops the whole run gracefully: workers receive a notice and have "
        "--notice-time. (With the signals of --signals-to-handle, only one node leaves.)",
    )
    notice_time: float = setting(
        value_types.seconds(0),
        "60",
        "Time that workers have to save and exit after the notice signal, and before a running world grows.",
        shown_default="60; in a Slurm job that ends within an hour, until shortly before its end",
    )
    grow: str = setting(
        value_types.choice(("never", "at-notice", "after"), metavar="WHEN"),
        "after",
        "When nodes that arrive late may join a running world: never (only when the next generation forms "
        "for another reason), at-notice (if the script handles notices, so that no step is lost), after "
        "(as at-notice, otherwise by a restart). They join once they have waited for --settle, at most "
        "--lease-ttl. A node that was part of the run before may always rejoin.",
    )
    node_unit: tuple[int, ...] = setting(
        value_types.NODE_COUNTS,
        None,
        "Allowed numbers of nodes in a world: one number (its multiples are allowed) or a list. Surplus "
        "nodes stand by.",
        shown_default="any number within --nnodes",
        value=(),
        example="2",
    )
    finish_once: bool = setting(
        value_types.SWITCH,
        "false",
        "Do not start a finished run again under the same run id with the same command: its agents exit immediately "
        "with success. In a Slurm job that is requeued, this is always so.",
    )
    requeue: str = setting(
        value_types.choice(("auto", "never"), metavar="WHEN"),
        "auto",
        "Whether to requeue a job that was stopped with its state saved, because of its time limit or a "
        "preemption. auto: one agent requeues it, in a Slurm job or with --requeue-command. never: it is "
        "not requeued.",
    )
    requeue_command: str | None = setting(
        value_types.COMMAND,
        None,
        "Shell command that requeues the job, run on one node in the agent's environment. A non-zero exit "
        "code means failure. Also works outside of Slurm.",
        shown_default="in a Slurm job: scontrol requeue and the job's id",
        example="scontrol requeue $SLURM_JOB_ID",
    )

    @property
    def notice_signum(self) -> signal.Signals | None:
        """The notice signal; None: no signal gives a notice."""
        return None if self.notice_signal == value_types.NO_SIGNAL else signal.Signals[self.notice_signal]
