"""The stacks of workers that a user asks for; the workers are processes of this test."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_agent.agent.worker_group import stacks
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.agent.worker_group.generation import STACKS_SIGNAL
from elastic_agent.agent.worker_group.stacks import worker_stacks
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.testing.processes import freeze
from tests.agent.support import asynchronous
from tests.agent.test_collectives import Worker, listening, until
from tests.waiting import GUARD_S

WORKER = f"""
import faulthandler, signal, sys, threading
def aside():
    started.set()
    threading.Event().wait()
started = threading.Event()
threading.Thread(target=aside, daemon=True).start()
started.wait()
if sys.argv[1:] != ["without"]:
    faulthandler.register({STACKS_SIGNAL}, file=2, all_threads=True, chain=False)
signal.alarm(600)
def train():
    print("ready", flush=True)
    while True:
        signal.pause()
train()
"""


@pytest.fixture(autouse=True)
def _slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "DISK_S", GUARD_S)


@contextmanager
def worker(stderr: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is a worker as far as the agent can tell."""
    command = [sys.executable, "-S", "-c", WORKER, *arguments]
    with (
        stderr.open("ab") as output,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


async def stacks_of(*pids: int) -> str:
    """Return what is told of the workers of node n1, whose first rank is 4."""
    collectives = Collectives()
    collectives.open()
    try:
        progress = Progress(3, dict(enumerate(pids)), {})
        return await worker_stacks("n1", progress, 4, collectives, "")
    finally:
        collectives.close()


@asynchronous
async def test_stacks_are_read_from_the_file_that_a_worker_writes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each under its name, main thread first, last call last; what was in the file before is not told again."""
    monkeypatch.setattr(stacks, "DUMP_LOOKS", round(GUARD_S / stacks.LOOK_S))
    paths = tmp_path / "0", tmp_path / "1"
    paths[0].write_text(
        'Thread 0x0000000000000001 (most recent call first):\n  File "old.py", line 1 in old\n'
    )
    with worker(paths[0]) as first, worker(paths[1]) as second:
        told = await stacks_of(first.pid, second.pid)
    stack = (
        r"  main thread\n    File \"<string>\", line \d+ in <module>\n    File \"<string>\", line \d+ in train\n"
        r"  another thread\n(    File .*\n)+    File \"<string>\", line \d+ in aside\n(    File .*\n?)+"
    )
    heads = [
        rf"worker n1/{slot} \(rank {4 + slot}, pid {pid}\):\n"
        for slot, pid in enumerate((first.pid, second.pid))
    ]
    assert re.fullmatch(f"{heads[0]}{stack}\n{heads[1]}{stack}", told), told


@asynchronous
async def test_what_cannot_be_had_is_said_in_a_line_for_each_worker(tmp_path: Path) -> None:
    with (
        worker(Path(os.devnull)) as silent,
        worker(tmp_path / "1") as frozen,
        worker(tmp_path / "2", "without") as deaf,
    ):
        freeze(frozen.pid)
        told = (await stacks_of(silent.pid, frozen.pid, deaf.pid)).split("\n\n")
        pending = re.findall(r"(?m)^ShdPnd:\s(\w+)", Path(f"/proc/{frozen.pid}/status").read_text())
        assert deaf.poll() is None, "it would die of the signal"
    assert told == [
        f"worker n1/0 (rank 4, pid {silent.pid}): requested, see /dev/null",
        (
            f"worker n1/1 (rank 5, pid {frozen.pid}): not possible: stopped by a signal or a debugger (state T); "
            f"kill -CONT {frozen.pid} continues it"
        ),
        (
            f"worker n1/2 (rank 6, pid {deaf.pid}): not possible: started cold, or executed itself again (exec), and "
            "its script has not imported elastic_agent.client"
        ),
    ]
    assert not int(pending[0], 16) & 1 << STACKS_SIGNAL - 1, (
        "it would write its stacks long after it was asked"
    )


@asynchronous
async def test_a_worker_with_a_process_group_answers_by_itself() -> None:
    pid = os.getpid()
    with listening() as collectives:
        answering = Worker(collectives, pid=pid)
        await until(collectives, 0, answered=False)
        asking = asyncio.create_task(worker_stacks("n1", Progress(1, {0: pid}, {}), 0, collectives, ""))
        assert await answering.question() == b"stacks"
        answering.say(stacks='Thread 0x01 (most recent call first):\n  File "train.py", line 7 in step\n')
        told = await asking
    assert told == f'worker n1/0 (rank 0, pid {pid}):\n  main thread\n    File "train.py", line 7 in step'
