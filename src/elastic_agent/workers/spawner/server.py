"""The spawner's program: import, check that forking is safe, fork standbys when the guard requests some."""

from __future__ import annotations

import array
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
from elastic_agent.workers.guard.messages import STARTED
from elastic_agent.workers.spawner.curated import in_full
from elastic_agent.workers.spawner.fork_safety import UnsafeError, check_fork_safety
from elastic_agent.workers.spawner.generators import Generators
from elastic_agent.workers.spawner.preloaded import Preloaded
from elastic_agent.workers.spawner.process_title import can_be_shown, show_as
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
    generators = Generators()
    doing = "an import failed in the spawner"
    try:
        with generators.recorded():
            gc.disable()  # what is imported stays: looking through it for garbage is a tenth of the time
            recorder.import_("torch")
            if stores_fd is not None:
                _fork_stores(line, stores_fd)
            _import_all(recorder, preload, folder, imports)
            doing = "the check of the spawner failed"
            _check(folder)
        forget_files()  # imports what it needs
        post_import.preload()
        recorder.end()
        preloaded = Preloaded(recorder, generators, folder)
    except UnsafeError as error:
        _send(line, {"unusable": str(error), "detail": ""})
        os._exit(0)
    except BaseException:
        detail = traceback.format_exc().encode("ascii", "backslashreplace")[-_DETAIL_BYTES:].decode()
        _send(line, {"unusable": doing, "detail": detail})
        os._exit(0)
    gc.freeze()  # or the first collection of every worker would copy all that was imported
    gc.enable()
    show_as(["elastic-spawner"], dict(os.environ))
    _send(line, {"ready_s": time.monotonic() - started, "modules": len(preloaded)})
    return _fork_on_request(line, guard_pid, preloaded)


def _send(line: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
    ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    try:
        line.sendmsg([json.dumps(message).encode()], ancillary)
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

    Forked twice, it is the guard's child, as standbys are. If it cannot be forked, the agent finds its line closed.
    """
    with contextlib.suppress(OSError):
        between_pid = os.fork()
        if between_pid == 0:
            try:
                pid = os.fork()
                if pid == 0:
                    os.setsid()
                    line.close()
                    _become_stores(stores_fd)
                _send(line, {"stores": pid})
            finally:
                os._exit(0)
        os.waitpid(between_pid, 0)
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


def _check(folder: str) -> None:
    """Raise UnsafeError when forked processes would not be as good as fresh ones."""
    if not can_be_shown():
        raise UnsafeError("this kernel does not allow a process to change its command line")
    shadow = _shadowed(folder)
    if shadow:
        raise UnsafeError(shadow)
    check_fork_safety()


def _shadowed(folder: str) -> str:
    """Which file beside the script would have been imported instead of a module that is loaded, if any."""
    try:
        beside = set(os.listdir(folder))
    except OSError:
        return ""
    for name, module in list(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if "." in name or name == "__main__" or not origin or not os.path.isabs(origin):
            continue
        for file in (f"{name}.py", os.path.join(name, "__init__.py")):
            path = os.path.join(folder, file)
            if file.partition(os.sep)[0] in beside and os.path.exists(path) and not _same(path, origin):
                return f"{path} has the name of a module that is already imported"
    return ""


def _same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # imported from an archive, say
        return False


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
                standby = _fork_standby(line)
            except OSError as error:
                _send(line, {"fork_failed": error.strerror or str(error)})
                continue
            if standby is not None:
                return _stand_by(*standby, guard_pid, preloaded)


def _fork_standby(line: socket.socket) -> tuple[socket.socket, int, int] | None:
    """Fork a grandchild. Returns in it only: its line to the guard, a descriptor that ends when it may continue,
    and the intermediate process.

    It is announced before the intermediate process ends, which makes it the guard's child: the guard never has a
    child that was not announced. Raises OSError when it cannot fork.
    """
    theirs, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held, release = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        _close(theirs, own, held, release)
        raise
    if pid == 0:
        _close(line, theirs, release)
        return own, held, _fork_again(own, held)
    _close(own, held)
    _announce(line, theirs)
    _close(theirs, release)
    os.waitpid(pid, 0)
    return None


def _announce(line: socket.socket, theirs: socket.socket) -> None:
    """Report to the guard what the intermediate process sends about its child."""
    theirs.settimeout(_FORK_S)
    try:
        answer = theirs.recv(64)
    except TimeoutError:  # it was killed, and its child holds the line
        answer = b""
    if answer.isdigit():
        theirs.setblocking(True)
        _send(line, {"standby": int(answer)}, theirs.fileno())
    else:
        _send(line, {"fork_failed": answer.decode(errors="replace") or "the intermediate process died"})


def _close(*those: socket.socket | int) -> None:
    for one in those:
        os.close(one) if isinstance(one, int) else one.close()


def _fork_again(own: socket.socket, held: int) -> int:
    """In the intermediate process: returns its number, in its child only; it exits when it may."""
    between_pid = os.getpid()  # later its child might get the guard's pid, which may have adopted it by then
    try:
        pid = os.fork()
        if pid == 0:
            return between_pid
        own.send(b"%d" % pid)
        os.read(held, 1)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the spawner was killed, so nobody is to be told
            own.send(str(error).encode(errors="replace")[:64])
    os._exit(0)


def _stand_by(
    line: socket.socket, held: int, between_pid: int, guard_pid: int, preloaded: Preloaded
) -> PythonProgram:
    """Wait for the guard's command, then become the worker in it."""
    os.setsid()
    os.read(held, 1)
    os.close(held)
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
    word, fds = _receive(line)
    doing: list[str] = ["prepare"]
    try:
        program = _prepare(line, json.loads(word), fds, preloaded, doing.append)
    except BaseException as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or repr(error)
        line.send(f"cannot {doing[-1]}: {reason}".encode(errors="replace")[:4096])
        os._exit(127)
    line.close()
    return program


def _await_adoption(between_pid: int) -> None:
    """The intermediate process is ending; there is no event for it, but it takes less than a millisecond."""
    ends = time.monotonic() + _FORK_S
    while os.getppid() == between_pid and time.monotonic() < ends:
        time.sleep(0.0002)


def _receive(line: socket.socket) -> tuple[bytes, list[int]]:
    try:
        data, ancillary, _, _ = line.recvmsg(
            _MESSAGE_BYTES, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:  # the spawner was killed before it had announced this process
        data = b""
    if not data:
        os._exit(0)
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content)
    return data, list(fds)


def _prepare(
    line: socket.socket,
    word: dict[str, Any],
    fds: list[int],
    preloaded: Preloaded,
    doing: Callable[[str], None],
) -> PythonProgram:
    with open(fds[0], "rb") as file:
        launch = json.loads(file.read())
    if word["stderr"]:
        os.dup2(fds[1], 2)
        os.close(fds[1])
    for name, fd in (("stdout", 1), ("stderr", 2)):
        path = launch[name]
        if path is not None and not (name == "stderr" and word["stderr"]):
            doing(f"open {path!r}")
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            os.dup2(opened, fd)
            os.close(opened)
    doing(f"start {launch['argv'][0]!r}")
    _take_signals(launch["ignored"])
    return become(launch, preloaded, lambda: line.send(STARTED))


def _take_signals(ignored: list[int]) -> None:
    """From here on signals are for the worker. Earlier ones were for the job as a whole, and are dropped."""
    linux.forget_job_signals()
    for signum in ignored:
        if signal.getsignal(signum) == signal.SIG_DFL:  # else a preloaded module handles it
            signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
