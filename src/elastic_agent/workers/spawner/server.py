"""The spawner's program: import, check that forking is safe, fork standbys when the guard requests some."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from elastic_agent import linux
from elastic_agent.integrations import post_import
from elastic_agent.workers.guard.cold import redirect, start_error
from elastic_agent.workers.spawner.curated import REPLACES, in_full
from elastic_agent.workers.spawner.fork_safety import UnsafeError, check_fork_safety
from elastic_agent.workers.spawner.preloaded import Preloaded
from elastic_agent.workers.spawner.process_title import show_as
from elastic_agent.workers.spawner.python_program import PythonProgram, become, forget_files, get_ready
from elastic_agent.workers.spawner.recording import Recorder

_MESSAGE_BYTES = 64 * 1024
_DETAIL_BYTES = 16 * 1024
_FORK_S = 5.0


def serve(
    recorder: Recorder,
    fd: int,
    stores_fd: int | None,
    guard_pid: int,
    preload: list[str],
    folder: str,
    imports: list[tuple[str, list[str]]],
) -> PythonProgram:
    """Be the spawner. Returns in a forked worker only, with what it is to run.

    `recorder`: has recorded all imports of this process. `fd`: the line to the guard. `stores_fd`: the line to the
    agent for a process that serves stores, which is forked when torch has been imported. `preload`: modules to import
    besides torch. `folder`: what `sys.path[0]` will be in the workers. `imports`: what scripts import of curated
    packages, each with the names in it.
    """
    linux.set_parent_death_signal(9)
    line = socket.socket(fileno=fd)
    line.set_inheritable(False)
    started = time.monotonic()
    doing = "an import failed in the spawner"
    recorder.replaces = REPLACES
    try:
        gc.disable()  # what is imported stays: looking through it for garbage is a tenth of the time
        recorder.import_("torch")
        if stores_fd is not None:
            _fork_stores(line, stores_fd)
        _import_all(recorder, preload, folder, imports)
        doing = "the check of the spawner failed"
        check_fork_safety()
        forget_files()  # imports what it needs
        post_import.preload()
        recorder.end()
        preloaded = Preloaded(recorder, folder)
        _show_as_spawner()
    except UnsafeError as error:
        _send(line, {"unusable": str(error), "detail": ""})
        os._exit(0)
    except BaseException:
        detail = traceback.format_exc().encode("ascii", "backslashreplace")[-_DETAIL_BYTES:].decode()
        _send(line, {"unusable": doing, "detail": detail})
        os._exit(0)
    gc.freeze()  # or the first collection of every worker would copy all that was imported
    gc.enable()
    _send(line, {"ready_s": time.monotonic() - started, "modules": len(preloaded)})
    return _fork_on_request(line, guard_pid, preloaded)


def _send(line: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
    try:
        socket.send_fds(line, [json.dumps(message).encode()], [] if fd is None else [fd])
    except OSError:  # the guard is gone, and so are we
        os._exit(1)


# --- before the first fork ------------------------------------------------------------------------


def _import_all(
    recorder: Recorder, preload: list[str], folder: str, imports: list[tuple[str, list[str]]]
) -> None:
    for name, attributes in in_full(imports):
        with contextlib.suppress(Exception, SystemExit):  # the script finds out itself
            recorder.import_(name, attributes)
    if preload:
        sys.path.insert(0, folder)  # the user's own modules lie beside the script
        try:
            for name in preload:
                _import_named(recorder, name, folder)
        finally:
            sys.path.remove(folder)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # or each worker would, when it gets streams of its own
    linux.flush_c_streams()


def _fork_stores(line: socket.socket, stores_fd: int) -> None:
    """Fork the process in which the agent's stores are served: it shares the memory of torch with this one.

    If it cannot be forked, the agent finds its line closed.
    """
    try:
        is_child = _fork_child_of_guard(line, "stores") is not None
    except OSError:
        is_child = False
    if is_child:
        try:
            os.setsid()
            line.close()
            _become_stores(stores_fd)
        finally:
            os._exit(0)
    os.close(stores_fd)


def _become_stores(stores_fd: int) -> None:
    from elastic_agent import store_servers

    with contextlib.suppress(OSError):
        show_as([store_servers.PROCESS_NAME], dict(os.environ))
    store_servers.run(socket.socket(fileno=stores_fd))


def _import_named(recorder: Recorder, name: str, folder: str) -> None:
    """Import a module of ``--preload``; raises UnsafeError if there is none of this name."""
    try:
        recorder.import_(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that it imports is missing
        raise UnsafeError(
            f"--preload {name}: there is no module {error.name}, neither in {folder} nor among the installed packages"
        ) from None


def _show_as_spawner() -> None:
    """Take a name; raises UnsafeError where workers could not take theirs."""
    try:
        show_as(["elastic-spawner"], dict(os.environ))
    except OSError:
        raise UnsafeError("this kernel does not allow a process to change its command line") from None


# --- forking --------------------------------------------------------------------------------------


def _fork_on_request(line: socket.socket, guard_pid: int, preloaded: Preloaded) -> PythonProgram:
    while True:
        try:
            data = line.recv(_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        for _ in range(json.loads(data)["fork"]):
            try:
                theirs, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    between_pid = _fork_child_of_guard(line, "standby", theirs.fileno())
            except OSError as error:
                _send(line, {"fork_failed": error.strerror or str(error)})
                continue
            if between_pid is not None:
                line.close()
                return _stand_by(own, between_pid, guard_pid, preloaded)
            own.close()


def _fork_child_of_guard(line: socket.socket, kind: str, fd: int | None = None) -> int | None:
    """Fork a grandchild, which becomes the guard's child when the process between them ends.

    That one announces it before, with `fd`, so that the guard never has a child that was not announced. Returns in the
    grandchild only: the pid of the process between. Raises OSError when this process cannot fork.
    """
    pid = os.fork()
    if pid != 0:
        if os.waitpid(pid, 0)[1] != 0:
            _send(line, {"fork_failed": "the intermediate process died"})
        return None
    between_pid = os.getpid()  # later the child might get the guard's pid, which may have adopted it by then
    try:
        pid = os.fork()
        if pid == 0:
            return between_pid
        _send(line, {kind: pid}, fd)
    except OSError as error:
        _send(line, {"fork_failed": error.strerror or str(error)})
    except BaseException:
        os._exit(1)
    os._exit(0)


def _stand_by(line: socket.socket, between_pid: int, guard_pid: int, preloaded: Preloaded) -> PythonProgram:
    """Wait for the guard's command, then become the worker in it."""
    os.setsid()
    _await_adoption(between_pid)
    linux.set_parent_death_signal(9)
    if os.getppid() != guard_pid:  # it died before the line above
        os._exit(127)
    try:
        show_as(["elastic-standby"], dict(os.environ))
        get_ready(preloaded)
    except BaseException:
        traceback.print_exc()
        os._exit(127)
    try:
        message, fds = linux.receive(line, _MESSAGE_BYTES)
    except ConnectionResetError:  # the spawner was killed before it had announced this process
        message = b""
    if not message:
        os._exit(0)
    doing: list[str] = ["prepare"]
    try:
        program = _prepare(line, json.loads(message), fds, preloaded, doing.append)
    except BaseException as error:
        line.send(start_error(doing[-1], error))
        os._exit(127)
    return program


