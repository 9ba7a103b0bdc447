"""Linux: the calls that Python's standard library lacks, and processes as /proc shows them.

What comes out of /proc is read as bytes: the kernel cuts a process's name at 15 of them, be it in the middle of a
character. Used by the guard, so this imports little: no `typing`, no `dataclasses`.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_MCL_CURRENT = 1
_TFD_CLOEXEC_NONBLOCK = os.O_CLOEXEC | os.O_NONBLOCK
_TFD_TIMER_ABSTIME = 1
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_CPUCLOCK_SCHED = 2
"""The kind of clock in the number of another process's clock, as clock_getcpuclockid(3) makes it."""

_libc = ctypes.CDLL(None, use_errno=True)

ENDS_WITH_PARENT = (
    "import os, sys; from elastic_agent import linux; linux.set_parent_death_signal(15); "
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)
"""A Python program that gets SIGTERM when its parent ends, the process in its first argument, and becomes Python with
the other ones."""

DEVICE_FILES = ("nvidia", "nvhost", "nvmap", "kfd", "dri", "dxg", "accel", "hl", "davinci")
"""Beginnings of the names in /dev: NVIDIA, its Jetson (2), AMD, Intel and AMD, WSL 2, others."""

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
"""Sent to a terminal, a service or a job as a whole. The agent handles them: its guard and its spawner do not exit."""


def boottime_ns() -> int:
    """Return the nanoseconds since the machine booted, time asleep included (CLOCK_BOOTTIME)."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boottime_s() -> float:
    """Return the seconds since the machine booted, time asleep included (CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _check(result: int, call: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


def _prctl(option: int, argument: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), "prctl")


def become_subreaper() -> None:
    """Make this process the new parent of every descendant whose own parent dies.

    Without it a worker's daemonised child would move to process 1, and the agent could not stop it.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(signum: int) -> None:
    """Have the kernel send `signum` to this process when the thread that forked it ends.

    exec keeps the setting, fork does not pass it on.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)


