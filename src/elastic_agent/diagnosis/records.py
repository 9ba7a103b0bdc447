"""The observations of one node that the other nodes read to find the root cause of a failure.

They decide nothing: no rule of the protocol depends on them, and a node that cannot write or read them trains on.
Fields that a newer version adds are ignored.
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

from elastic_agent.protocol import Count, Generation, Host, LongText, Name, Signature, Text

REPORT_VERSION = 1

Moment = Annotated[float, Meta(ge=0, le=1e12)]
"""Seconds since 1970, by the clock of the node that reports it."""


class WorkerState(enum.StrEnum):
    """What became of a worker of a generation, or what it does."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    """It exited with 0."""
    FAILED = "failed"
    """It exited with another code, or was killed by a signal that its agent did not send."""
    HUNG = "hung"
    """It made no progress."""
    STOPPED = "stopped"
    """Its agent stopped it, because of a failure elsewhere or a membership change."""


class Collective(Struct, frozen=True, omit_defaults=True):
    """One collective, as PyTorch's flight recorder describes it."""

    serial: Count
    """Its sequence number in its process group; the same on all ranks unless they have diverged."""
    name: Text
    """Such as ``all_reduce``."""
    size_bytes: Annotated[int, Meta(ge=0, le=2**60)] | None = None
    line: Text = ""
    """Where the script called it, such as ``train.py:88``."""


class GroupProgress(Struct, frozen=True, omit_defaults=True):
    """How far a worker is in one process group: sequence numbers of its last collectives, -1 if there was none."""

    group: Text
    """The group's name; the same on all its ranks."""
    enqueued: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    started: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    completed: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    last: Collective | None = None
    """The last one enqueued, if it is known in detail."""
    ranks: tuple[Count, ...] = ()
    """The global ranks in the group; empty: all."""


class WorkerReport(Struct, frozen=True, omit_defaults=True):
    """One worker of a generation."""

    slot: Count
    rank: Count
    state: WorkerState
    pid: Count = 0
    returncode: int | None = None
    """Negative: the signal that killed it."""
    ended_s: Moment | None = None
    error: Text = ""
    """The error in one line."""
    tail: LongText = ""
    """The end of its traceback, or of what it wrote to stderr."""
    signature: Signature = ""
    """The same for the same error at the same place in the script."""
    step: Count | None = None
    """The last step it reported with a heartbeat."""
    progress: tuple[GroupProgress, ...] = ()
    process_state: Annotated[str, Meta(max_length=8)] = ""
    """As in /proc/PID/status: R, S, D, T …; empty: not known."""
    stack: LongText = ""
    """The Python stack of its main thread, innermost call last."""


class NodeReport(Struct, frozen=True, omit_defaults=True):
    """What a node observed of its workers in one generation, and of its machine."""

    version: int
    node_id: Name
    incarnation: Name
    generation: Generation
    written_s: Moment
    address: Host = "unknown"
    host: Text = ""
    """The machine's name."""
    workers: tuple[WorkerReport, ...] = ()
    facts: dict[Name, Text] = {}
    """Observations of the machine by name, taken when a worker failed, such as ``oom_kills`` or ``disk_full``."""
    is_final: bool = False
    """No worker of this generation runs on the node any more."""
