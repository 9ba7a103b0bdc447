"""Starts one cold worker, or a helper, from the guard: fork, a few settings, exec.

Written by hand because `subprocess` cannot set the parent-death signal without a `preexec_fn`, waits for
the exec (which can hang on a network file system, and the guard must not), and costs the guard half its
start time to import.
"""

from __future__ import annotations

import os
import signal

from elastic_agent import linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from types import SimpleNamespace
    from typing import NoReturn

_ALL_SIGNALS = signal.valid_signals()
_RESETTABLE = tuple(int(s) for s in _ALL_SIGNALS if s not in (signal.SIGKILL, signal.SIGSTOP))
_ERROR_BYTES = 4096

STARTUP_HOOK = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "startup_hook")
"""The folder of a `sitecustomize`, which every Python imports when it starts and finds it (the module `site`)."""


def with_startup_hook(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a program that is executed adapts frameworks, as a forked worker does.

    The hook removes itself from it again before the script runs.
    """
    path = env.get("PYTHONPATH")
    return {**env, "PYTHONPATH": f"{STARTUP_HOOK}{os.pathsep}{path}" if path else STARTUP_HOOK}


def start_cold_worker(launch: SimpleNamespace, streams: Mapping[int, int]) -> tuple[int, int]:
    """Start the worker of a `client.Launch`; returns its pid and a non-blocking descriptor with the result.

    The descriptor reads as end-of-file once the program runs (or the child died), or holds an error
    message. `streams` become the worker's stdout and stderr, by their descriptors there; the launch names the
    files of the others. Raises OSError when it cannot fork.
    """
    guard_pid = os.getpid()
    error_read, error_write = os.pipe()
    os.set_blocking(error_read, False)
    # Blocked until the child has default dispositions, so that a SIGTERM sent meanwhile waits and is not
    # ignored.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _become_worker(launch, streams, guard_pid, error_write)
    except OSError:
        os.close(error_read)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(error_write)
    return pid, error_read


def fork_helper(argv: list[str], env: dict[str, str], inherited_fds: Collection[int]) -> int:
    """Start a process of our own that inherits these descriptors, too; returns its pid. Raises OSError.

    It begins with the signals of jobs blocked. A program that cannot be started ends with 127.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                for fd in inherited_fds:
                    os.set_inheritable(fd, True)
                _restore_signals(blocked=linux.JOB_SIGNALS)
                os.execvpe(argv[0], argv, env)
            finally:
                os._exit(127)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable when the process has ended, where the kernel has such."""
    try:
        return os.pidfd_open(pid)
    except OSError:  # Linux before 5.3; SIGCHLD reports it as well, without the order
        return None


def read_start_error(fd: int) -> str | None:
    """Return the content of such a descriptor: None = not known yet, "" = started, else the error.

    It is also empty for a process that was killed before: its end is reported as that of any worker.
    """
    try:
        return os.read(fd, _ERROR_BYTES).decode(errors="replace")
    except BlockingIOError:
        return None
    except ConnectionResetError:  # a standby that had not even read what it was to become
        return ""


def _become_worker(
    launch: SimpleNamespace, streams: Mapping[int, int], guard_pid: int, error_fd: int
) -> NoReturn:
    doing = "prepare"
    try:
        os.setsid()
        linux.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != guard_pid:  # it died before the line above
            os._exit(127)
        for fd, path in ((1, launch.stdout), (2, launch.stderr)):
            doing = f"open {path!r}"
            if fd in streams:
                os.dup2(streams[fd], fd)
            elif path is not None:
                redirect(path, fd)
        doing = f"start {launch.argv[0]!r}"
        _restore_signals(ignored=launch.ignored)
        env = with_startup_hook(launch.env) if launch.startup_hook else launch.env
        os.execvpe(launch.argv[0], launch.argv, env)
    except BaseException as error:
        os.write(error_fd, start_error(doing, error))
    finally:
        os._exit(127)


def start_error(doing: str, error: BaseException) -> bytes:
    """Return what is reported when a worker cannot do this at its start."""
    reason = (error.strerror if isinstance(error, OSError) else None) or repr(error)
    return f"cannot {doing}: {reason}".encode(errors="replace")[:_ERROR_BYTES]


def redirect(path: str, fd: int) -> None:
    """Have a descriptor of this process append to a file."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    os.dup2(opened, fd)
    os.close(opened)


def _restore_signals(ignored: Collection[int] = (), blocked: Collection[int] = ()) -> None:
    signal.set_wakeup_fd(-1)
    for signum in _RESETTABLE:
        signal.signal(signum, signal.SIG_IGN if signum in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
