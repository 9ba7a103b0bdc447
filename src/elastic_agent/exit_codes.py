"""The exit codes of ``elastic-agent``. Stable: a number keeps its meaning for good."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the agent. ``MEANINGS`` holds the sentence for each, used by the help and the docs."""

    FINISHED = 0
    FAILED = 1
    USAGE = 2
    TOO_FEW_NODES = 3
    NO_STORE = 4
    REFUSED = 5
    DRAINED = 6
    NOT_STOPPED = 7
    INTERNAL = 70
    STOPPED = 75
    INTERRUPTED = 130
    TERMINATED = 143


MEANINGS: dict[ExitCode, str] = {
    ExitCode.FINISHED: (
        "the run finished: every worker succeeded; from serve: it was stopped; from doctor: no errors were found"
    ),
    ExitCode.FAILED: (
        "workers failed until the restart budget was exhausted, failed twice in the same way, or could "
        "not start; from doctor, errors were found"
    ),
    ExitCode.USAGE: (
        "usage error: an option, a variable, the settings file or the script is wrong, or this user's "
        "permissions or limits do not suffice; nothing was started"
    ),
    ExitCode.TOO_FEW_NODES: (
        "not enough nodes joined within --join-timeout; from doctor, too few machines joined within --wait"
    ),
    ExitCode.NO_STORE: (
        "the rendezvous endpoint cannot be reached, or what answers there is not a store; from serve: "
        "the endpoint is not on this machine, or it is in use"
    ),
    ExitCode.REFUSED: (
        "the run refused this node: its node id is in use, its --lease-ttl is longer than the run's, or the run "
        "finished with another command or before this node came, which never ran its own"
    ),
    ExitCode.DRAINED: "drained: this node left on request, the run continues without it",
    ExitCode.NOT_STOPPED: (
        "some workers could not be stopped and may still hold their devices; from drain and stop: could "
        "not confirm that all workers have exited"
    ),
    ExitCode.INTERNAL: "internal error of elastic-agent: please report it with its log",
    ExitCode.STOPPED: "stopped on request; rerun with the same --rdzv-id to resume",
    ExitCode.INTERRUPTED: "terminated by a second SIGINT",
    ExitCode.TERMINATED: "terminated by a second SIGTERM",
}
