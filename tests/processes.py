"""Processes that a test looks at, or stops in part."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from elastic_agent.testing.processes import Agents, freeze, thaw

from .waiting import GUARD_S

T = TypeVar("T")


class Processes(Agents):
    """Processes that a test starts in a folder of its own; its waits end only when something hangs."""

    def wait(self, awaited: str, look: Callable[[], T | None], timeout_s: float = GUARD_S) -> T:
        """Wait until ``look`` finds something; the limit is a guard against hangs."""
        return super().wait(awaited, look, max(timeout_s, GUARD_S))

    def wait_gone(self, pids: Iterable[int], timeout_s: float = GUARD_S) -> list[int]:
        """Wait for these processes to end; returns those which did not."""
        return super().wait_gone(pids, timeout_s)


class Forked:
    """A process of multiprocessing that a test stops and kills."""

    process: BaseProcess

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def freeze(self) -> None:
        freeze(self.pid)

    def thaw(self) -> None:
        thaw(self.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(GUARD_S)
        assert not self.process.is_alive()


def name_of(pid: int) -> str:
    """Return what `ps -o comm` prints. Raises OSError for one that is gone."""
    return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()


def status_field(pid: int, name: str) -> str:
    """A line of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    raise AssertionError(f"no {name} in the status of {pid}")


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """This process can open nothing more; what is open stays so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


CUT_NAME = "train-modeles-\N{REPLACEMENT CHARACTER}"
"""What there is to read of the name below: the kernel keeps 15 bytes of a name, here half of the last character."""

TAKE_A_CUT_NAME = """
import ctypes
ctypes.CDLL(None).prctl(15, "train-modeles-été".encode(), 0, 0, 0)
"""
"""Statements after which a process is called that."""


@contextlib.contextmanager
def process_with_a_cut_name(more: Mapping[str, str] | None = None, code: str = "") -> Iterator[int]:
    """Runs such a process, in this one's environment and ``more``; ``code``: what else it does first."""
    program = f"{TAKE_A_CUT_NAME}\n{code}\nprint(flush=True)\ninput()"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, **(more or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.communicate()


_SEIZE, _INTERRUPT, _ANY_THREAD = 0x4206, 0x4207, 0x40000000
"""PTRACE_SEIZE, PTRACE_INTERRUPT, __WALL (ptrace(2), waitpid(2))."""


@contextlib.contextmanager
def without_first_thread(pid: int) -> Iterator[None]:
    """Stop this thread alone, as a hang of it would; the process's other threads run on. The process must end."""
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (_SEIZE, _INTERRUPT):
        if libc.ptrace(request, pid, None, None):
            raise OSError(ctypes.get_errno(), "cannot trace the process")
    _, status = os.waitpid(pid, _ANY_THREAD)
    assert os.WIFSTOPPED(status)
    yield
    while os.WIFSTOPPED(status):  # its parent hears of its end after its tracer
        _, status = os.waitpid(pid, _ANY_THREAD)


MARK = "ELASTIC_TESTS_RUN"
"""Names a run of tests in the environment of what it starts."""

_KILL_WHAT_IS_LEFT = """
import os, select, signal, sys, time
mark, run = os.fsencode(sys.argv[1]), int(sys.argv[2])
# At its own end, the run says a word before. If it is killed, its pipes are closed a moment before it is gone.
killed = run in select.select([run, sys.stdin], [], [])[0] or sys.stdin.read() != "over"
ends_s = time.monotonic() + 60
while killed and time.monotonic() < ends_s:
    killed = False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                if mark in environ.read().split(bytes(1)):
                    os.kill(int(pid), signal.SIGKILL)
                    killed = True
        except OSError:
            pass  # it is gone, or another user's
"""


@contextlib.contextmanager
def ended_with_this_process() -> Iterator[None]:
    """If this process is killed, so is what it started meanwhile, unless that dropped the environment."""
    environment, token = dict(os.environ), secrets.token_hex(8)
    os.environ[MARK] = token
    run = os.pidfd_open(os.getpid())
    killer = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _KILL_WHAT_IS_LEFT, f"{MARK}={token}", str(run)],
        stdin=subprocess.PIPE,
        pass_fds=[run],
        start_new_session=True,
        env=environment,
    )
    os.close(run)
    yield
    killer.communicate(b"over")
