"""The interface of training code to its launcher: the worker's identity, notices, and heartbeats.

    from elastic_agent import client

    me = client.current()
    checkpoint = f"checkpoints/{me.run_id}.pt"   # stable: survives every restart
    rank = me.placement.rank                     # UNSTABLE: this generation only

    agreement = client.Agreement()
    for step in range(first_step, last_step):
        train(step)
        client.heartbeat(step)
        if agreement.notice():                   # the same answer on every rank
            save(checkpoint, step)
            client.leave()

Needs the standard library only, and works under elastic-agent, under ``torchrun`` and under plain
``python``: see :func:`current` for what each value is there.

Imported under elastic-agent, this module also lets the agent request the stacks of all threads, which are written
to stderr: the log of a job that hung shows where each worker was.
"""

from __future__ import annotations

import os

from elastic_agent.client._agreement import Agreement
from elastic_agent.client._environment import MalformedEnvironmentError, read_worker
from elastic_agent.client._heartbeat import Pulse
from elastic_agent.client._notice import Notice, NoticeBoard
from elastic_agent.client._process import release_gil_before_finalization, write_stacks_on_signal
from elastic_agent.client._worker import Placement, Worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = [
    "Agreement",
    "MalformedEnvironmentError",
    "Notice",
    "Placement",
    "Worker",
    "current",
    "heartbeat",
    "leave",
    "notice",
]


def current() -> Worker:
    """Return the identity of this worker and, separately, its placement in this generation.

    The stable fields (``run_id``, ``node_id``, ``worker_id``, ``slot``, ``incarnation``) are on the object itself,
    the unstable ones in its ``placement`` (``rank``, ``local_rank``, ``world_size``, ``local_world_size``,
    ``node_rank``, ``node_count``, ``generation``, ``restarts``, ``first_generation``).

    Under **elastic-agent** every field is as documented.

    Under **torchrun** the placement is torchrun's. ``generation`` is 0; ``restarts`` is torchrun's own
    count, and ``first_generation`` only means that it is 0, which it still is after a change of membership.
    ``run_id`` is ``--rdzv-id``: stable if you give one; ``"none"`` if you do not, for every such job; new at every
    start with ``--standalone``. ``node_id`` is the host's name: stable where that is (containers often get a new
    one), and shared by all launchers on the host, so that two of them have the same worker ids. ``slot`` is the
    local rank (with ``--virtual-local-rank`` always 0, which makes one worker id of all on a host); ``incarnation``
    is ``"none"``.

    Under plain **python** the world is one worker, rank 0; ``run_id`` is ``"local"``, the rest as under
    torchrun.

    Without elastic-agent, ``ELASTIC_AGENT_RUN_ID`` and ``ELASTIC_AGENT_NODE_ID`` in the environment set
    these two ids.

    Reads the environment on each call, in about ten microseconds, without network access.

    Raises:
        MalformedEnvironmentError: a variable of the launcher is missing or invalid; the message names it,
            its value and what was expected.
    """
    return read_worker(os.environ)


def heartbeat(step: int | None = None) -> None:
    """Report to the agent that training makes progress; costs a fraction of a microsecond, no system call.

    Call it once per step, from any thread. A worker that has called it and then does not for ``--hang-timeout``
    counts as failed. Hangs in collectives are detected without it. Without an agent it does nothing.

    Only calls in the process that the agent started count: in processes which that one starts or forks (those of a
    DataLoader, say) this does nothing, since they may continue while training hangs.

    Args:
        step: the step just completed, shown to operators; if omitted, the last one stays. Any call counts as
            progress, with any number.

    Raises:
        TypeError, ValueError: ``step`` is no integer, or not one of 64 bits.
    """
    _pulse.beat(step)


def report_step(step: int) -> None:
    """Report a step as :func:`heartbeat` does, without promising another one: no time-out starts.

    For the integrations of frameworks, which do not know what a script does between and after its steps.
    """
    _pulse.report(step)


def is_monitored() -> bool:
    """Return whether this process is a worker that an agent monitors, and no child of one.

    For :mod:`elastic_agent.survive`, as only that process may use the memory of the worker.
    """
    return _pulse.is_connected


def notice() -> Notice | None:
    """Return the notice that all workers of this world are going to be stopped, why and by when; None if there is none.

    Costs a fraction of a microsecond, no system call. A worker that has called it once is assumed to handle notices
    from then on, and gets time to save before it is stopped. Every worker of the run gets a notice within
    milliseconds, but not at the same step: use :class:`Agreement` to find a step for all, or agree in another way.
    Save, then call :func:`leave`.

    Like the heartbeat, it is for the process that the agent started. Without an agent there are no notices.
    """
    return _board.current()


def leave() -> NoReturn:
    """End this worker after a notice, when its state is saved: this is not a failure, and costs no restart.

    All workers have to call it. The next generation starts them again, or the next start of the run. Ends the
    process like ``sys.exit(0)``, so call it in the main thread. Without a notice it is the same as ``sys.exit(0)``.

    Raises:
        SystemExit: always.
    """
    _board.leave()


_pulse = Pulse()
_board = NoticeBoard(_pulse)
os.register_at_fork(after_in_child=_pulse.forked)
write_stacks_on_signal()
release_gil_before_finalization()
