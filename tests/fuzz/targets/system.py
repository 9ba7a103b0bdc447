"""What the kernel shows. It is trusted, but programs choose some of it: their names, environments, files, sockets."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from elastic_agent import linux
from elastic_agent.agent.control import socket as control
from elastic_agent.workers import facts, find_workers
from elastic_agent.workers.tcp_sockets import parse
from tests.fuzz.target import Target

_ENVIRON = (
    b"PATH=/bin\0ELASTIC_AGENT_RUN_ID=run\0ELASTIC_AGENT_WORKER_ID=n0/1\0ELASTIC_AGENT_STACKS_SIGNAL=10\0"
)
_STAT = b"S 1 4711 4711 0 -1 4194560 100 0 0 0 5 3 0 0 20 0 1 0 123456 1000 10 18446744073709551615"
_TCP = b"""\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 0200000A:A2B1 01 00000000:00000000 00:00000000 00000000  1000        0 12345 1
   1: 00000000000000000000FFFF0100007F:1F90 00000000000000000000FFFF0200000A:A2B1 02 00000001:0 01:0 00000003 0 0 99 1
"""
_UNIX = b"""\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 12345 @elastic-agent/0/4711-0badcafe
0000000000000000: 00000003 00000000 00000000 0001 03 12346 /run/x
"""
_MOUNTS = b"overlay / overlay rw,relatime 0 0\n/dev/sda1 /data\\040dir ext4 rw 0 0\nnfs:/x /nfs nfs4 rw 0 0\n"
_KMSG = (
    b"6,1234,98765432,-;Out of memory: Killed process 4711 (python) total-vm:1kB\n SUBSYSTEM=x\n",
    b"3,1235,98765433,-;NVRM: Xid (PCI:0000:01:00): 79, pid=4711, name=python\n",
)
_MAPS = b"7f0000000000-7f0000001000 r--s 00000000 00:01 12 /dev/shm/torch_4711_1\n7f00 r-xp 0 0 0\n"


def targets() -> list[Target]:
    """With the parts that programs choose changed; the rest is as the kernel prints it."""
    return [
        Target("proc-name", (b"python", b"a) S 1 (b"), _name),
        Target("proc-environ", (_ENVIRON,), _environ, weight=0.5),
        Target("proc-maps", (_MAPS,), _maps),
        Target("proc-unix", (_UNIX,), _unix, weight=0.5),
        Target("proc-tcp", (_TCP,), parse, weight=0.5),
        Target("proc-mounts", (b"/data dir", b"/a"), _mounts, weight=0.5),
        Target("proc-cgroup", (b"/user.slice/a.service", b"/docker/0123"), _cgroup, weight=0.5),
        Target(
            "cgroup-numbers", (b"max\n", b"1073741824\n", b"low 0\noom 3\noom_kill 2\n"), _memory, weight=0.3
        ),
        Target("kernel-log", _KMSG, _kernel_log, weight=0.5),
    ]


def _reading(answer: Callable[[str], bytes], work: Callable[[], Any]) -> Any:
    """Do it while every file of /proc reads like this."""
    original, linux._read = linux._read, answer
    try:
        return work()
    finally:
        linux._read = original


def _name(data: bytes) -> None:
    name = data.replace(b"\x00", b"")[:15]  # what the kernel takes
    process = _reading(lambda _: b"4711 (" + name + b") " + _STAT, lambda: linux.read_process(4711))
    assert (process.parent, process.group, process.start_ticks) == (1, 4711, 123456), process.__slots__
    _reading(lambda _: name + b"\n", lambda: linux.process_name(1))


def _environ(data: bytes) -> None:
    _reading(lambda _: data, lambda: linux.environment(1))
    original, find_workers.processes_of = find_workers.processes_of, lambda _: iter((1,))
    try:
        _reading(lambda _: data, lambda: list(find_workers._marked(0)))
    finally:
        find_workers.processes_of = original


def _maps(data: bytes) -> None:
    _reading(lambda _: data, lambda: linux.mapped_files(1))


def _unix(data: bytes) -> None:
    original, control.Path = control.Path, lambda _: SimpleNamespace(read_bytes=lambda: data)  # type: ignore[assignment,misc]
    try:
        control.agents_here()
    finally:
        control.Path = original  # type: ignore[misc]


def _opening(content: bytes, work: Callable[[], object]) -> None:
    """Do it while every file that ``facts`` opens reads like this."""

    def opened(_: object, mode: str = "r", encoding: str | None = None, errors: str | None = None) -> Any:
        raw = io.BytesIO(content)
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding=encoding, errors=errors)

    facts.open = opened  # type: ignore[attr-defined]
    try:
        work()
    finally:
        del facts.open  # type: ignore[attr-defined]


def _mounts(data: bytes) -> None:
    """The kernel writes blanks, newlines and backslashes in a folder's name as octal numbers."""
    name = b"".join(b"\\%03o" % byte if byte in b" \t\n\\" else bytes((byte,)) for byte in data if byte)
    _opening(b"/dev/sda1 /" + name + b" ext4 rw 0 0\n", lambda: list(facts._local_folders()))


def _cgroup(data: bytes) -> None:
    path = data.replace(b"\x00", b"").replace(b"\n", b"")
    _reading(lambda _: b"0::/" + path + b"\n", linux.cgroups)


def _memory(data: bytes) -> None:
    _opening(data, lambda: (facts._limits_in("/sys/fs/cgroup"), facts._available_memory()))
    original, facts.cgroups = facts.cgroups, lambda: {"": "/a"}
    try:
        _opening(data, lambda: (facts._oom_kills(), facts._memory_limit()))
    finally:
        facts.cgroups = original


class _Log:
    """What ``facts`` sees instead of ``os``: the kernel's log with one record, and its end."""

    O_RDONLY = O_NONBLOCK = O_CLOEXEC = 0

    def __init__(self, record: bytes) -> None:
        self._records = [record]

    def open(self, *_: object) -> int:
        return 0

    def read(self, _: int, count: int) -> bytes:
        if self._records:
            return self._records.pop()[:count]
        raise OSError("the end")

    def close(self, _: int) -> None: ...


def _kernel_log(data: bytes) -> None:
    original, facts.os = facts.os, _Log(data)  # type: ignore[assignment]
    try:
        facts._last_kernel_message(0.0, [4711])
    finally:
        facts.os = original
