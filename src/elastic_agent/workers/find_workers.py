"""The workers that run on this machine, found by what their agents put into their environment."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from elastic_agent.linux import GUARD_NAME, environment, open_file, process_name, processes_of, read_process
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
        """The place of its standard error, in words: a path, or the agent's own output; empty if that is not known."""
        if not self.shares_output:
            return open_file(self.pid, 2)
        agent = _agent_of(self.pid)
        if agent is None:
            return "the output of its agent"
        path = open_file(agent, 2)
        where = f", {path}" if path.startswith("/") else ""
        return f"the output of its agent (pid {agent}{where})"

    @property
    def shares_output(self) -> bool:
        """True if its standard error is passed on by its agent, with that of the agent's other workers.

        On a terminal it is a pseudo-terminal that the agent made, whose name is of no use to anybody else.
        """
        path = open_file(self.pid, 2)
        return path.startswith(("pipe:", "socket:", "/dev/pts/"))


def find_workers(uid: int, run_id: str | None = None) -> list[RunningWorker]:
    """Return a user's workers, of one run if it is named. Their own children are left out.

    Root could read the environment of every process, but another user's content is not to be trusted.
    """
    found = {worker.pid: worker for worker in _marked(uid) if run_id in (None, worker.run_id)}
    workers = [worker for worker in found.values() if not _is_child_of(worker, found)]
    return sorted(workers, key=lambda worker: (worker.run_id, worker.worker_id))


def _is_child_of(worker: RunningWorker, others: dict[int, RunningWorker]) -> bool:
    parent = others.get(_parent(worker.pid))
    return parent is not None and parent.worker_id == worker.worker_id


def _agent_of(pid: int) -> int | None:
    """Return the agent that this process descends from: the parent of its guard."""
    while (pid := _parent(pid)) > 1:
        if process_name(pid) == GUARD_NAME:
            return _parent(pid) or None
    return None


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
