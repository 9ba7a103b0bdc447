"""What the spawner does: import, check that forking is safe, fork standbys when the guard asks for some."""

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
from collections.abc import Callable
from typing import Any, NoReturn

from elastic_agent.workers import _linux
from elastic_agent.workers._process_title import can_be_shown, show_as
from elastic_agent.workers._python_program import PythonProgram, become, forget_files, get_ready

__all__ = ["WorkerBornError", "serve", "serve_as_fork"]

_MESSAGE_BYTES = 64 * 1024
_DETAIL_BYTES = 16 * 1024
_THREADS_END_S = 0.5
_ADOPTION_S = 5.0
_ACCELERATORS = ("cuda", "xpu", "mtia")
_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel")


class UnsafeError(Exception):
    """Processes forked from this one would not be like fresh ones."""


class WorkerBornError(BaseException):
    """Raised in a worker that is a fork of its agent: unwinds the agent's calls; `program` is what it is to run."""

    def __init__(self, program: PythonProgram) -> None:
        super().__init__()
        self.program = program


def serve_as_fork(fd: int, guard_pid: int, preload: list[str], folder: str) -> NoReturn:
    """Be the spawner in a fork of the agent. Raises WorkerBornError in a forked worker."""
    os.setsid()
    _close_all_but(fd)
    _restore_signals()
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of the agent's own program
    raise WorkerBornError(serve(fd, guard_pid, preload, folder))


def _close_all_but(kept: int) -> None:
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd != kept:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(fd)


def _restore_signals() -> None:
    """As in a Python that was started with nothing ignored and nothing blocked, as the guard starts one."""
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def serve(fd: int, guard_pid: int, preload: list[str], folder: str) -> PythonProgram:
    """Be the spawner. Returns in a forked worker only, with what it is to run.

    `fd`: the line to the guard. `preload`: modules to import besides torch. `folder`: what `sys.path[0]` will be
    in the workers.
    """
    _linux.set_parent_death_signal(9)
    line = socket.socket(fileno=fd)
    line.set_inheritable(False)
    started = time.monotonic()
    try:
        _import_all(preload, folder)
        _check(folder)
        forget_files()  # imports what it needs
        _forget_the_agent()
    except UnsafeError as error:
        _say(line, {"unusable": str(error), "detail": ""})
        os._exit(0)
    except BaseException:
        detail = traceback.format_exc()[-_DETAIL_BYTES:]
        _say(line, {"unusable": "an import failed in it", "detail": detail})
        os._exit(0)
    gc.freeze()  # or the first collection of every worker would copy all that was imported
    gc.enable()
    show_as(["elastic-spawner"], dict(os.environ))
    _say(line, {"ready_s": time.monotonic() - started})
    return _fork_on_request(line, guard_pid)


