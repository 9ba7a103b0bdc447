"""How each worker of a generation ended, for the reports of the nodes; reads the workers' files in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping

from elastic_agent.agent import events
from elastic_agent.linux import boottime_s
from elastic_agent.workers.context import WorkerContext
from elastic_agent.workers.guard.client import Exited

ENDED_BY_STOP = (0, -signal.SIGTERM, -signal.SIGKILL)
"""Ends of a worker that was being stopped, which need no explanation, unless it wrote a traceback before."""


def report_endings(
    context: WorkerContext, steps: Mapping[int, int], report: Callable[[events.Event], None]
) -> None:
    """Publish :class:`~elastic_agent.agent.events.GenerationEnded` soon, in this loop.

    Args:
        context: the workers, all of which have ended; their files may be read for some seconds yet.
        steps: the last step that each slot reported by a heartbeat; 0: none.
        report: publishes the event.
    """
    loop = asyncio.get_running_loop()
    offset_s = time.time() - boottime_s()

    def read() -> None:
        ends = tuple(
            _worker_end(context, one, steps.get(slot, 0), offset_s)
            for slot, one in sorted(context.exits.items())
        )
        failed = any(one.failure is not None for one in ends)
        found = context.machine_facts() if failed else {}
        with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
            loop.call_soon_threadsafe(report, events.GenerationEnded(context.generation, ends, found))

    threading.Thread(target=read, name="worker-endings", daemon=True).start()


def _worker_end(context: WorkerContext, exit_: Exited, step: int, offset_s: float) -> events.WorkerEnd:
    failure = None
    if exit_.returncode != 0:
        failure = context.failure(exit_.slot, context.final_output(exit_.slot))
    # A worker may have failed just before its agent stopped it because of what this caused elsewhere.
    if failure is not None and exit_.stopping and exit_.returncode in ENDED_BY_STOP and not failure.message:
        failure = None
    return events.WorkerEnd(
        exit_.slot, exit_.pid, exit_.returncode, exit_.at_boottime_s + offset_s, exit_.stopping, step, failure
    )
