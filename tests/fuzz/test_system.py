"""What the kernel shows, of which programs choose names, environments, files and sockets; and what workers wrote."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any
from unittest import mock

from elastic_agent import linux
from elastic_agent.agent.control import socket as control
from elastic_agent.diagnosis.known_errors import known_error, possible_error, readable
from elastic_agent.logs.render import console_line, journal_lines, json_line
from elastic_agent.printable import escaped, json_text, plain, without_surrogates
from elastic_agent.workers import facts
from elastic_agent.workers.failure import describe

from .damage import always, check_shown, fuzzed
from .samples import OTHER_ERRORS, TRACEBACK

ENVIRON = (
    b"PATH=/bin\0ELASTIC_AGENT_RUN_ID=run\0ELASTIC_AGENT_WORKER_ID=n0/1\0ELASTIC_AGENT_STACKS_SIGNAL=10\0"
)
STAT = b"S 1 4711 4711 0 -1 4194560 100 0 0 0 5 3 0 0 20 0 1 0 123456 1000 10 18446744073709551615"
UNIX = b"""\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 12345 @elastic-agent/0/4711-0badcafe
0000000000000000: 00000003 00000000 00000000 0001 03 12346 /run/x
"""
KERNEL_LOG = (
    b"6,1234,98765432,-;Out of memory: Killed process 4711 (python) total-vm:1kB\n SUBSYSTEM=x\n",
    b"3,1235,98765433,-;NVRM: Xid (PCI:0000:01:00): 79, pid=4711, name=python\n",
)
ERRORS = (TRACEBACK.encode(), OTHER_ERRORS.encode())
SHOWN = (b"\x1b]0;title\x07\x1b[31mred\x1b[0m\ttab\nline \xe2\x80\xae", "é\u009b31m\u2028".encode())


def reading(content: bytes) -> Any:
    """Every file of /proc reads like this."""
    return mock.patch.object(linux, "_read", always(content))


def opening(content: bytes) -> Any:
    """Every file that ``facts`` opens reads like this."""

    def opened(_: object, mode: str = "r", **more: Any) -> Any:
        return io.BytesIO(content) if "b" in mode else io.TextIOWrapper(io.BytesIO(content), **more)

    return mock.patch.object(facts, "open", opened, create=True)


@fuzzed(b"python", b"a) S 1 (b")
def test_name_of_a_process(data: bytes) -> None:
    name = data.replace(b"\x00", b"")[:15]  # what the kernel takes
    with reading(b"4711 (" + name + b") " + STAT):
        process = linux.read_process(4711)
    assert process is not None
    assert (process.parent, process.group, process.start_ticks) == (1, 4711, 123456)
    with reading(name + b"\n"):
        linux.process_name(1)


@fuzzed(ENVIRON)
def test_environment_of_a_process(data: bytes) -> None:
    with reading(data):
        linux.environment(1)


@fuzzed(UNIX)
def test_unix_sockets(data: bytes) -> None:
    with mock.patch.object(control, "Path", always(SimpleNamespace(read_bytes=lambda: data))):
        control.agents_here()


@fuzzed(b"/data dir", b"/a")
def test_mounts(data: bytes) -> None:
    """The kernel writes blanks, newlines and backslashes in a folder's name as octal numbers."""
    name = b"".join(b"\\%03o" % byte if byte in b" \t\n\\" else bytes((byte,)) for byte in data if byte)
    with opening(b"/dev/sda1 /" + name + b" ext4 rw 0 0\n"):
        list(facts._local_folders())


@fuzzed(b"/user.slice/a.service", b"/docker/0123")
def test_cgroup(data: bytes) -> None:
    with reading(b"0::/" + data.replace(b"\x00", b"").replace(b"\n", b"") + b"\n"):
        linux.cgroups()


@fuzzed(*KERNEL_LOG)
def test_kernel_log(data: bytes) -> None:
    records = [data]

    def read(_: int, count: int) -> bytes:
        if records:
            return records.pop()[:count]
        raise OSError("the end")

    kernel = SimpleNamespace(
        open=lambda *_: 0, read=read, close=lambda _: None, O_RDONLY=0, O_NONBLOCK=0, O_CLOEXEC=0
    )
    with mock.patch.object(facts, "os", kernel):
        facts._last_kernel_message(0.0, [4711])


@fuzzed(*ERRORS)
def test_errors_of_a_worker(data: bytes) -> None:
    """Bytes are read with a replacement, as the guard does."""
    text = data.decode(errors="replace")
    for code in (1, -6, -9, -15):
        failure = describe(0, code, "", text)
        check_shown(failure.summary("n0"))
        check_shown(failure.tail)
        check_shown(failure.message)
    known_error(text, text)
    possible_error(text)
    readable(text)


@fuzzed(*SHOWN)
def test_text_that_is_shown(data: bytes) -> None:
    """Bytes are read as surrogates, as Python does with file names."""
    text = data.decode(errors="surrogateescape")
    check_shown(plain(text))
    check_shown(escaped(text, keep_lines=True))
    check_shown(escaped(text))
    check_shown(json_text({"a": text, text: [text]}))
    without_surrogates(text).encode()
    named = {"run": "run", "node": text, "generation": 1, "what": text, "x": [text]}
    fields = {"time": 1.7e9, "level": "info", "event": text, **named}
    check_shown(json_line(fields))
    check_shown(console_line(fields, colours=False))
    check_shown(journal_lines(fields))
