"""The observations of one node that the other nodes read to find the root cause of a failure.

They decide nothing: no rule of the protocol depends on them, and a node that cannot write or read them trains on.
Fields that a newer version adds are ignored.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from elastic_agent.protocol import Count, Generation, Host, LongText, Name, Signature, Text

REPORT_VERSION = 1

Moment = Annotated[float, Meta(ge=0, le=1e12)]
"""Seconds since 1970, by the clock of the node that reports it."""


class WorkerState(enum.StrEnum):
    """The state of a worker of a generation."""

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
    """The progress of a worker in one process group: sequence numbers of its last collectives, -1 if there was none."""

    group: Text
    """The group's name; the same on all its ranks."""
    enqueued: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    started: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    completed: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    last: Collective | None = None
    """The last one enqueued, if it is known in detail."""
    ranks: tuple[Count, ...] = ()
    """The global ranks in the group; empty: all."""
    recent: tuple[Collective, ...] = ()
    """The last ones enqueued, the newest last; only while nothing progresses, and after an exception."""

    @property
    def is_waiting(self) -> bool:
        """Return whether the last one enqueued has not completed."""
        return self.enqueued > max(self.completed, 0)


class Place(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The activity of the main thread of a worker."""

    line: Text = ""
    """Where it is in the script, such as ``train.py:88``."""
    waits_in: Text = ""
    """The function of ``torch.distributed`` that it is in; empty: none."""
    handles: Text = ""
    """The exception that it handles in an ``except``, a ``finally`` or a ``with``; empty: none."""
    raised_at: Text = ""
    """Where in the script that was raised, such as ``train.py:12``."""
    stack: LongText = ""
    """Its Python stack, innermost call last."""

    def as_place(self) -> dict[str, Any]:
        """Return these values, for another record of the same worker."""
        return {name: getattr(self, name) for name in Place.__struct_fields__}


class WorkerReport(Place, frozen=True, omit_defaults=True):
    """One worker of a generation."""

    slot: Count
    rank: Count
    state: WorkerState
    pid: Count = 0
    returncode: int | None = None
    """Negative: the signal that killed it."""
    ended_s: Moment | None = None
    """When its process ended: its connections break then."""
    error: Text = ""
    """The error that it raised, in one line. Of a stopped worker too, if it wrote a traceback: it may have failed
    before the stop."""
    stdout: Text | None = ""
    """The file that its output went to, /dev/null included; empty: that of its agent. None: it wrote nothing."""
    last_line: Text = ""
    """The last line of its output, if it raised no error; it need not have to do with the end."""
    tail: LongText = ""
    """The end of its traceback, or of what it wrote to stderr."""
    signature: Signature = ""
    """The same for the same error at the same place in the script."""
    step: Count | None = None
    """The last step it reported with a heartbeat."""
    optimizer_steps: Count | None = None
    """The optimizer steps that were counted since its start; None: none, or not known."""
    progress: tuple[GroupProgress, ...] = ()
    process_state: Annotated[str, Meta(max_length=8)] = ""
    """As in /proc/PID/status: R, S, D, T …; empty: not known."""
    known: Annotated[str, Meta(max_length=64)] = ""
    """The name of the error in `known_errors.toml`, if it is in there."""
    reason: Annotated[str, Meta(max_length=64)] = ""
    """The name of the known error that may have led to it, by its output."""
    evidence: Text = ""
    """The line of its output that says so."""
    peer: Text = ""
    """Address or name of the machine of the other worker that the error names."""
    peer_rank: Count | None = None
    """Rank of the other worker that the error names."""
    is_silent: bool = False
    """It was asked for its progress, and did not answer."""
    origin: Text = ""
    """The exception that led to the one that ended its script, if there is one; a traceback need not show it."""
    failed_s: Moment | None = None
    """When its script ended, up to half a second before ``ended_s``, or its process without it; None: not known."""
    waits: Annotated[float, Meta(ge=0, le=1)] | None = None
    """The part of the last minutes in which it waited in a collective; None: not known yet."""


class Usage(Struct, frozen=True, omit_defaults=True):
    """The resources that a worker's process uses, without processes that it started."""

    cpu: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """The number of processors that it kept busy in the last seconds."""
    memory_bytes: Annotated[int, Meta(ge=0, le=2**60)] | None = None
    """Resident, shared pages included."""
    gpu: Annotated[float, Meta(ge=0, le=1)] | None = None
    """The utilisation of the busiest GPU on which it runs, whoever uses that."""
    gpu_memory_bytes: Annotated[int, Meta(ge=0, le=2**60)] | None = None


class NodeReport(Struct, frozen=True, omit_defaults=True):
    """The observations of a node about its workers in one generation, and about its machine."""

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
    blocked: tuple[Text, ...] = ()
    """Connections of its workers that the network blocks, each in a line."""
    stalled_s: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    """For how long no worker of the node has made progress; None: for a short time at most, or that is not known."""
    steps_per_s: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    """The rate at which the steps that its workers report increase; None: not known."""
    log_dir: Text = ""
    """Where the output of the run's workers is on this machine; empty: nowhere."""
    has_read: bool = False
    """The node has read the reports of the others on this generation, which was the last one."""
    usage: dict[Count, Usage] = {}
    """Of its workers that run, by slot."""


class Bulletin(Struct, frozen=True):
    """The newest reports of a node in the store, one for each of the last generations, the newest last."""

    version: int
    reports: tuple[NodeReport, ...]


_DECODER = msgspec.json.Decoder(Bulletin)
"""Made now, by the one thread that imports, as in :mod:`elastic_agent.protocol.codec`."""

KEPT_REPORTS = 3
"""The number of generations: the other nodes may read a report when the next generation has ended already."""

LONGEST_BULLETIN = 256 * 1024
"""Bytes; tails, stacks and recent collectives are left out of a bulletin that would be longer."""


def encode_bulletin(reports: Sequence[NodeReport]) -> bytes:
    """Encode a node's reports as they are stored, in at most :data:`LONGEST_BULLETIN` bytes."""
    kept = tuple(reports)[-KEPT_REPORTS:]
    data = msgspec.json.encode(Bulletin(REPORT_VERSION, kept))
    if len(data) > LONGEST_BULLETIN:
        data = msgspec.json.encode(Bulletin(REPORT_VERSION, tuple(map(_without_texts, kept))))
    return data


def _without_texts(report: NodeReport) -> NodeReport:
    def without(worker: WorkerReport) -> WorkerReport:
        progress = tuple(msgspec.structs.replace(group, recent=()) for group in worker.progress)
        return msgspec.structs.replace(worker, tail="", stack="", progress=progress)

    return msgspec.structs.replace(report, workers=tuple(map(without, report.workers)))


def decode_bulletin(data: bytes) -> tuple[NodeReport, ...]:
    """Return the reports in these bytes; empty if they are none, or of another version."""
    if len(data) > 2 * LONGEST_BULLETIN:
        return ()
    try:
        bulletin = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()
    return bulletin.reports if bulletin.version == REPORT_VERSION else ()
