"""Output files stay below their limit while workers write to them, and what is kept can be found."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import Std

from elastic_agent.workers.output import log_limit
from elastic_agent.workers.output.generation_logs import GenerationLogs
from elastic_agent.workers.output.log_limit import LogLimit, OutputFiles, begin_anew, take_out_middle
from elastic_agent.workers.output.tee import Tee

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

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stdout.log"


@pytest.fixture
def writer(path: Path) -> Writer:
    return Writer(path)


# --- files that only the workers use --------------------------------------------------------------


def test_a_small_file_is_not_changed(path: Path, writer: Writer) -> None:
    writer.write(PART // LINE_BYTES)
    begin_anew(str(path), LIMIT)
    assert os.listdir(path.parent) == ["stdout.log"]


def kept_in(path: Path) -> list[int]:
    """The numbers of the lines of the newest part and, if it is there, the one before; not of a line that was cut."""
    before = Path(f"{path}.previous")
    return numbers((before.read_bytes() if before.exists() else b"") + path.read_bytes())[1:]


def taken(path: Path) -> int:
    """By it and its parts."""
    return sum(file.stat().st_size for file in path.parent.iterdir())


@pytest.fixture(params=["collapse", "truncate"])
def file_system(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that can take blocks off the beginning of a file, and one that cannot."""
    if request.param == "truncate":
        monkeypatch.setattr(log_limit, "_FALLOC_FL_COLLAPSE_RANGE", 0x4000)  # no such operation
    elif not can_collapse(tmp_path / "probe"):
        pytest.skip("the file system of the temporary folder cannot take blocks off the beginning of a file")


def can_collapse(probe: Path) -> bool:
    probe.write_bytes(bytes(128 * 1024))
    with probe.open("r+b") as file:
        able = log_limit._fallocate(file.fileno(), log_limit._FALLOC_FL_COLLAPSE_RANGE, 0, 64 * 1024)
    probe.unlink()
    return able


@pytest.mark.usefixtures("file_system")
def test_beginning_and_end_are_kept_in_order(path: Path, writer: Writer) -> None:
    per_round = PART // LINE_BYTES + 1
    for _ in range(5):
        writer.write(per_round)
        begin_anew(str(path), LIMIT)
        kept = sum(file.stat().st_size for file in path.parent.iterdir())
        assert kept <= LIMIT + 8192
        assert path.stat().st_size <= 8192
    writer.write(10)
    first = numbers(Path(f"{path}.first").read_bytes())
    assert first == [*range(len(first))]
    assert len(first) >= (PART - 4096) // LINE_BYTES
    assert (
        Path(f"{path}.previous")
        .read_bytes()
        .startswith(b"[elastic-agent: output between the .first file and this was removed")
    )
    end = kept_in(path)
    assert end == [*range(end[0], 5 * per_round + 10)]
    assert len(end) >= per_round


def write_without_pause(path: Path, last: int) -> None:
    """A worker's output is looked after while it comes as fast as it can."""
    code = f"""
import os
for number in range({last + 1}):
    os.write(1, b"%0{LINE_BYTES - 1}d\\n" % number)
"""
    limit = LogLimit(LIMIT, check_every_s=0.001)
    limit.watch(OutputFiles(plain=frozenset({str(path)})))
    with path.open("ab") as file:
        subprocess.run([sys.executable, "-S", "-c", code], stdout=file, check=True)
    limit.close(20)


@pytest.mark.usefixtures("file_system")
def test_a_worker_that_never_pauses_is_kept_within_the_limit(path: Path) -> None:
    write_without_pause(path, 60000)
    first = numbers(Path(f"{path}.first").read_bytes())
    assert first == [*range(len(first))]
    end = kept_in(path)
    assert end == sorted(end)
    assert Path(f"{path}.first").stat().st_size <= PART
    assert taken(path) <= LIMIT


