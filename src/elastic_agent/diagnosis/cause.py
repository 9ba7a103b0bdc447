"""The result of a root-cause analysis: what ended a generation, where, and what to do about it."""

from __future__ import annotations

import enum

from msgspec import Struct


class CauseKind(enum.StrEnum):
    """What ended a generation."""

    EXCEPTION = "exception"
    """The script of a worker raised an exception."""
    EXIT_CODE = "exit-code"
    """A worker exited with a code other than 0, and wrote no exception."""
    SIGNAL = "signal"
    """A signal that no agent sent killed a worker."""
    OUT_OF_MEMORY = "out-of-memory"
    """The kernel killed a worker, or one of its processes, because the memory was used up."""
    START = "start"
    """The workers of a node could not be started, or could not reach the bootstrap store."""
    EARLY_EXIT = "early-exit"
    """A worker exited with 0 while others still needed it."""
    HANG = "hang"
    """A worker stopped making progress."""
    NODE_LOST = "node-lost"
    """A node stopped taking part: its machine, its agent or its network failed."""
    NETWORK = "network"
    """A connection between workers broke or could not be made, although all workers were alive."""
    UNKNOWN = "unknown"
    """Only consequences were reported."""


class RootCause(Struct, frozen=True, omit_defaults=True):
    """What failed first in a generation, by causality. All texts are single lines, `tail` excepted."""

    generation: int
    kind: CauseKind
    what: str
    """What happened, such as ``ValueError: bad batch`` or ``killed by SIGKILL``."""
    node_id: str = ""
    """Empty: not known."""
    host: str = ""
    """The machine's name or address."""
    slot: int | None = None
    """The worker's number on its node; None: the node as a whole, or not known."""
    rank: int | None = None
    where: str = ""
    """Which workers had the same error, such as ``on 6 of 6 workers`` or ``only on host1``."""
    line: str = ""
    """Where it happened in the script, such as ``train.py:88``; empty: not known, or `what` says so."""
    meaning: str = ""
    """What the error means, if it is one that is known."""
    remedy: str = ""
    """What to change, if it is known."""
    next_step: str = ""
    """Where to look further."""
    others: tuple[str, ...] = ()
    """What the other workers did, most important first."""
    tail: str = ""
    """The end of the traceback, or of what the worker wrote to stderr."""
    tail_of: str = ""
    """The worker whose tail it is, if another one."""
    is_certain: bool = True
    """Whether the observations show it; otherwise it is the most likely explanation."""

    @property
    def worker(self) -> str:
        """The worker's id, such as ``n2/0``; the node's id where no single worker is the cause; empty: unknown."""
        return self.node_id if self.slot is None or not self.node_id else f"{self.node_id}/{self.slot}"
