"""The output of workers is on the console as it would be without the guard, and in a bounded file for each of them."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from queue import SimpleQueue

import pytest

from elastic_agent import linux
from elastic_agent.linux import read_process
from elastic_agent.workers.guard.client import Launch
from elastic_agent.workers.guard.kept_output import KeptOutput, KeptOutputs
from tests.small_disk import run_on_small_disk
from tests.waiting import wait_for
from tests.workers.support import PATIENCE_S, StandIn, agent_with, program, python
from tests.workers.test_guard_output import read_until

ORDER = "for i in $(seq 50); do echo out $i; echo err $i >&2; done"
IN_ORDER = "".join(f"out {i}\nerr {i}\n" for i in range(1, 51)).encode()


@contextmanager
def agent_on_pipes(*, is_one: bool = False) -> Iterator[tuple[StandIn, FileIO, FileIO]]:
    """Run an agent whose stdout and stderr are pipes, or one pipe; yields the ends at which they are read, too."""
    out, their_out = os.pipe()
    err, their_err = (os.dup(out), their_out) if is_one else os.pipe()
    with open(out, "rb", 0) as shown, open(err, "rb", 0) as errors, agent_with(their_out, their_err) as agent:
        yield agent, shown, errors


def shell(script: str, kept: Path | None, slot: int = 0, **fields: str) -> Launch:
    return program(slot, "sh", "-c", script, kept=str(kept) if kept is not None else None, **fields)


def ended(agent: StandIn) -> int:
    """Wait for a worker and then for all that it left; return its code."""
    code: int = agent.until("Exited")["returncode"]
    agent.stop()
    return code


# --- through the guard ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "terminal", "file"])
def test_both_streams_of_a_worker_keep_their_order_if_they_go_to_the_same_place(
    tmp_path: Path, kind: str
) -> None:
    """There, and in the file in which they are kept."""
    log = tmp_path / "log"
    if kind == "file":
        log.touch()
        read_end, write_end = os.open(log, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND)
    else:
        read_end, write_end = os.pipe() if kind == "pipe" else os.openpty()
    with agent_with(write_end, write_end) as agent:
        agent.spawn(shell(ORDER, tmp_path / "output.log"))
        shown = read_until(read_end, b"err 50") if kind != "file" else b""
        assert ended(agent) == 0
    os.close(read_end)
    shown = log.read_bytes() if kind == "file" else shown
    assert shown.replace(b"\r\n", b"\n").strip() == IN_ORDER.strip()
    assert (tmp_path / "output.log").read_bytes() == IN_ORDER


def test_streams_that_go_to_different_places_go_there_and_into_one_file(tmp_path: Path) -> None:
    with agent_on_pipes() as (agent, out, err):
        agent.spawn(shell("echo to out; echo to err >&2; exit 7", tmp_path / "output.log"))
        assert agent.until("Exited")["stderr_tail"] == "to err\n"
        assert (read_until(out, b"\n"), read_until(err, b"\n")) == (b"to out\n", b"to err\n")
        agent.stop()
    assert sorted((tmp_path / "output.log").read_text().splitlines()) == ["to err", "to out"]


def test_output_that_is_not_shown_is_kept(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with agent_with(write_end, write_end) as agent:
        agent.spawn(shell(ORDER, tmp_path / "output.log", stdout=os.devnull, stderr=os.devnull))
        assert ended(agent) == 0
    assert os.read(read_end, 1) == b""
    os.close(read_end)
    assert (tmp_path / "output.log").read_bytes() == IN_ORDER


def test_a_worker_that_prints_nothing_has_no_file(tmp_path: Path) -> None:
    with agent_on_pipes(is_one=True) as (agent, *_):
        agent.spawn(shell("true", tmp_path / "output.log"))
        assert ended(agent) == 0
    assert os.listdir(tmp_path) == []


def test_stdout_that_is_a_file_is_the_workers_own(tmp_path: Path) -> None:
    """A result may be written there: the worker sees the file, and that its disk is full."""
    result, nowhere = os.open(tmp_path / "result", os.O_WRONLY | os.O_CREAT), os.open(os.devnull, os.O_RDWR)
    with agent_with(result, nowhere) as agent:
        agent.spawn(shell("readlink /proc/self/fd/1; echo to err >&2", tmp_path / "output.log"))
        assert ended(agent) == 0
    assert (tmp_path / "result").read_text() == f"{tmp_path / 'result'}\n"
    assert (tmp_path / "output.log").read_text() == "to err\n"
    with agent_with(os.open("/dev/full", os.O_WRONLY), os.open(os.devnull, os.O_WRONLY)) as agent:
        agent.spawn(shell("echo result", tmp_path / "full.log"))
        assert ended(agent) != 0


def test_on_a_terminal_stdout_is_one_whose_size_follows(tmp_path: Path) -> None:
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    code = f"""
        import os, sys
        os.write(1, f"{{os.isatty(1)}} {{os.get_terminal_size(1).columns}}".encode())
        open({str(fifo)!r}).read()
        os.write(1, b".")
        while (columns := os.get_terminal_size(1).columns) == 77:
            os.write(1, b".")
        os.write(1, f"now {{columns}}".encode())
    """
    screen, terminal = os.openpty()

    def resize(columns: int) -> None:
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 33, columns, 0, 0))

    resize(77)
    with agent_with(terminal, terminal) as agent:
        agent.spawn(python(0, code, kept=str(tmp_path / "output.log")))
        assert read_until(screen, b"77") == b"True 77"
        resize(120)
        fifo.write_text("")
        assert read_until(screen, b"now 120").startswith(b".")
        assert ended(agent) == 0
    os.close(screen)


def test_a_worker_gets_the_error_of_a_pipe_that_nobody_reads_any_more(tmp_path: Path) -> None:
    code = """
        import os, sys
        try:
            while True:
                os.write(1, b"more\\n")
        except BrokenPipeError:
            sys.exit(5)
    """
    with agent_on_pipes() as (agent, out, _):
        agent.spawn(python(0, code, kept=str(tmp_path / "output.log")))
        read_until(out, b"more")
        out.close()
        assert ended(agent) == 5
        agent.start(python(0, code, kept=str(tmp_path / "output.log")), generation=2)
        assert agent.until("Exited")["returncode"] == 5, "neither are later ones told that all is well"


def test_workers_go_on_when_the_reader_of_their_log_is_gone(tmp_path: Path) -> None:
    """Ctrl-C ends `tee` in `elastic-agent train.py 2>&1 | tee log`, too, and workers save then."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with agent_on_pipes(is_one=True) as (agent, *ends):
        agent.spawn(shell(f"echo ready; cat {gate}; echo saving && echo saved", tmp_path / "output.log"))
        read_until(ends[0], b"ready")
        for end in ends:
            end.close()
        gate.write_text("")
        assert ended(agent) == 0
    assert (tmp_path / "output.log").read_text() == "ready\nsaving\nsaved\n"