@pytest.mark.usefixtures("file_system")
def test_a_file_that_grew_far_too_large_keeps_its_beginning_and_its_end(path: Path, writer: Writer) -> None:
    writer.write(20 * LIMIT // LINE_BYTES)
    begin_anew(str(path), LIMIT)
    first = numbers(Path(f"{path}.first").read_bytes())
    assert first == [*range(len(first))]
    end = kept_in(path)
    assert end == [*range(end[0], writer.written)]
    assert min(len(first), len(end)) >= PART // LINE_BYTES - 4096 // LINE_BYTES
    assert sum(file.stat().st_size for file in path.parent.iterdir()) <= LIMIT


def test_nothing_is_lost_if_blocks_can_be_removed_from_a_file(path: Path) -> None:
    if not can_collapse(path):
        pytest.skip("the file system of the temporary folder cannot take blocks off the beginning of a file")
    write_without_pause(path, 60000)
    end = kept_in(path)
    assert end == [*range(end[0], 60001)], "in order, without a gap"


def test_on_a_full_disk_output_is_dropped_to_free_space(
    path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log_limit, "_copy", full)
    writer.write(LIMIT // LINE_BYTES)
    begin_anew(str(path), LIMIT)
    assert path.stat().st_size == 0
    assert "not enough space to keep all of" in caplog.text


# --- at the end of a generation -------------------------------------------------------------------


def finish(path: Path) -> None:
    """The generation ends, and no look was due before."""
    limit = LogLimit(LIMIT, check_every_s=1000)
    limit.watch(OutputFiles(plain=frozenset({str(path)})))
    limit.close(20)


def test_output_since_the_last_check_is_cut_at_the_end(path: Path, writer: Writer) -> None:
    """The first, and the last, that is: it may be the only one."""
    writer.write(20 * LIMIT // LINE_BYTES)
    finish(path)
    assert taken(path) <= LIMIT
    first = numbers(Path(f"{path}.first").read_bytes())
    assert first == [*range(PART // LINE_BYTES)]
    assert path.read_bytes().startswith(
        b"[elastic-agent: output between the .first file and this was removed"
    )
    end = kept_in(path)
    assert end == [*range(end[0], writer.written)]
    assert len(end) > 2 * PART // LINE_BYTES - 5
    assert not Path(f"{path}.previous").exists()


@pytest.mark.usefixtures("file_system")
@pytest.mark.parametrize("parts", [0.1, 1.5, 3, 20])
def test_the_parts_moved_away_earlier_count_and_the_end_is_whole(
    path: Path, writer: Writer, parts: float
) -> None:
    for count in (2.5, 1.9, parts):
        begin_anew(str(path), LIMIT)
        writer.write(int(count * PART) // LINE_BYTES)
    finish(path)
    assert taken(path) <= LIMIT
    assert Path(f"{path}.first").stat().st_size >= PART - 4096
    end = kept_in(path)
    assert end == [*range(end[0], writer.written)]
    assert len(end) > PART // LINE_BYTES


def test_output_within_the_limit_is_complete(path: Path, writer: Writer) -> None:
    writer.write(LIMIT // LINE_BYTES)
    finish(path)
    assert path.read_bytes() == lines(0, writer.written)
    assert os.listdir(path.parent) == [path.name]


def test_files_of_a_generation_are_limited_when_the_next_begins(path: Path, writer: Writer) -> None:
    limit = LogLimit(LIMIT, check_every_s=1000)
    limit.watch(OutputFiles(plain=frozenset({str(path)})))
    writer.write(20 * LIMIT // LINE_BYTES)
    limit.watch(OutputFiles(plain=frozenset({f"{path}-of-the-next"})))
    limit.close(20)
    assert taken(path) <= LIMIT


# --- files that are followed ------------------------------------------------------------------------


class Console(StringIO):
    """What is shown of followed files; awaits a line."""

    def __init__(self) -> None:
        super().__init__()
        self._awaited = ""
        self._seen = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if self._awaited and text.endswith(self._awaited):
            self._seen.set()
        return count

    def wait_for(self, number: int, timeout_s: float) -> bool:
        self._seen.clear()
        self._awaited = f"{number:0{LINE_BYTES - 1}d}\n"
        return self._awaited in self.getvalue() or self._seen.wait(timeout_s)


def test_a_followed_file_loses_its_middle_and_its_reader_gets_all(path: Path, writer: Writer) -> None:
    console = Console()
    tail = Tee({0: str(path)}, console, "[w{}]:".format, interval_s=0.01)
    tail.start()
    per_round = PART // LINE_BYTES
    for _ in range(8):
        writer.write(per_round)
        assert console.wait_for(writer.written - 1, 20)
        take_out_middle(str(path), LIMIT)
        assert path.stat().st_blocks * 512 <= LIMIT + 2 * 4096
    tail.stop()
    shown = [int(line.removeprefix("[w0]:")) for line in console.getvalue().splitlines()]
    assert shown == [*range(writer.written)]
    content = path.read_bytes()
    assert len(content) == writer.written * LINE_BYTES
    assert b"output was removed here" in content
    kept = numbers(content.replace(b"\0", b""))
    assert kept[: per_round - 1] == [*range(per_round - 1)]
    assert kept[1 - per_round :] == [*range(writer.written - per_round + 1, writer.written)]


def test_a_reader_loses_its_position_in_a_truncated_file(path: Path, writer: Writer) -> None:
    """Why such files are not cut as others are; if the reader learns to cope, they may be."""
    console = Console()
    tail = Tee({0: str(path)}, console, "[w{}]:".format, interval_s=0.01)
    tail.start()
    writer.write(PART // LINE_BYTES + 1)
    assert console.wait_for(writer.written - 1, 20)
    begin_anew(str(path), LIMIT)
    writer.write(10)
    assert not console.wait_for(writer.written - 1, 0.2)
    tail.stop()


def test_a_file_system_without_sparse_files_is_reported_once(
    path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "the file system does not support sparse files")

    monkeypatch.setattr(log_limit, "_punch_hole", unsupported)
    writer.write(2 * LIMIT // LINE_BYTES)
    os.fsync(os.open(path, os.O_RDONLY))
    limit = LogLimit(LIMIT)
    limit._files = OutputFiles(followed=frozenset({str(path)}))
    with caplog.at_level(logging.WARNING):
        limit.check()
        limit.check()
    assert len(caplog.records) == 1
    assert "below --log-limit: the file system does not support sparse files" in caplog.text
    assert path.read_bytes() == lines(0, writer.written)


def test_a_missing_file_is_ignored(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit = LogLimit(LIMIT)
    limit._files = OutputFiles(frozenset({str(path)}), frozenset({f"{path}.followed"}))
    limit.check()
    assert caplog.records == []


# --- which files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("redirects", "tee", "filtered", "plain", "followed"),
    [
        (Std.ALL, Std.NONE, Std.NONE, {"stdout.log", "stderr.log"}, set()),
        (Std.ALL, Std.ERR, Std.NONE, {"stdout.log"}, {"stderr.log"}),
        (Std.ALL, Std.NONE, Std.OUT, {"stderr.log"}, {"stdout.log", "filtered_stdout.log"}),
        (Std.NONE, Std.NONE, Std.NONE, set(), set()),
    ],
)
def test_files_that_torch_follows_are_not_truncated(
    tmp_path: Path, redirects: Std, tee: Std, filtered: Std, plain: set[str], followed: set[str]
) -> None:
    logs = GenerationLogs(str(tmp_path), redirects, tee, limit_bytes=LIMIT, filtered=filtered)
    logs.reify({0: {"ELASTIC_AGENT_NODE_ID": "n1"}})
    assert logs._limit is not None
    files = logs._limit._files
    logs.close()
    assert {Path(one).name for one in files.plain} == plain
    assert {Path(one).name for one in files.followed} == followed


WORKER = """
print("the beginning")
print("filler\\n" * 200000)
print("the end")
"""


def test_an_agent_keeps_its_workers_files_small(tmp_path: Path) -> None:
    """All of it comes at once, so that the agent may look only when the worker has ended."""
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "elastic_agent", "-r", "3", "--log-limit", "96K"]
    command += ["--state-dir", str(tmp_path / "state"), "--log-dir", str(tmp_path / "logs")]
    subprocess.run([*command, str(tmp_path / "worker.py")], check=True, timeout=100, capture_output=True)
    (node,) = (tmp_path / "logs" / "latest" / "latest").iterdir()
    outputs = [*(node / "0").glob("stdout.log*")]
    assert sum(file.stat().st_size for file in outputs) <= LIMIT
    assert (node / "0" / "stdout.log.first").read_text().startswith("the beginning\nfiller\n")
    assert (node / "0" / "stdout.log").read_text().endswith("the end\n")
    assert (node / "0" / "stderr.log").read_text() == ""
