"""The Linux calls that Python's standard library lacks, and the process tree.

Used by the guard, so it imports little: no `typing`, no `dataclasses`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

from elastic_agent.processes import Process, all_processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_MCL_CURRENT = 1
_TFD_CLOEXEC_NONBLOCK = os.O_CLOEXEC | os.O_NONBLOCK
_TFD_TIMER_ABSTIME = 1
_IN_MOVED_TO, _IN_CREATE = 0x80, 0x100

_libc = ctypes.CDLL(None, use_errno=True)

JOB_SIGNALS: frozenset[int] = frozenset(
    (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
        signal.SIGXCPU,
        signal.SIGPWR,
        *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
    )
)
"""Sent to a terminal, a service or a job as a whole. The agent decides what they mean: its guard and its spawner
do not end by them."""


def boottime_ns() -> int:
    """Nanoseconds since the machine booted, time asleep included (CLOCK_BOOTTIME)."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boottime_s() -> float:
    """Seconds since the machine booted, time asleep included (CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _prctl(option: int, argument: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), "prctl")


def become_subreaper() -> None:
    """Make this process the new parent of every descendant whose own parent dies.

    Without it a worker's daemonised child would move to process 1, where nobody stops it.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(signum: int) -> None:
    """Have the kernel send `signum` to this process when the thread that forked it ends.

    exec keeps the setting, fork does not pass it on.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)


def set_process_name(name: str) -> None:
    """The name that `ps -o comm` and `top` show, at most 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _check(_libc.prctl(_PR_SET_NAME, buffer, 0, 0, 0), "prctl")


def lock_memory() -> bool:
    """Keep what this process has in memory there, its program included; whether the system allowed it.

    Machines that run out of memory, or lose the server their Python came from, are those that must be fenced
    in time. Not for memory to come: what the system then refused would end the process.
    """
    return bool(_libc.mlockall(_MCL_CURRENT) == 0)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class BoottimeTimer:
    """A file descriptor that becomes readable at a point of CLOCK_BOOTTIME.

    A select timeout counts CLOCK_MONOTONIC, which stands still while the machine is suspended; after a
    suspend it would come too late by as long as it still had to run.
    """

    def __init__(self) -> None:
        self._fd = _check(_libc.timerfd_create(time.CLOCK_BOOTTIME, _TFD_CLOEXEC_NONBLOCK), "timerfd_create")

    def fileno(self) -> int:
        return self._fd

    def arm(self, at_ns: int) -> None:
        """Fire at `at_ns` (at once when that is past); 0 turns the timer off."""
        when = _Itimerspec(_Timespec(0, 0), _Timespec(at_ns // 1_000_000_000, at_ns % 1_000_000_000))
        _check(
            _libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(when), None), "timerfd_settime"
        )

    def drain(self) -> None:
        """Take note of an expiry, so that the descriptor is not readable until the next."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)


@contextlib.contextmanager
def job_signals_blocked() -> Iterator[None]:
    """Have processes that are started meanwhile begin with these signals blocked: until they are ready for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_job_signals() -> None:
    """Take those that came meanwhile, and what comes."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)


def forget_job_signals() -> None:
    """Discard those that came while they were blocked."""
    while signal.sigtimedwait(JOB_SIGNALS, 0) is not None:
        pass


class FolderWatch:
    """A file descriptor that becomes readable when a file appears in a folder.

    Raises OSError where the kernel has no more of them to give.
    """

    def __init__(self, folder: str) -> None:
        self._fd = _check(_libc.inotify_init1(_TFD_CLOEXEC_NONBLOCK), "inotify_init1")
        mask = ctypes.c_uint32(_IN_CREATE | _IN_MOVED_TO)
        try:
            _check(_libc.inotify_add_watch(self._fd, os.fsencode(folder), mask), "inotify_add_watch")
        except OSError:
            os.close(self._fd)
            raise

    def fileno(self) -> int:
        return self._fd

    def drain(self) -> None:
        """Take note of all that has appeared, so that the descriptor is not readable until the next."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._fd, 1 << 16):
                pass

    def close(self) -> None:
        os.close(self._fd)


def send_signal(pid: int, signum: int) -> None:
    """Send it, if the process is there and may be signalled (it may have become another user)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def descendants(of_pid: int, except_pids: frozenset[int] = frozenset()) -> list[Process]:
    """The living children of `of_pid`, their children and so on, without `except_pids` and what hangs below
    those.

    Not a snapshot: a process whose parent dies during the scan can be missed. Scan again until nothing new
    turns up.
    """
    children: dict[int, list[Process]] = {}
    for process in all_processes():
        if not process.dead:
            children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    pending = [of_pid]
    while pending:
        for process in children.get(pending.pop(), ()):
            if process.pid not in except_pids:
                found.append(process)
                pending.append(process.pid)
    return found


def dead_children(of_pid: int) -> list[int]:
    """Children of `of_pid` that have ended and wait to be reaped."""
    return [process.pid for process in all_processes() if process.dead and process.parent == of_pid]


def close_all_but(kept: set[int]) -> None:
    """Close every descriptor above 2 but these. Only for a process that forgets all that it had."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(fd)


def flush_c_streams() -> None:
    """Write what C code of this process has printed and not written yet."""
    _libc.fflush(None)


def open_missing_standard_streams() -> None:
    """Have descriptors 0 to 2 open, on /dev/null if on nothing else, so that nothing else takes their numbers."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def children(of_pid: int) -> list[int]:
    """The direct children of a process, the dead that wait to be reaped included.

    Exact for one's own single-threaded process: no child leaves the kernel's list before it is reaped.
    """
    try:
        fd = os.open(f"/proc/{of_pid}/task/{of_pid}/children", os.O_RDONLY)
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [process.pid for process in all_processes() if process.parent == of_pid]
    try:
        chunks = []
        while chunk := os.read(fd, 1 << 20):
            chunks.append(chunk)
    finally:
        os.close(fd)
    return [int(word) for word in b"".join(chunks).split()]