@pytest.mark.parametrize("code", [0, 3])
def test_a_worker_has_ended_when_its_output_was_taken(tmp_path: Path, code: int) -> None:
    """As without the guard, where it would still be writing: nothing is lost if the reader pauses."""
    with agent_on_pipes() as (agent, out, err):
        # A pipe of the guard, however small, has room for the rest.
        size = fcntl.fcntl(out, fcntl.F_GETPIPE_SZ) + 2000
        script = f"head -c {size} /dev/zero; echo end; echo done >&2; exit {code}"
        (pid,) = agent.spawn(shell(script, tmp_path / "output.log")).values()
        read_until(err, b"done")
        wait_for("the end of the process", lambda: read_process(pid) is None)
        for _ in range(2):  # the guard has seen that end when it has seen one signal and then another
            os.kill(agent.guard_pid, signal.SIGUSR1)
            agent.until("Signalled")
        assert "Exited" not in [event["name"] for event in agent.events]
        assert len(read_until(out, b"end\n")) == size + 4
        assert ended(agent) == code


def test_a_reader_that_does_not_read_keeps_no_worker_from_being_stopped(tmp_path: Path) -> None:
    with agent_on_pipes() as (agent, _, err):
        agent.spawn(
            shell("echo go >&2; exec cat /dev/zero", tmp_path / "0.log"),
            shell("head -c 60000 /dev/zero; echo done >&2", tmp_path / "1.log", slot=1),
        )
        read_until(err, b"done")
        agent.stop()


# --- the file -------------------------------------------------------------------------------------


LIMIT = 96 * 1024
PART = LIMIT // 3
LINE_BYTES = 64


def lines(first: int, last: int) -> bytes:
    """Numbered lines of one length."""
    return b"".join(f"{number:0{LINE_BYTES - 1}d}\n".encode() for number in range(first, last))


