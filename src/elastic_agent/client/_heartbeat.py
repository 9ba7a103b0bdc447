"""The worker's side of the heartbeat: implements :func:`elastic_agent.client.heartbeat`."""

from __future__ import annotations

import itertools
import os
import sys

from elastic_agent.client._environment import number_at_least_0
from elastic_agent.worker_variables import HEARTBEAT, SLOT


class Pulse:
    """One process's line to its agent: a cell to count in, or a scratch cell that is not read.

    It is connected when the client is imported under an agent, else by the first beat, so that a process
    which imports the client first and becomes a worker later (by fork) is served too.
    """

    __slots__ = ("_beats", "_words")

    def __init__(self) -> None:
        self._words: memoryview | None = None
        self._beats = itertools.count(1)
        if HEARTBEAT in os.environ:
            # Claiming now rather than at the first beat keeps the cell from processes that this one
            # starts. Errors are reported at the first beat: most importers never beat.
            try:
                self._connect()
            except (OSError, ValueError):
                self._words = None

    def beat(self, step: int | None) -> None:
        """Count one beat, naming ``step`` if given. TypeError or ValueError: it is no 64-bit integer."""
        words = self.words
        if step is not None:
            self.report(step)
        # A counter of our own, not words[0] + 1: one atomic step, also with several threads.
        words[0] = next(self._beats)

    def report(self, step: int) -> None:
        """Name a step without a beat. TypeError or ValueError: it is no 64-bit integer."""
        try:
            self.words[1] = step
        except (TypeError, ValueError) as error:
            raise type(error)(f"heartbeat: step={step!r}; expected a 64-bit integer") from None

    @property
    def words(self) -> memoryview:
        """This process's cell, see :mod:`elastic_agent.client._cells`; or a scratch of the same size."""
        words = self._words
        return words if words is not None else self._connect_or_warn()

    @property
    def is_connected(self) -> bool:
        """True if this process has a cell that its agent reads."""
        return not isinstance(self.words.obj, bytearray)

    def forked(self) -> None:
        """Release the cell in the child of a fork, whose calls are no progress of the worker.

        A parent that is no worker itself has none; its child may yet become one.
        """
        if self._words is not None or HEARTBEAT in os.environ:
            self._words = _scratch()

    def _connect_or_warn(self) -> memoryview:
        try:
            return self._connect()
        except (OSError, ValueError) as error:
            # Training must not fail for lack of hang detection: warn once, and continue without.
            seen = ", ".join(f"{name}={os.environ.get(name)!r}" for name in (HEARTBEAT, SLOT))
            print(
                f"elastic_agent.client: heartbeats and notices are disabled ({seen}): {error}; expected "
                "the file that the agent created for this generation, with a cell for the slot",
                file=sys.stderr,
            )
            self._words = _scratch()
            return self._words

    def _connect(self) -> memoryview:
        path = os.environ.get(HEARTBEAT)
        words = None
        if path is not None:
            slot = number_at_least_0(SLOT, os.environ.get(SLOT, ""), "a whole number")
            # Imported here: without an agent it is not needed, nor are the modules it loads.
            from elastic_agent.client._cells import claim_cell

            words = claim_cell(path, slot)
        if words is None:
            words = _scratch()
        self._beats = itertools.count(words[0] + 1)
        self._words = words
        return words


def _scratch() -> memoryview:
    """Return words like a cell's, which reject the same invalid steps, so that errors show without an agent."""
    return memoryview(bytearray(128)).cast("q")
