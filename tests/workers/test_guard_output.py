"""What workers print goes where it should, and the end of what they said before they failed is known."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
from contextlib import closing
from pathlib import Path

from elastic_agent.workers.guard.client import Exited, Stopped
from elastic_agent.workers.guard.messages import TAIL_BYTES
from elastic_agent.workers.guard.relay import _threaded_sink
from tests.workers.support import (
    PATIENCE_S,
    Driver,
    News,
    StandIn,
    agent_with_stderr,
    daemonising,
    program,
    python,
)

BOOM = "import sys; sys.stderr.write('first line\\nlast words'); sys.exit(1)"


def read_until(fd: int, wanted: bytes) -> bytes:
    """What comes out of `fd`, until it contains `wanted`."""
    seen = b""
    while wanted not in seen:
        assert select.select((fd,), (), (), PATIENCE_S)[0], f"{wanted!r} did not come, only {seen!r}"
        seen += os.read(fd, 65536)
    return seen


def test_stderr_without_a_final_newline_is_complete() -> None:
    with agent_with_stderr("pipe") as (agent, read_end):
        agent.spawn(python(0, BOOM))
        assert agent.until("Exited")["stderr_tail"] == "first line\nlast words"
        assert read_until(read_end, b"words") == b"first line\nlast words"


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
        agent.do("stop", grace_s=0.0)
        agent.until("Stopped")


def test_a_regular_file_takes_everything(tmp_path: Path) -> None:
    with open(tmp_path / "log", "ab", buffering=0) as log:
        log.write(b"before\n")
        with closing(StandIn(stderr=log.fileno())) as agent:
            agent.spawn(*(python(slot, "import os; os.write(2, b'x' * 300_000)") for slot in range(3)))
            for _ in range(3):
                assert agent.until("Exited")["returncode"] == 0
    assert (tmp_path / "log").read_bytes() == b"before\n" + b"x" * 900_000


def test_blocked_output_is_queued_without_blocking() -> None:
    """Such as a file on a server that does not answer; here a pipe that may not be opened a second time."""
    read_end, write_end = os.pipe()
    sink = _threaded_sink(write_end)
    while not sink.blocked:
        sink.put(b"x" * 65536)
    assert not sink.finish(0.05)
    os.close(read_end)
    # Only then: its thread would write what is left to the next file of this number.
    assert sink._writer is not None
    assert sink._writer.ended(PATIENCE_S)
    os.close(write_end)


def test_queued_output_is_written_in_order_and_can_be_flushed() -> None:
    read_end, write_end = os.pipe()
    sink = _threaded_sink(write_end)
    lines = [f"line {number}\n".encode() for number in range(2000)]
    for line in lines:
        sink.put(line)
    assert sink.finish(PATIENCE_S)
    assert read_until(read_end, lines[-1]) == b"".join(lines)
    os.close(read_end)
    os.close(write_end)


def test_the_tail_of_stderr_is_kept_if_stderr_is_not_shown(driver: Driver) -> None:
    script = "head -c 100000 /dev/zero | tr '\\0' x >&2; echo the end >&2; exit 1"
    driver.guard.spawn(1, [program(0, "sh", "-c", script, stderr=os.devnull)])
    assert driver.until(Exited).stderr_tail == "x" * (TAIL_BYTES - 8) + "the end\n"


def test_a_worker_that_succeeds_has_no_tail(driver: Driver) -> None:
    driver.guard.spawn(1, [program(0, "sh", "-c", "echo warning >&2")])
    assert driver.until(Exited).stderr_tail == ""


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
    driver.guard.stop(0.0)
    driver.until(Stopped)


def test_on_a_terminal_stderr_stays_a_terminal_of_the_same_size() -> None:
    code = """
        import os, sys
        size = os.get_terminal_size(2)
        os.write(2, f"{os.isatty(2)} {size.lines} {size.columns}\\r50 %\\nboom".encode())
        sys.exit(1)
    """
    with agent_with_stderr("terminal") as (agent, read_end):
        fcntl.ioctl(read_end, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
        agent.spawn(python(0, code))
        assert agent.until("Exited")["stderr_tail"] == "True 33 77\r50 %\nboom"
        # The terminal itself, and only that, turns a line's end into what terminals want.
        assert read_until(read_end, b"boom") == b"True 33 77\r50 %\r\nboom"


def test_workers_continue_when_the_reader_of_stderr_is_gone(news: News) -> None:
    read_end, write_end = os.pipe()
    code = """
        import os, sys
        for _ in range(100):
            os.write(2, b"x" * 65536)
        os.write(os.open(sys.argv[1], os.O_WRONLY), b"went on\\n")
    """
    with closing(StandIn(stderr=write_end)) as agent:
        os.close(write_end)
        os.close(read_end)
        agent.spawn(python(0, code, str(news.path)))
        assert news.line() == "went on"
        assert agent.until("Exited")["returncode"] == 0
