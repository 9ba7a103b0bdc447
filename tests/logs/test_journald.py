"""The log in systemd's journal: fields of an entry, and what happens when the journal is not available."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import struct
from pathlib import Path

import pytest

from elastic_agent.logs import journald
from elastic_agent.logs.journald import LARGEST_BYTES, JournalHandler, entry, is_journal

MORE_THAN_IT_HOLDS = 6
"""So many of the largest entries; a socket holds 200 KB."""

BASICS = {"time": 0.0, "level": "warning", "event": "it is late"}


def fields_of(datagram: bytes) -> dict[str, str]:
    """Read an entry as journald does."""
    found = {}
    while datagram:
        line, _, datagram = datagram.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            (size,) = struct.unpack("<Q", datagram[:8])
            value, end, datagram = datagram[8 : 8 + size], datagram[8 + size : 9 + size], datagram[9 + size :]
            assert end == b"\n"
        found[name.decode()] = value.decode()
    return found


def test_an_events_values_are_fields_and_in_the_message_unless_it_says_them_in_words() -> None:
    facts = {"waited_s": 2.5, "world_size": 13, "failed": None}
    event = {**BASICS, "run": "digits", "node": "n1", "generation": 3, **facts}
    assert fields_of(entry(event)) == {
        "MESSAGE": "it is late waited_s=2.5 failed=None",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "elastic-agent",
        "ELASTIC_RUN": "digits",
        "ELASTIC_NODE": "n1",
        "ELASTIC_GENERATION": "3",
        "ELASTIC_WAITED_S": "2.5",
        "ELASTIC_WORLD_SIZE": "13",
    }


def test_worker_output_is_not_parsed_as_journal_fields() -> None:
    fields = fields_of(entry({**BASICS, "tail": "Traceback\nPRIORITY=0\n\ud800"}))
    assert fields["PRIORITY"] == "4"
    assert fields["ELASTIC_TAIL"] == "Traceback\nPRIORITY=0\n\\ud800"
    assert fields["MESSAGE"].splitlines()[:2] == ["it is late", "    tail:"]


def test_invalid_field_names_and_values_are_adapted_to_the_journal() -> None:
    fields = fields_of(entry({**BASICS, "gpu-memory (ö)": 1, "n" * 200: 2, "big": "x" * (LARGEST_BYTES + 1)}))
    assert fields["ELASTIC_GPU_MEMORY____"] == "1"
    assert fields[f"ELASTIC_{'N' * 56}"] == "2"
    assert len(fields["ELASTIC_BIG"]) == LARGEST_BYTES


def test_only_a_stream_to_the_journal_is_detected_as_one(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        found = os.fstat(stream.fileno())
        assert is_journal(stream, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"})
        assert not is_journal(stream, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino + 1}"})
        assert not is_journal(stream, {})
    assert not is_journal(stream, {"JOURNAL_STREAM": "8:1"}), "it is closed"
    assert not is_journal(io.StringIO(), {"JOURNAL_STREAM": "8:1"})


@pytest.fixture
def handler(tmp_path: Path) -> tuple[JournalHandler, io.StringIO, str]:
    stderr, address = io.StringIO(), str(tmp_path / "journal")
    handler = JournalHandler(stderr, address)
    handler.setFormatter(logging.Formatter('{"time": 0, "level": "info", "event": "%(message)s"}'))
    return handler, stderr, address


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, "", 0, message, (), None)


def test_lines_that_the_journal_rejects_go_to_stderr(
    handler: tuple[JournalHandler, io.StringIO, str],
) -> None:
    journal, stderr, address = handler
    journal.handle(record("no listener"))
    assert "no listener" in stderr.getvalue()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(address)
        journal.handle(record("a listener"))
        assert fields_of(server.recv(65536))["MESSAGE"] == "a listener"
    assert "a listener" not in stderr.getvalue()
    journal.close()


def test_a_hanging_journal_does_not_block_the_agent(handler: tuple[JournalHandler, io.StringIO, str]) -> None:
    journal, stderr, address = handler
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(address)
        for _ in range(MORE_THAN_IT_HOLDS):
            journal.handle(record("x" * journald.LARGEST_BYTES))
        server.setblocking(False)
        taken = 0
        with contextlib.suppress(BlockingIOError):
            while server.recv(1 << 20):
                taken += 1
        assert taken < MORE_THAN_IT_HOLDS
        journal.handle(record("told"))
        assert fields_of(server.recv(65536))["MESSAGE"] == "told"
    assert stderr.getvalue() == ""
    journal.close()


def test_the_largest_possible_entry_is_accepted(
    handler: tuple[JournalHandler, io.StringIO, str], tmp_path: Path
) -> None:
    journal, stderr, address = handler
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(address)
        journal.handle(record("x" * 10 * journald.LARGEST_BYTES))
        assert len(fields_of(server.recv(1 << 20))["MESSAGE"]) == LARGEST_BYTES
    assert stderr.getvalue() == ""
    journal.close()