def _await_adoption(between_pid: int) -> None:
    """Wait for the process between, which is ending: there is no event for it, but it takes less than a millisecond."""
    ends = time.monotonic() + _FORK_S
    while os.getppid() == between_pid and time.monotonic() < ends:
        time.sleep(0.0002)


def _prepare(
    line: socket.socket,
    message: dict[str, Any],
    fds: list[int],
    preloaded: Preloaded,
    doing: Callable[[str], None],
) -> PythonProgram:
    with open(fds[0], "rb") as file:
        launch = json.loads(file.read())
    streams = dict(zip(message["streams"], fds[1:], strict=True))
    for name, fd in (("stdout", 1), ("stderr", 2)):
        path = launch[name]
        if fd in streams:
            os.dup2(streams[fd], fd)
            os.close(streams[fd])
        elif path is not None:
            doing(f"open {path!r}")
            redirect(path, fd)
    doing(f"start {launch['argv'][0]!r}")
    _take_signals(launch["ignored"])
    return become(launch, preloaded, line.close)


def _take_signals(ignored: list[int]) -> None:
    """Let signals be for the worker from here on. Earlier ones were for the job as a whole, and are dropped."""
    linux.forget_job_signals()
    for signum in ignored:
        if signal.getsignal(signum) == signal.SIG_DFL:  # else a preloaded module handles it
            signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
