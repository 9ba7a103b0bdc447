"""The workers that run on this machine, found by what their agents put into their environment."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from elastic_agent.linux import environment, open_file, processes_of, read_process
from elastic_agent.worker_variables import RUN_ID, STACKS_SIGNAL, WORKER_ID


@dataclass(frozen=True)
class RunningWorker:
    """A process that some agent of this machine started as a worker."""

    pid: int
    run_id: str
    worker_id: str
    stacks_signal: int
    """On which it writes its stacks, if it has a handler for it."""

    @property
    def output(self) -> str:
        """Where its standard error goes, in words: a path, or the agent's own output; empty if that is not known."""
        path = open_file(self.pid, 2)
        return "the output of its agent" if path.startswith(("pipe:", "socket:")) else path


def find_workers(uid: int, run_id: str | None = None) -> list[RunningWorker]:
    """A user's workers, of one run if it is named. Their own children are left out.

    Root could read the environment of every process, but another user's content is not to be trusted.
    """
    found = {one.pid: one for one in _marked(uid) if run_id in (None, one.run_id)}
    own = [one for one in found.values() if not _is_child_of(one, found)]
    return sorted(own, key=lambda one: (one.run_id, one.worker_id))


def _is_child_of(worker: RunningWorker, others: dict[int, RunningWorker]) -> bool:
    parent = others.get(_parent(worker.pid))
    return parent is not None and parent.worker_id == worker.worker_id


def _parent(pid: int) -> int:
    process = read_process(pid)
    return process.parent if process is not None else 0


def _marked(uid: int) -> Iterator[RunningWorker]:
    for pid in processes_of(uid):
        try:
            environ = environment(pid)
        except OSError:  # not to be read by this user, or gone
            continue
        with contextlib.suppress(KeyError, ValueError):
            yield RunningWorker(
                pid, environ[RUN_ID], environ[WORKER_ID], _signal_number(environ[STACKS_SIGNAL])
            )


def _signal_number(text: str) -> int:
    number = int(text)
    if not 1 <= number < signal.NSIG:
        raise ValueError(f"{number} is not a signal")
    return number
