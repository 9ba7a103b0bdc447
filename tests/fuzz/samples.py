"""Valid records, and what several tests need."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import msgspec

from elastic_agent.diagnosis.records import (
    Collective,
    GroupProgress,
    NodeReport,
    WorkerReport,
    WorkerState,
)
from elastic_agent.monitoring.status import GenerationStatus, Goodput, NodeStatus, RunStatus, Standstill
from elastic_agent.protocol import Cause, Lease, Member, Phase, Plan, StopRequest, World, encode
from elastic_agent.protocol.records import Budget, Failure, FailureKind, Fingerprint, Notice, Refusal
from tests.protocol.support import on_disk
from tests.transport.support import lease, member, plan, world

TRACEBACK = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/u/train.py", line 88, in <module>
[rank0]:     main()
[rank0]:   File "/home/u/train.py", line 61, in main
[rank0]:     loss.backward()
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB
[rank0]: During handling of the above exception, another exception occurred:
RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:41523
"""
OTHER_ERRORS = """\
[W1123 10:00:00.123456 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=3, addr=[n1]:4711, remote=[n0]:29500)
Rank 2 failed to pass monitoredBarrier in 30000 ms
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600025
terminate called after throwing an instance of 'c10::Error'
*** Aborted at 1700000000 (unix time) try "date -d @1700000000" ***
Segmentation fault (core dumped)
"""


class MemoryTable:
    """What a reader needs of a ``Table``."""

    root = ""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values

    async def read(self, keys: Collection[str]) -> dict[str, bytes]:
        return {key: found for key in keys if (found := self.values.get(key))}


@cache
def members() -> tuple[Member, ...]:
    failure = Failure(
        FailureKind.WORKER,
        "worker n1/0 exited with code 1",
        tail=TRACEBACK,
        slot=0,
        returncode=1,
        signature="ab" * 16,
    )
    history = on_disk(
        7, world(2, 7), 1, ("n0", "n1"), Phase.STOPPED, settled=True, budget=Budget(0, 1.5, 1, "ab")
    )
    stop = StopRequest(1, Cause.OPERATOR, 30.0, "elastic-agent stop")
    full = member(
        "full",
        failure=failure,
        history=history,
        stop_request=stop,
        fingerprint=Fingerprint("sha", "3.11", "2.13", "0.1"),
        preferred_rank=3,
        replaces=("old",),
        role="trainer",
    )
    return member("a"), full


@cache
def plans() -> tuple[Plan, ...]:
    sealed = world(3, 5)
    running = plan(5, "all nodes are ready", generation=5, phase=Phase.RUNNING, world=sealed)
    noticed = msgspec.structs.replace(
        running,
        notice=Notice(1, Cause.OPERATOR, 30.0, "elastic-agent stop"),
        uncleared=sealed.seats,
        charged=2,
        budget=Budget(1, 3.0, 1, "ff"),
        refused={"n9": Refusal("twice")},
        losses={"n1": 2},
        order=tuple(f"n{number}" for number in range(20)),
    )
    return plan(1), running, noticed


@cache
def record_samples() -> dict[type, tuple[bytes, ...]]:
    """Valid records of each kind, as they are stored."""
    histories = [member.history for member in members() if member.history is not None]
    worlds: list[World] = [world(1), world(5, 9)]
    return {
        Member: tuple(map(encode, members())),
        Lease: (encode(lease("a")), encode(lease("b", beat=7, revoked=True))),
        Plan: tuple(map(encode, (*plans(), *histories))),
        World: tuple(map(encode, worlds)),
    }


@cache
def reports() -> tuple[NodeReport, ...]:
    last = Collective(12, "all_reduce", 4096, "train.py:88")
    groups = (GroupProgress("default_pg", 12, 12, 11, last, (0, 1), (last,)),)
    failed = WorkerReport(
        0,
        0,
        WorkerState.FAILED,
        4711,
        1,
        1.7e9,
        "RuntimeError: boom",
        TRACEBACK,
        "ab",
        60,
        groups,
        "S",
        TRACEBACK,
    )
    others = WorkerReport(
        1, 1, WorkerState.STOPPED, 4712, -15, 1.7e9, "", OTHER_ERRORS, progress=groups, waits=0.5
    )
    facts = {"oom_kills": "1", "disk_full": "/data: 0 B of 1 TB free"}
    first = NodeReport("n0", "i0-5", 5, 1.7e9, "10.0.0.1", "host0", (failed, others), facts, True)
    hung = WorkerReport(0, 2, WorkerState.HUNG, 4713, progress=groups, stack=TRACEBACK, waits_in="all_reduce")
    second = NodeReport(
        "n1", "i1-5", 5, 1.7e9, "10.0.0.2", "host1", (hung,), blocked=("n1 to n0",), stalled_s=30.0
    )
    return first, second


@cache
def statuses() -> tuple[RunStatus, ...]:
    node = NodeStatus("n0", "training", "running", "10.0.0.1", "host0", 2, 0, 60, 1.7e9, waits=(0.5, None))
    past = GenerationStatus(
        4, 1.6e9, 1.65e9, ("n0", "n1"), 4, "failed", "worker n1/0 failed first\n" + TRACEBACK, "stack"
    )
    full = RunStatus(
        "run",
        "n0:29400",
        1.7e9,
        "running",
        5,
        1.69e9,
        "all nodes are ready",
        nodes=(node,),
        generations=(past,),
        goodput=Goodput(9.0),
        stragglers=("n0/1",),
        standstill=Standstill(1.7e9, "waits", "stack"),
        problem="unreachable",
    )
    return RunStatus("run", "n0:29400", 1.7e9), full
