"""Checks where the output of workers goes, and that its end is known after a failure."""

from __future__ import annotations

import os
import select
from io import FileIO
from pathlib import Path

from elastic_agent.workers.guard.client import Exited
from elastic_agent.workers.guard.line import TAIL_BYTES
from tests.workers.support import (
    PATIENCE_S,
    Driver,
    News,
    agent_with_stderr,
    daemonising,
    program,
    python,
)

BOOM = "import sys; sys.stderr.write('first line\\nlast words'); sys.exit(1)"


def read_until(source: int | FileIO, wanted: bytes) -> bytes:
    """Return what comes out of a descriptor, until it contains `wanted`."""
    fd = source if isinstance(source, int) else source.fileno()
    seen = b""
    while wanted not in seen:
        assert select.select((fd,), (), (), PATIENCE_S)[0], f"{wanted!r} did not come, only {seen!r}"
        seen += os.read(fd, 65536)
    return seen


def test_stderr_is_forwarded_while_the_worker_runs() -> None:
    """Progress bars end no line."""
    with agent_with_stderr("socket") as (agent, read_end):
        agent.spawn(python(0, "import os, time; os.write(2, b'50 %\\r'); time.sleep(1000)"))
        assert read_until(read_end, b"50 %\r") == b"50 %\r"


def test_output_of_a_grandchild_after_the_workers_exit_is_forwarded(news: News, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    speaks = f"open({str(gate)!r}).read(); os.write(2, b'late words')"
    with agent_with_stderr("pipe") as (agent, read_end):
        agent.spawn(daemonising(0, news, daemon=speaks, worker="sys.exit(0)"))
        agent.until("Exited")
        gate.write_text("")  # returns when the grandchild has opened it, too
        assert read_until(read_end, b"late words")
        agent.stop()


def test_the_tail_of_stderr_is_kept_if_stderr_is_not_shown(driver: Driver) -> None:
    script = "head -c 100000 /dev/zero | tr '\\0' x >&2; echo the end >&2; exit 1"
    driver.guard.spawn(1, [program(0, "sh", "-c", script, stderr=os.devnull)])
    assert driver.until(Exited).stderr_tail == "x" * (TAIL_BYTES - 8) + "the end\n"


def test_files_are_appended_to_and_may_be_one_for_both(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "both.log"
    path.write_text("kept\n")
    script = "echo out; echo err >&2; echo out again"
    driver.guard.spawn(1, [program(0, "sh", "-c", script, stdout=str(path), stderr=str(path))])
    driver.until(Exited)
    assert path.read_text() == "kept\nout\nerr\nout again\n"


def test_binary_stderr_is_accepted(driver: Driver) -> None:
    driver.guard.spawn(1, [python(0, "import os; os.write(2, bytes(range(256))); os._exit(1)")])
    assert "abc" in driver.until(Exited).stderr_tail
    driver.stop()