def set_process_name(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show, at most 15 bytes."""
    buffer = ctypes.create_string_buffer(os.fsencode(name)[:15])
    _check(_libc.prctl(_PR_SET_NAME, buffer, 0, 0, 0), "prctl")


def lock_memory() -> bool:
    """Lock this process's present memory, its program included; whether the system allowed it.

    Machines that run out of memory, or lose the server their Python came from, are those that must be fenced
    in time. Not for future memory: a refusal of the system would then end the process.
    """
    return bool(_libc.mlockall(_MCL_CURRENT) == 0)


def is_same_file(fd: int, other_fd: int) -> bool:
    """Return whether what is written to these descriptors of this process goes to one place, in order."""
    flags = {fcntl.fcntl(each, fcntl.F_GETFL) for each in (fd, other_fd)}
    return len(flags) == 1 and os.path.samestat(os.fstat(fd), os.fstat(other_fd))


def punch_hole(fd: int, start: int, length: int) -> None:
    """Give back the space of a part of a file, which reads as zeros from then on. Raises OSError."""
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    done = _libc.fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(length))
    _check(done, "the file system cannot make holes in files")


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
        """Clear an expiry, so that the descriptor is not readable until the next."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Have processes that are started meanwhile begin with these signals blocked: until they are ready for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_exit(pid: int, timeout_s: float) -> None:
    """Wait until the process has ended, at most ``timeout_s``; some milliseconds if the kernel has no pidfds."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # gone already, or Linux before 5.3
        time.sleep(min(timeout_s, 0.005))
        return
    try:
        select.select((pidfd,), (), (), timeout_s)
    finally:
        os.close(pidfd)


def unblock_job_signals() -> None:
    """Take those that came meanwhile, and what comes."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)


def forget_job_signals() -> None:
    """Discard those that came while they were blocked."""
    while signal.sigtimedwait(JOB_SIGNALS, 0) is not None:
        pass


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
            os.set_inheritable(fd, True)


# -- processes as /proc shows them -----------------------------------------------------------------


class Process:
    """A process as read from /proc at one moment.

    `key` distinguishes it from a later process with the same number: besides the number it has `start_ticks`, when it
    started, in clock ticks since boot.
    """

    __slots__ = ("dead", "frozen", "group", "key", "parent", "pid", "start_ticks", "state")

    def __init__(self, pid: int, state: str, parent: int, group: int, threads: int, start_ticks: int) -> None:
        self.pid = pid
        self.state = state
        self.parent = parent
        self.group = group
        self.start_ticks = start_ticks
        self.key = (pid, start_ticks)
        # The first thread may have ended before others: then the process looks like a zombie, but runs.
        self.dead = state in "ZX" and threads <= 1
        # By a signal or a debugger.
        self.frozen = state in "Tt"


def read_process(pid: int) -> Process | None:
    """Read a process from /proc; None when there is no such process."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    parent, group, threads, start_ticks = (int(fields[i]) for i in (1, 2, 17, 19))
    return Process(pid, fields[0].decode(), parent, group, threads, start_ticks)


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on (proc(5) counts it as field 3). Raises OSError."""
    # The name before it stands in brackets and may itself hold brackets and blanks.
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def cpu_time_s(pid: int) -> float:
    """Return the processor time that all threads of the process have used. Raises OSError: it is gone."""
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError:  # a sandbox without the clocks of other processes
        fields = stat_fields(pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def transferred_bytes(pid: int) -> int:
    """Return what the process has read and written; 0 where that cannot be seen. Raises OSError: it is gone."""
    try:
        lines = _read(f"/proc/{pid}/io").splitlines()
    except PermissionError:  # it has become another user
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith((b"rchar:", b"wchar:")))


def resident_bytes(pid: int) -> int:
    """Return the size of its memory, shared or not; roughly. Raises OSError: it is gone."""
    return int(_read(f"/proc/{pid}/statm").split()[1]) * mmap.PAGESIZE


def threads(pid: int) -> list[int]:
    """Return the threads of a process; none when it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def thread_state(tid: int) -> str:
    """Return R if it runs or waits for a processor, D for a disk, S for something else; empty when it is gone."""
    try:
        return stat_fields(tid)[0].decode()
    except OSError:
        return ""


def process_ids() -> list[int]:
    """Return all processes that can be seen here."""
    with os.scandir("/proc") as entries:
        return [int(entry.name) for entry in entries if entry.name.isdigit()]


def all_processes() -> Iterator[Process]:
    """Yield the processes that are still there when their turn comes."""
    for pid in process_ids():
        process = read_process(pid)
        if process is not None:
            yield process


def start_ticks(pid: int) -> int | None:
    """Return when the process started, or None if there is no such process (a zombie counts as gone)."""
    process = read_process(pid)
    return None if process is None or process.dead else process.start_ticks


def started_after(process: Process, at_boottime_s: float) -> bool:
    """Return whether the process started after this time, or so shortly before that its start ticks do not tell."""
    return (process.start_ticks + 1) / os.sysconf("SC_CLK_TCK") > at_boottime_s


def is_frozen(pid: int) -> bool:
    """Return whether the process was stopped by a signal or a debugger."""
    process = read_process(pid)
    return process is not None and process.frozen


def catches(pid: int, signum: int) -> bool:
    """Return whether the process has a handler for this signal (one without would die of it)."""
    return _in_mask(pid, b"SigCgt:", signum) is True


def ignores(pid: int, signum: int) -> bool | None:
    """Return whether the process ignores this signal; None if it is gone."""
    return _in_mask(pid, b"SigIgn:", signum)


def ends_by(pid: int, signum: int) -> bool:
    """Return whether this signal would end the process: it neither catches nor ignores nor blocks it. False: it is
    gone."""
    return not any(_in_mask(pid, mask, signum) is not False for mask in (b"SigCgt:", b"SigIgn:", b"SigBlk:"))


def _in_mask(pid: int, mask: bytes, signum: int) -> bool | None:
    with contextlib.suppress(OSError):
        for line in _read(f"/proc/{pid}/status").splitlines():
            if line.startswith(mask):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return None


GUARD_NAME = "elastic-guard"
"""The name in `ps` of the process between an agent and its workers."""


def process_name(pid: int) -> str:
    """Return what `ps` calls it, or nothing when it is gone."""
    return _name(f"/proc/{pid}/comm")


def thread_names() -> list[str]:
    """Return the names of this process's threads, the first one first."""
    # Others may have lower numbers: the system begins again when it has used them all.
    first = str(os.getpid())
    numbers = sorted(os.listdir("/proc/self/task"), key=lambda number: (number != first, int(number)))
    return [name for number in numbers if (name := _name(f"/proc/self/task/{number}/comm"))]


def environment(pid: int) -> dict[str, str]:
    """Return the variables that the process was started with. Raises OSError: it is gone, or another user's."""
    pairs = [
        pair.decode(errors="replace").partition("=") for pair in _read(f"/proc/{pid}/environ").split(b"\0")
    ]
    return {name: value for name, equals, value in pairs if equals}


def send_signal(pid: int, signum: int) -> None:
    """Send it, if the process is there and may be signalled (it may have become another user)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def may_signal(pid: int) -> bool:
    """Return whether this process may signal that one; also if it is gone."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


def user_of(pid: int) -> int | None:
    """Return the id of the user that the process runs as; None if it is gone."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid
    return None


def descendants(of_pid: int) -> list[Process]:
    """Return the live children of `of_pid`, their children and so on.

    Not a snapshot: a process whose parent dies during the scan can be missed. Scan again until nothing new
    turns up.
    """
    return below((of_pid,), (process for process in all_processes() if not process.dead))


def below(pids: Iterable[int], processes: Iterable[Process]) -> list[Process]:
    """Return those of the processes that are children of ``pids``, their children and so on."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    pending = [*pids]
    while pending:
        for process in children.get(pending.pop(), ()):
            found.append(process)
            pending.append(process.pid)
    return found


def family(of_pid: int) -> set[int]:
    """Return the descendants that the kernel lists under each process: fast where a node has thousands of others.

    Processes that start or end meanwhile may be missed.
    """
    found: set[int] = set()
    pending = [of_pid]
    while pending:
        pid = pending.pop()
        for tid in threads(pid):
            try:
                listed = [int(word) for word in _read(f"/proc/{pid}/task/{tid}/children").split()]
            except FileNotFoundError:
                if tid == of_pid:  # a kernel without CONFIG_PROC_CHILDREN
                    return {process.pid for process in descendants(of_pid)}
                continue
            except OSError:
                continue  # it is gone
            new = [child for child in listed if child not in found]
            found.update(new)
            pending += new
    return found


def dead_children(of_pid: int) -> list[int]:
    """Return the children of `of_pid` that have ended and wait to be reaped."""
    return [process.pid for process in all_processes() if process.dead and process.parent == of_pid]


def children(of_pid: int) -> list[int]:
    """Return the direct children of a process, the dead that wait to be reaped included.

    Exact for one's own single-threaded process: no child leaves the kernel's list before it is reaped.
    """
    try:
        listed = _read(f"/proc/{of_pid}/task/{of_pid}/children")
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [process.pid for process in all_processes() if process.parent == of_pid]
    return [int(word) for word in listed.split()]


def open_files(pid: int | str = "self") -> list[str]:
    """Return what the descriptors of a process lead to. Raises OSError: it is gone, or another user's."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as the one that listed them
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def open_file(pid: int, fd: int) -> str:
    """Return what this descriptor of a process leads to, or nothing where that cannot be read."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    return ""


def peer_of(line: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a Unix socket, when it was connected."""
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def receive(line: socket.socket, most_bytes: int) -> tuple[bytes, list[int]]:
    """Return a message of at most `most_bytes` and the descriptors that came with it, which no program inherits.

    Raises OSError.
    """
    # Not socket.recv_fds, which ignores its flags.
    data, ancillary, _, _ = line.recvmsg(most_bytes, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content)
    return data, list(fds)


def tcp_tables(pid: int) -> list[bytes]:
    """Return the kernel's tables of TCP sockets, IPv4 and IPv6, in the network namespace of a process."""
    return [_read(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")]


def mapped_files(pid: int) -> list[str]:
    """Return the last parts of the paths of the files that a process has mapped. Raises OSError."""
    lines = _read(f"/proc/{pid}/maps").split(b"\n")
    return [line.rpartition(b"/")[2].decode(errors="replace") for line in lines]


def processes_of(uid: int) -> Iterator[int]:
    """Yield all processes of a user that can be seen here."""
    for pid in process_ids():
        if user_of(pid) == uid:
            yield pid


def boot_id() -> str:
    """Return what changes with every boot of the machine."""
    with contextlib.suppress(OSError):
        return _read("/proc/sys/kernel/random/boot_id").decode().strip()
    return ""


def pid_namespace() -> str:
    """Return what identifies the pid namespace (the container) of this process; no two that exist have the same."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def cgroups() -> dict[str, str]:
    """Return this process's cgroup by controller; that of version 2 by the empty name. Raises OSError."""
    # Not splitlines(): it splits at characters that the name of a cgroup may contain.
    lines = os.fsdecode(_read("/proc/self/cgroup")).split("\n")
    parts = [line.split(":", 2) for line in lines if line]
    return {name: path for _, names, path in parts for name in names.split(",")}


def _name(path: str) -> str:
    with contextlib.suppress(OSError):
        return _read(path).decode(errors="replace").strip()
    return ""


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = []
        while chunk := os.read(fd, 1 << 16):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)
