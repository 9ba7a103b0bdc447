"""Workers that do nothing at all, and wait for no other worker, are noticed; whatever works is left alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

import pytest

from elastic_agent.agent import events
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.agent.worker_group.idle import IDLE_AFTER_S, IdleMeter
from elastic_agent.agent.worker_group.stalls import StallWatch
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.diagnosis.hangs import idle_words
from elastic_agent.diagnosis.records import NodeReport, WorkerReport, WorkerState
from tests import virtual_time
from tests.agent.support import wait_until_asleep

WORK = {
    "nothing": "pass",
    "computes": "end_s = time.process_time() + 1.0\n    while time.process_time() < end_s: pass",
    "writes": "[os.write(null, bytes(1 << 20)) for _ in range(2)]",
}
PROGRAM = """
import os, sys, time
null = os.open(os.devnull, os.O_WRONLY)
print(os.getpid(), flush=True)
for kind in sys.stdin:
    {work}
    print("done", flush=True)
"""
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


@contextmanager
def process(kind: str, by: str) -> Iterator[tuple[int, int, IO[str], IO[str]]]:
    """A worker, or one whose child does the work: its pid, that of the one that works, and their pipes."""
    program = PROGRAM.format(work=WORK[kind])
    argv = [program] if by == "itself" else [PARENT, program]
    with subprocess.Popen(
        [sys.executable, "-c", *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        yield started.pid, int(started.stdout.readline()), started.stdin, started.stdout
        started.stdin.close()


@pytest.mark.parametrize("by", ["itself", "a child"])
@pytest.mark.parametrize(("kind", "idle_s"), [("nothing", 60.0), ("computes", 0.0), ("writes", 0.0)])
def test_only_workers_that_neither_compute_nor_read_or_write_are_idle(
    by: str, kind: str, idle_s: float
) -> None:
    """``now_s`` is what it would be a minute later."""
    with process(kind, by) as (worker, working, told, said):
        meter = IdleMeter(0.0)
        meter.idle_s([worker], 0.0)
        meter.idle_s([worker], 0.01)
        told.write("go\n")
        told.flush()
        assert said.readline() == "done\n"
        assert meter.idle_s([worker], 60.0) == idle_s
        if not idle_s:
            assert meter.idle_s([worker], 120.0) == 60.0
        assert meter.processes == tuple(sorted({worker, working}))


def test_idle_workers_are_told_at_doubling_intervals(tmp_path: Path) -> None:
    told: list[events.Stalled] = []

    async def scene(worker: int) -> None:
        enough = asyncio.Event()

        def report(event: events.Event) -> None:
            if isinstance(event, events.Stalled) and event.idle_s:
                told.append(event)
                if len(told) == 2:
                    enough.set()

        with closing(HeartbeatFile.create(tmp_path, 1)) as beats:
            collectives = Collectives()
            watch = StallWatch(1, lambda: {0: worker}, beats, collectives, 0.0, report)
            watch.start()
            await enough.wait()
            watch.stop()

    with process("nothing", "a child") as (worker, working, _, _):
        for pid in (worker, working):
            wait_until_asleep(pid)
        virtual_time.run(scene(worker))
        assert [one.processes for one in told] == [tuple(sorted({worker, working}))] * 2
    assert told[0].idle_s >= IDLE_AFTER_S
    assert told[1].idle_s >= 2 * told[0].idle_s


def test_where_idle_workers_are_is_told_in_one_line() -> None:
    workers = (
        WorkerReport(0, 0, WorkerState.RUNNING, 40, line="train.py:12"),
        WorkerReport(1, 1, WorkerState.RUNNING, 41, process_state="T (stopped)"),
    )
    words = idle_words(NodeReport("n1", "i1", 1, 0.0, workers=workers), 61.7, (40, 41, 52, 51))
    assert words == (
        "nothing has used a processor, read or written for 62 s, and no worker waits for another one in a collective: "
        "worker n1/0 (pid 40; is at train.py:12), worker n1/1 (pid 41; stopped by a signal or a debugger (state T)), "
        "their processes 51, 52; if they do not wait on purpose (input, a debugger, a pause), elastic-agent stacks "
        "shows where they are"
    )
