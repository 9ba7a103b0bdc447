"""Workers that were ended by a signal which makes their agent stop as well: neither a failure nor a success.

Some schedulers and service managers send such a signal to every process of a job, not to the agents alone: Slurm with
``proctrack/linuxproc``, or ``systemctl kill`` on a scope. A worker that dies of it, or handles it by saving and exiting
(with any code), ends because of the signal, not by a failure.

The agent must have received the signal too; it then acts on it. Beyond that, a worker that was killed by this very
signal needs no other evidence. For one that exited, the guard provides it: it receives the signal exactly when the
workers do, and the worker must not have ignored it. So a worker that ignores the signal, as those of a Slurm step
ignore the notice signal, succeeds or fails as usual.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from elastic_agent.linux import ignores

SPREAD_S = 0.1
"""The time in which such a signal reaches all processes of a node."""


class StopSignals:
    """The signals that make this agent stop, and which of them it has received."""

    def __init__(self, handled: Iterable[int] = ()) -> None:
        self.handled = set(handled)
        """The numbers of those that it acts on."""
        self._received: set[int] = set()

    def catch_early(self, name: str) -> None:
        """Note the signal instead of being ended by it, until it gets another handler.

        For a notice that comes while the agent still starts.
        """
        with contextlib.suppress(ValueError):  # not the main thread: signals are the caller's business
            signal.signal(signal.Signals[name], lambda signum, frame: self.receive(signum))

    def receive(self, signum: int) -> None:
        """Note that the agent has received it."""
        self._received.add(int(signum))

    def received(self, signums: Iterable[int]) -> bool:
        """Return whether the agent has received one of these."""
        return not self._received.isdisjoint(signums)

    @property
    def for_workers(self) -> signal.Signals:
        """Return what workers get when this node leaves: SIGINT if the agent has received it, else SIGTERM."""
        return signal.SIGINT if signal.SIGINT in self._received else signal.SIGTERM


@dataclass(eq=False, repr=False)
class Interruptions:
    """The workers of one generation that were reached by such signals."""

    signals: StopSignals
    ignored: Collection[int]
    """Those that the workers began with ignored."""

    def __post_init__(self) -> None:
        self._reached: dict[int, set[int]] = {}

    def guard_received(self, signum: int, pids: Mapping[int, int | None]) -> None:
        """Note that the guard received this signal; the workers of these slots run, or have just ended (None).

        Whether a process that is gone ignored it cannot be seen any more: its initial setting is used then.
        """
        if signum not in self.signals.handled:
            return
        for slot, pid in pids.items():
            ignored = ignores(pid, signum) if pid is not None else None
            if not (signum in self.ignored if ignored is None else ignored):
                self._reached.setdefault(slot, set()).add(signum)

    def suspects(self, slot: int, returncode: int) -> frozenset[int]:
        """Return the signals that may have ended the worker."""
        found = set(self._reached.get(slot, ()))
        if -returncode in self.signals.handled:
            found.add(-returncode)
        return frozenset(found)
