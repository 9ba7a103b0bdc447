"""Run a command and fail if it leaves a process behind.

    python3 run_and_leave_nothing.py [--limit-s SECONDS] [--grace-s SECONDS] -- COMMAND ARG...

This process becomes a child subreaper (Linux): whatever the command starts, in whatever session or process
group, stays below it in the process tree. When the command has ended, every descendant that is still alive is
named and killed, and turns a success into exit code 1. A command that outlives the limit is killed with all
below it: exit code 124. Otherwise the exit code is the command's own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_CHILD_SUBREAPER = 36
# What is already on its way out when the command ends (the reader of a pipe, a logger) may take this long: a slow
# machine is no reason to fail, and a clean end does not wait.
GRACE_S = 30.0
# SIGKILL is not instant: tearing down a large process takes a while.
KILL_S = 10.0
TIMED_OUT = 124


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command; fail if it leaves a process behind.")
    parser.add_argument("--limit-s", type=int, default=0, help="kill the command after this long (0: never)")
    parser.add_argument(
        "--grace-s", type=float, default=GRACE_S, help="how long what is left may take to end"
    )
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()

    open_standard_streams()
    become_subreaper()
    signal.signal(signal.SIGALRM, raise_timeout)
    signal.signal(signal.SIGTERM, raise_exit)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, raise_exit)
    signal.alarm(options.limit_s)
    try:
        code = wait_for(start(options.command))
        signal.alarm(0)
        left = still_running(options.grace_s)
        for pid in left:
            print(f"left running: {pid}: {command_line(pid)}", file=sys.stderr)
        return code or (1 if left else 0)
    except TimeoutError:
        print(f"not finished after {options.limit_s} s, killing it", file=sys.stderr)
        return TIMED_OUT
    finally:
        kill_descendants()


def open_standard_streams() -> None:
    """Where one was closed, the first file that a program opens takes its place: a shell's own script does."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        try:
            usable = fd == 0 or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            os.fstat(fd)
        except OSError:
            usable = False
        if not usable:
            os.dup2(nothing, fd)
    if nothing > 2:
        os.close(nothing)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def become_subreaper() -> None:
    """Make orphans among our descendants our own children, instead of init's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def raise_timeout(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError


def raise_exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def start(command: list[str]) -> int:
    """Fork and exec: posix_spawn would leave two of the C library's own signals ignored in the command."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # these two Python ignores
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
            os._exit(127)
    return pid


def wait_for(command: int) -> int:
    """Reap until the command has ended; its exit code, 128 + number for a signal."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == command:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def still_running(patience_s: float) -> list[int]:
    """The descendants that have not ended within `patience_s`."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # no child, and so no descendant: orphans would be our children
            return []
        if reaped:
            continue
        if time.monotonic() > deadline_s:
            return descendants()
        time.sleep(0.02)


def descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name, in parentheses, may hold anything; the parent is the second field behind it.
                parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    ahead = [os.getpid()]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(ended meanwhile)"


def kill_descendants() -> None:
    """Repeated, because a process may fork between our look and its end."""
    deadline_s = time.monotonic() + KILL_S
    while time.monotonic() < deadline_s:
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not still_running(0.1):
            return


if __name__ == "__main__":
    sys.exit(main())
