"""Output files stay below their limit while workers write to them, and what is kept can be found."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent import linux
from elastic_agent.workers.output import generation_logs
from elastic_agent.workers.output.generation_logs import GenerationLogs, LogLimit, Streams
from tests.cli.support import LONG_LEASE, elastic_agent
from tests.waiting import GUARD_S
from tests.workers.test_logs import environments

LIMIT = 96 * 1024
PART = LIMIT // 3
LINE_BYTES = 64


def lines(first: int, last: int) -> bytes:
    """Numbered lines of one length."""
    return b"".join(f"{number:0{LINE_BYTES - 1}d}\n".encode() for number in range(first, last))


def numbers(content: bytes) -> list[int]:
    return [int(line) for line in content.split(b"\n") if line.isdigit()]


class Writer:
    """Appends as workers do: the descriptor is opened once, O_APPEND, and kept."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.written = 0

    def write(self, count: int) -> None:
        os.write(self._fd, lines(self.written, self.written + count))
        self.written += count


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stdout.log"


@pytest.fixture
def writer(path: Path) -> Writer:
    return Writer(path)


# --- their size -----------------------------------------------------------------------------------


def taken(path: Path) -> int:
    """Return the space that a file takes."""
    return path.stat().st_blocks * 512


def kept_in(path: Path) -> tuple[list[int], list[int]]:
    """Return the numbers of the whole lines before and behind the hole."""
    first, mark, rest = path.read_bytes().partition(b"\n[elastic-agent: output was removed here")
    assert mark
    return numbers(first), numbers(rest.replace(b"\0", b""))


def finish(path: Path) -> None:
    """End the generation, before a check was due."""
    limit = LogLimit(LIMIT, check_every_s=1000)
    limit.watch({str(path)})
    limit.close(GUARD_S)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == generation_logs.__name__]


def test_output_within_the_limit_is_complete(path: Path, writer: Writer) -> None:
    writer.write(LIMIT // LINE_BYTES)
    finish(path)
    assert path.read_bytes() == lines(0, writer.written)
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_grew_far_too_large_keeps_its_beginning_and_its_end(path: Path, writer: Writer) -> None:
    writer.write(20 * LIMIT // LINE_BYTES)
    finish(path)
    assert taken(path) <= LIMIT
    assert path.stat().st_size == writer.written * LINE_BYTES, "who follows the file goes on where it was"
    first, last = kept_in(path)
    assert first == [*range(PART // LINE_BYTES)]
    assert last == [*range(writer.written - PART // LINE_BYTES, writer.written)]


def test_a_worker_that_never_pauses_is_kept_within_the_limit(path: Path) -> None:
    """Its output is looked after while it comes as fast as it can."""
    code = f"""
import os
for number in range(60001):
    os.write(1, b"%0{LINE_BYTES - 1}d\\n" % number)
"""
    limit = LogLimit(LIMIT, check_every_s=0.001)
    limit.watch({str(path)})
    with path.open("ab") as file:
        subprocess.run([sys.executable, "-S", "-c", code], stdout=file, check=True)
    limit.close(GUARD_S)
    assert taken(path) <= LIMIT
    first, last = kept_in(path)
    assert first == [*range(PART // LINE_BYTES)]
    assert last == [*range(last[0], 60001)], "in order, without a gap"
    assert len(last) >= PART // LINE_BYTES - 1


def test_files_of_a_generation_are_limited_when_the_next_begins(path: Path, writer: Writer) -> None:
    limit = LogLimit(LIMIT, check_every_s=1000)
    limit.watch({str(path)})
    writer.write(20 * LIMIT // LINE_BYTES)
    limit.watch({f"{path}-of-the-next"})
    limit.close(GUARD_S)
    assert taken(path) <= LIMIT


def test_a_file_system_without_holes_is_reported_once(
    path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linux, "_FALLOC_FL_PUNCH_HOLE", 0x4000)  # no such operation
    writer.write(2 * LIMIT // LINE_BYTES)
    os.fsync(os.open(path, os.O_RDONLY))
    limit = LogLimit(LIMIT, check_every_s=1000)
    limit.watch({str(path)})
    limit.watch({str(path)})
    with caplog.at_level(logging.WARNING):
        limit.close(GUARD_S)
    (warning,) = warnings_of(caplog)
    assert "below --log-limit: the file system cannot make holes in files" in warning
    assert path.read_bytes() == lines(0, writer.written)


# --- which files ----------------------------------------------------------------------------------


def test_all_files_of_output_are_limited_if_they_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = GenerationLogs(str(tmp_path), {0: Streams.ALL}, limit_bytes=LIMIT)
    files = logs.reify(environments())
    written = [Path(path) for path in (files.stdouts[0], files.filtered_stdout, files.filtered_stderr)]
    for path in written:
        Writer(path).write(20 * LIMIT // LINE_BYTES)
    logs.close()
    assert all(taken(path) <= LIMIT for path in written)
    assert warnings_of(caplog) == [], "there is no stderr.log"


WORKER = """
print("the beginning")
print("filler\\n" * 200000)
print("the end")
"""


@pytest.mark.prove
def test_an_agent_keeps_its_workers_files_small(tmp_path: Path) -> None:
    """All of it comes at once, so that the agent may look only when the worker has ended."""
    (tmp_path / "worker.py").write_text(WORKER)
    folders = ["--state-dir", str(tmp_path / "state"), "--log-dir", str(tmp_path / "logs")]
    done = elastic_agent(
        "-r", "3", "--log-limit", "96K", *folders, str(tmp_path / "worker.py"), variables=LONG_LEASE
    )
    assert done.returncode == 0, done.stderr
    (node,) = (tmp_path / "logs" / "latest" / "latest").iterdir()
    content = (node / "0" / "stdout.log").read_text()
    assert taken(node / "0" / "stdout.log") <= LIMIT
    assert content.startswith("the beginning\nfiller\n")
    assert content.endswith("the end\n")
    assert (node / "0" / "stderr.log").read_text() == ""
