"""What the exit code of ``elastic-agent`` tells its caller. Stable: a number keeps its meaning for good."""

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
    ExitCode.FINISHED: "the run finished: every worker succeeded; from serve: it was stopped",
    ExitCode.FAILED: "workers failed until the restart budget was spent or in the same way twice, or could not start",
    ExitCode.USAGE: "an option, a variable, the settings file or the script is wrong, or this user may not have the "
    "files or processes that it takes; nothing was started",
    ExitCode.TOO_FEW_NODES: "not enough nodes came within join_timeout",
    ExitCode.NO_STORE: "the rendezvous endpoint cannot be reached, or what answers there is not a store; from serve: "
    "it is not this machine's, or it is taken",
    ExitCode.REFUSED: "the run refused this node: its node id is taken, or it asks for a longer lease than the run has",
    ExitCode.DRAINED: "drained: this node left as asked, the run goes on without it",
    ExitCode.NOT_STOPPED: "workers could not be stopped and may still hold their devices; from drain and stop: it "
    "could not be confirmed that all workers have exited",
    ExitCode.INTERNAL: "internal error of elastic-agent: please report it with its log",
    ExitCode.STOPPED: "the run was stopped early, as asked: started again it goes on from what its workers saved",
    ExitCode.INTERRUPTED: "ended at once by a second SIGINT",
    ExitCode.TERMINATED: "ended at once by a second SIGTERM",
}