def numbers(content: bytes) -> list[int]:
    return [int(line) for line in content.split(b"\n") if line.isdigit()]


def kept_in(content: bytes) -> tuple[list[int], list[int]]:
    """Return the numbers of the whole lines before and behind the hole."""
    first, mark, rest = content.partition(b"\n[elastic-agent: output was removed here")
    assert mark
    return numbers(first), numbers(rest.replace(b"\0", b""))


def taken(path: Path) -> int:
    """Return the space that a file takes."""
    return path.stat().st_blocks * 512


def write_lines(path: Path, count: int) -> None:
    outputs = KeptOutputs()
    file = outputs.open(str(path), LIMIT)
    for first in range(0, count, 100):
        file.put(lines(first, min(first + 100, count)))
    file.close()
    outputs.finish(PATIENCE_S)


def test_output_within_the_limit_is_complete(tmp_path: Path) -> None:
    write_lines(tmp_path / "log", LIMIT // LINE_BYTES)
    assert (tmp_path / "log").read_bytes() == lines(0, LIMIT // LINE_BYTES)


@pytest.mark.parametrize("holes", [True, False], ids=["with holes", "on a disk without holes"])
def test_of_more_output_the_beginning_and_the_end_are_kept(
    tmp_path: Path, holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not holes:
        monkeypatch.setattr(linux, "_FALLOC_FL_PUNCH_HOLE", 0x4000)  # no such operation
    path, count = tmp_path / "log", 7 * LIMIT // LINE_BYTES + 5
    write_lines(path, count)
    first, last = kept_in(path.read_bytes())
    assert first == [*range(PART // LINE_BYTES)]
    assert last == [*range(last[0], count)], "in order, without a gap"
    assert len(last) >= PART // LINE_BYTES - 1
    assert taken(path) <= LIMIT + 8192
    if holes:
        assert path.stat().st_size == count * LINE_BYTES, "who follows the file goes on where it was"


def test_a_disk_that_stands_still_costs_no_more_than_a_megabyte_and_the_gap_is_told(tmp_path: Path) -> None:
    queue: SimpleQueue[tuple[KeptOutput, bytes | None, int] | None] = SimpleQueue()  # nobody reads it yet
    file = KeptOutput(str(tmp_path / "log"), 0, queue)
    for size in (64 * 1024, 10):
        for _ in range(5000):
            file.put(b"x" * size)
    put = 5000 * (64 * 1024 + 10)
    waiting = [queue.get() for _ in range(queue.qsize())]
    held = sum(sys.getsizeof(entry) + sys.getsizeof(entry[1]) for entry in waiting if entry is not None)
    assert held <= 1024 * 1024

    def write_all() -> None:
        while waiting:
            entry = waiting.pop(0)
            assert entry is not None
            entry[0].write(entry[1], entry[2])

    write_all()
    file.put(b"later\n")
    file.close()
    waiting += [queue.get(), queue.get()]
    write_all()
    content = (tmp_path / "log").read_bytes()
    note = rb"\n\[elastic-agent: (\d+) bytes of output are missing here: the disk was too slow\]\n"
    missing = sum(map(int, re.findall(note, content)))
    assert len(re.sub(note, b"", content)) + missing == put + len(b"later\n")
    assert content.endswith(b"too slow]\nlater\n")


FULL = """
import sys
from pathlib import Path
from elastic_agent.workers.guard.kept_output import KeptOutputs
path = Path(sys.argv[1], "log")
filler = Path(sys.argv[1], "filler")
outputs = KeptOutputs()
file = outputs.open(str(path), 0)
file.put(b"first\\n")
while not path.exists() or not path.stat().st_size:
    pass
with open(filler, "wb", buffering=0) as other:
    try:
        while True:
            other.write(bytes(4096))
    except OSError:
        pass
for _ in range(10):
    file.put(b"y" * 10000)
while file._done_bytes != file._queued_bytes:
    pass
filler.unlink()
file.put(b"last\\n")
file.close()
outputs.finish(1000)
sys.stdout.write(path.read_text())
"""


def test_a_full_disk_costs_what_does_not_fit_and_is_told_when_there_is_room(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = run_on_small_disk(tmp_path, "64k", command)
    assert done.stderr == ""
    assert done.stdout.startswith("first\n")
    assert done.stdout.endswith(
        "\n[elastic-agent: 100000 bytes of output are missing here: No space left on device]\nlast\n"
    )
