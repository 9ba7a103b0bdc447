"""Reports each worker's position in its collectives to the agent, so that the agents can find out why a world hangs.

Workers call :func:`install` when ``torch.distributed`` is there. Nothing happens until the script initialises a process
group: then a thread begins to wait for questions of the agent (:mod:`.answers`). It takes no time of the script's in
between. Outside of elastic-agent nothing changes.
"""

from __future__ import annotations

import os

from elastic_agent.integrations.collectives import private_names
from elastic_agent.integrations.collectives.answers import Answers
from elastic_agent.worker_variables import GENERATION, PROGRESS

__all__ = ["install"]


def install() -> None:
    """Begin when the script initialises a process group; once, and only in a worker of an agent that asks."""
    address = os.environ.get(PROGRESS)
    if not address:
        return

    begun: list[Answers] = []
    worker = os.getpid()

    def begin(meeting_file: str) -> None:
        if os.getpid() != worker:  # a process that the worker has forked is no worker
            return
        try:
            if not begun:
                begun.append(Answers(address))
                begun[0].start()
            begun[0].enter(int(os.environ.get(GENERATION, begun[0].generation)))
            if meeting_file:
                begun[0].tell_meeting_file(meeting_file)
        except (OSError, RuntimeError, KeyError, ValueError, IndexError):  # training works without it
            return

    private_names.call_before_groups(begin)