def _say(line: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
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
                importlib.import_module(name)
        finally:
            sys.path.remove(folder)


def _forget_the_agent() -> None:
    """Let a script that imports this package get it fresh. What runs here goes on without being listed."""
    for name in [one for one in sys.modules if one.partition(".")[0] == "elastic_agent"]:
        del sys.modules[name]


def _check(folder: str) -> None:
    """Raise UnsafeError when forked processes would not be as good as fresh ones."""
    for name in _ACCELERATORS:
        if _asked_of_torch(name, "is_initialized"):
            raise UnsafeError(f"an imported module has initialised torch.{name}, which no fork survives")
    for path in _open_files():
        if path.startswith(_DEVICE_FILES):
            raise UnsafeError(f"an imported module has opened {path}, which no fork survives")
    if not can_be_shown():
        raise UnsafeError("this kernel lets no process show another command line than its own")
    shadow = _shadowed(folder)
    if shadow:
        raise UnsafeError(shadow)
    _try_a_fork()
    left = _threads()
    if len(left) > 1:
        names = ", ".join(sorted(left[1:])) or "?"
        raise UnsafeError(f"an imported module has started threads ({names}), which a fork loses")


def _asked_of_torch(accelerator: str, question: str) -> bool:
    ask = getattr(getattr(sys.modules["torch"], accelerator, None), question, None)
    return bool(ask()) if ask is not None else False


def _open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the one that listed them
            continue
    return found


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
                return f"{path} has the name of a module that is imported already"
    return ""


def _same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # imported from an archive, say
        return False


def _try_a_fork() -> None:
    """Libraries that mind forks (OpenBLAS) end their threads before one, and some devices forbid it."""
    pid = os.fork()
    if pid == 0:
        forbidden = any(_asked_of_torch(name, "_is_in_bad_fork") for name in _ACCELERATORS)
        os._exit(1 if forbidden else 0)
    if os.waitpid(pid, 0)[1] != 0:
        raise UnsafeError("an accelerator is in use already, and torch forbids it to forked processes")


def _threads() -> list[str]:
    """The names of this process's threads, the first one first; those that are ending get a moment."""
    ends = time.monotonic() + _THREADS_END_S
    while len(numbers := os.listdir("/proc/self/task")) > 1 and time.monotonic() < ends:
        time.sleep(0.002)
    names = []
    for number in sorted(numbers, key=int):
        try:
            with open(f"/proc/self/task/{number}/comm") as file:
                names.append(file.read().strip())
        except OSError:
            continue
    return names


# --- forking --------------------------------------------------------------------------------------


def _fork_on_request(line: socket.socket, guard_pid: int) -> PythonProgram:
    while True:
        try:
            data = line.recv(_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        for _ in range(json.loads(data)["fork"]):
            standby = _fork_standby(line)
            if standby is not None:
                return _stand_by(*standby, guard_pid)


def _fork_standby(line: socket.socket) -> tuple[socket.socket, int] | None:
    """Fork a grandchild; returns its line to the guard and a descriptor that ends when it may go on, in it only.

    It is announced before the process between ends, which makes it the guard's child: the guard never has a child
    that it was not told of.
    """
    theirs, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held, release = os.pipe()
    pid = os.fork()
    if pid == 0:
        line.close()
        theirs.close()
        os.close(release)
        return (own, held) if _fork_again(own, held) else None
    own.close()
    os.close(held)
    answer = theirs.recv(64)
    if answer.isdigit():
        _say(line, {"standby": int(answer)}, theirs.fileno())
    else:
        _say(line, {"fork_failed": answer.decode(errors="replace") or "the process between died"})
    os.close(release)
    theirs.close()
    os.waitpid(pid, 0)
    return None


def _fork_again(own: socket.socket, held: int) -> bool:
    """In the process between: True in its child; it ends itself when it may."""
    try:
        pid = os.fork()
        if pid == 0:
            return True
        own.send(b"%d" % pid)
        os.read(held, 1)
    except BaseException as error:
        own.send(str(error).encode(errors="replace")[:64])
    os._exit(0)


def _stand_by(line: socket.socket, held: int, guard_pid: int) -> PythonProgram:
    """Wait for the guard's word, then become the worker it names."""
    os.setsid()
    os.read(held, 1)
    os.close(held)
    _await_adoption(guard_pid)
    _linux.set_parent_death_signal(9)
    if os.getppid() != guard_pid:  # it died before the line above
        os._exit(127)
    show_as(["elastic-standby"], dict(os.environ))
    get_ready()
    word, fds = _receive(line)
    doing: list[str] = ["prepare"]
    try:
        program = _prepare(json.loads(word), fds, doing.append)
    except BaseException as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or repr(error)
        line.send(f"cannot {doing[-1]}: {reason}".encode(errors="replace")[:4096])
        os._exit(127)
    line.close()  # tells the guard that the program runs
    return program


def _await_adoption(guard_pid: int) -> None:
    """The process between is ending; nothing tells when it has, but it takes no millisecond."""
    ends = time.monotonic() + _ADOPTION_S
    while os.getppid() != guard_pid and time.monotonic() < ends:
        time.sleep(0.0002)


def _receive(line: socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, _, _ = line.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(4 * 4))
    if not data:
        os._exit(0)
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content)
    return data, list(fds)


def _prepare(word: dict[str, Any], fds: list[int], doing: Callable[[str], None]) -> PythonProgram:
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
    if launch["cwd"] is not None:
        doing(f"enter the directory {launch['cwd']!r}")
        os.chdir(launch["cwd"])
    doing(f"start {launch['argv'][0]!r}")
    return become(launch["argv"], launch["env"])
