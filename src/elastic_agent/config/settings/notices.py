"""Graceful shutdown, scaling and requeueing: one group of settings."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_agent.config import value_types
from elastic_agent.config.settings.spec import setting


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
        "(as at-notice, otherwise by a restart). They join once they have waited for --settle. A node that was "
        "part of the run before may always rejoin.",
    )
    node_unit: tuple[int, ...] = setting(
        value_types.NODE_COUNTS,
        None,
        "Allowed numbers of nodes in a world: one number (its multiples are allowed) or a list. Surplus "
        "nodes stand by.",
        shown_default="any number within --nnodes",
        value=(),
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
    )
    max_requeues: int = setting(
        value_types.whole_number(0),
        "100",
        "Maximum number of requeues of a Slurm job, including those by others (from SLURM_RESTART_COUNT).",
    )
