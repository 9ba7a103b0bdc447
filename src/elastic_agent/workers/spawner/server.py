"""The spawner's program: import, check that forking is safe, fork standbys when the guard requests some."""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from elastic_agent import linux
from elastic_agent.integrations import post_import
from elastic_agent.workers.guard.messages import STARTED
from elastic_agent.workers.spawner.background import in_background
from elastic_agent.workers.spawner.fork_safety import UnsafeError, check_fork_safety
from elastic_agent.workers.spawner.generators import Generators
from elastic_agent.workers.spawner.learned import (
    Learned,
    NotLearnedError,
    SpoiledError,
    forget,
    import_learned,
)
from elastic_agent.workers.spawner.process_title import can_be_shown, show_as
from elastic_agent.workers.spawner.python_program import (
    Preloaded,
    PythonProgram,
    become,
    forget_files,
    get_ready,
)

_MESSAGE_BYTES = 64 * 1024
_DETAIL_BYTES = 16 * 1024
_FORK_S = 5.0
_MOST_LEFT_OUT = 20


class WorkerBornError(BaseException):
    """Raised in a worker that is a fork of its agent: unwinds the agent's calls; `program` is what it is to run."""

    def __init__(self, program: PythonProgram) -> None:
        super().__init__()
        self.program = program


def serve_as_fork(
    fd: int, guard_pid: int, preload: list[str], folder: str, learn: Mapping[str, Any] | None
) -> NoReturn:
    """Be the spawner in a fork of the agent. Raises WorkerBornError in a forked worker."""
    os.setsid()
    linux.close_all_but({fd})
    _restore_signals()
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of the agent's own program
    raise WorkerBornError(serve(fd, guard_pid, preload, folder, learn))


def _restore_signals() -> None:
    """As in a Python that was started with nothing ignored and the signals of jobs blocked, as the guard starts one."""
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        usual = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
        if signal.getsignal(signum) not in (usual, None):  # None: a handler in C, which is not ours
            signal.signal(signum, usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, linux.JOB_SIGNALS)


def serve(
    fd: int, guard_pid: int, preload: list[str], folder: str, learn: Mapping[str, Any] | None = None
) -> PythonProgram:
    """Be the spawner. Returns in a forked worker only, with what it is to run.

    `fd`: the line to the guard. `preload`: modules to import besides torch. `folder`: what `sys.path[0]` will be
    in the workers. `learn`: what is known of the modules that workers import, see `import_learned`; to learn more of
    them is done in the background.
    """
    linux.set_parent_death_signal(9)
    line = socket.socket(fileno=fd)
    line.set_inheritable(False)
    started = time.monotonic()
    generators = Generators()
    before = dict(os.environ)
    doing = "an import failed in the spawner"
    try:
        background = in_background() if learn is not None and learn["reported"] else contextlib.nullcontext()
        with background, generators.recorded():
            _import_all(preload, folder)
            doing = "the check of the spawner failed"
            _check(folder)
            learned = _import_learned(line, learn, folder)
        forget_files()  # imports what it needs
        post_import.preload()
        _forget_the_agent()
    except UnsafeError as error:
        _send(line, {"unusable": str(error), "detail": ""})
        os._exit(0)
    except BaseException:
        detail = traceback.format_exc().encode("ascii", "backslashreplace")[-_DETAIL_BYTES:].decode()
        _send(line, {"unusable": doing, "detail": detail})
        os._exit(0)
    imported = {
        name: (before.get(name), value) for name, value in os.environ.items() if before.get(name) != value
    }
    gc.freeze()  # or the first collection of every worker would copy all that was imported
    gc.enable()
    show_as(["elastic-spawner"], dict(os.environ))
    ready_s = time.monotonic() - started
    _send(line, {"ready_s": ready_s, "learned": len(learned.names), "serial": learned.serial})
    return _fork_on_request(line, guard_pid, Preloaded(imported, learned, generators))


def _send(line: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
    ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    try:
        line.sendmsg([json.dumps(message).encode()], ancillary)
    except OSError:  # the guard is gone, and so are we
        os._exit(1)


# --- before the first fork ------------------------------------------------------------------------


def _import_all(names: list[str], folder: str) -> None:
    gc.disable()  # what is imported stays: looking through it for garbage is a tenth of the time
    if "torch" not in sys.modules:
        importlib.import_module("torch")
    if names:
        sys.path.insert(0, folder)  # the user's own modules lie beside the script
        try:
            for name in names:
                _import_named(name, folder)
        finally:
            sys.path.remove(folder)
    _flush()


def _import_named(name: str, folder: str) -> None:
    """Import a module of ``--preload``; raises UnsafeError if there is none of this name."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that it imports is missing
        raise UnsafeError(
            f"--preload {name}: there is no module {error.name}, neither in {folder} nor among the installed packages"
        ) from None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # or each worker would, when it gets streams of its own
    linux.flush_c_streams()


def _import_learned(line: socket.socket, learn: Mapping[str, Any] | None, folder: str) -> Learned:
    """Import what workers of this script have imported. Ends this process if that cannot be, or must not have been."""
    if learn is None:
        return Learned()
    before = len(sys.modules)
    try:
        learned = import_learned(learn, folder)
        _check(folder)
    except SpoiledError as spoiled:
        _send(line, {"left_out": spoiled.left_out[:_MOST_LEFT_OUT]})
        os._exit(0)
    except (NotLearnedError, UnsafeError) as error:
        forget(learn)
        if len(sys.modules) == before and not learn["reported"]:
            _send(line, {"not_learned": str(error), "continues": True})
            return Learned()
        _send(line, {"not_learned": str(error), "continues": False})
        os._exit(0)
    _flush()
    return learned


def _forget_the_agent() -> None:
    """Let a script that imports this package get it fresh. What runs here stays loaded without being listed."""
    for name in [one for one in sys.modules if one.partition(".")[0] == "elastic_agent"]:
        del sys.modules[name]


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
    outdated = ""
    while True:
        try:
            data = line.recv(_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        if not outdated and (outdated := preloaded.learned.outdated()):
            _send(line, {"outdated": outdated})
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
    data, ancillary, _, _ = line.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC)
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
