"""torch's TCPStore servers, in this process or in a small one of their own, which an agent has made.

The process is forked by the spawner as soon as that has imported torch (where there is no spawner, the agent executes
`store_servers.py FD`, which loads torch's compiled code only), and gets its listening sockets over a line to the agent.
It ends with the agent, whose end of the line closes then, and when the agent has been suspended for some seconds:
nodes would renew their leases at a store whose coordinator decides nothing. Nothing is imported here but what torch
needs anyway.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import types

if not __package__:  # run by path
    sys.path.append(os.path.abspath(__file__).rsplit(os.sep, 2)[0])

from elastic_agent import linux
from elastic_agent.name_lookups import no_dns_queries, shorten_lookups

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from torch._C._distributed_c10d import TCPStore

MESSAGE_BYTES = 4096
PROCESS_NAME = "elastic-stores"
WHOLE_TORCH = "--whole-torch"
"""The argument with which torch's Python modules are imported, too."""

_START_S = 30.0
_LOOK_EVERY_MS = 1000
_SUSPENDED_LOOKS = 3
"""The number of times in a row that the agent is seen to be suspended before its stores end."""
_MOST_OPEN_FILES = 65536


def serve_store(sock: socket.socket, address: str) -> TCPStore:
    """Return a TCPStore server on a listening socket, which becomes the store's; it serves until it is destroyed.

    `address`: where the server's own client connects, at the port of the socket.

    Raises:
        RuntimeError: the server could not be made.
    """
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    port = int(sock.getsockname()[1])
    with no_dns_queries():  # the server dials itself
        return TCPStore(
            address,
            port,
            None,
            True,
            timedelta(seconds=_START_S),
            wait_for_workers=False,
            master_listen_fd=sock.detach(),
            use_libuv=True,
        )


def allow_many_connections() -> None:
    """Raise the limit of open files: nodes hold three connections to the host, and 1024 would end at 340 nodes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def first_line(error: BaseException) -> str:
    """Return the first line of a torch error, without its C++ traceback."""
    return str(error).strip().split("\n", 1)[0][:300]


def memory_limit() -> str:
    """Return the limit of this process's address space, which its children have too, and how to lift it, if any."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"its address space is limited to {limit // 10**6} MB: ulimit -v unlimited"


def run(line: socket.socket) -> NoReturn:
    """Be the process of the servers, until the line closes.

    A request is `{"serve": ADDRESS, "number": N}` with a listening socket, or `{"close": N}`; the answer is
    `{"error": TEXT}`, empty for success. The first message is `{"pid": PID}`, when torch has been imported.
    """
    for signum in linux.JOB_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # it ends when the agent does, which handles them
    linux.unblock_job_signals()
    linux.set_process_name(PROCESS_NAME)
    threading.Thread(target=_end_with_agent, args=(line,), daemon=True).start()
    allow_many_connections()
    shorten_lookups()
    stores: dict[int, TCPStore] = {}
    if "torch" not in sys.modules:
        _import_torch(line)

    with open(os.devnull, "r+b") as nowhere:  # torch's server warns of every client that hangs up
        for stream in range(3):
            os.dup2(nowhere.fileno(), stream)
    with contextlib.suppress(OSError):  # the agent is gone
        line.send(json.dumps({"pid": os.getpid()}).encode())
        while request := _receive(line):
            line.send(json.dumps({"error": _carry_out(*request, stores)}).encode())
    os._exit(0)


def _import_torch(line: socket.socket) -> None:
    """Load torch's compiled code without its Python modules, which would take two thirds of the time and the memory.

    If that fails in a version of torch, this program is executed again and imports all of it: the compiled code cannot
    be initialized twice.
    """
    spec = importlib.util.find_spec("torch")
    if WHOLE_TORCH in sys.argv or spec is None or not spec.submodule_search_locations:
        import torch  # noqa: F401
    else:
        try:
            _load_compiled_code(spec.submodule_search_locations)
        except Exception:
            line.set_inheritable(True)
            os.execv(sys.executable, [sys.executable, "-P", __file__, str(line.fileno()), WHOLE_TORCH])


def _load_compiled_code(folders: list[str]) -> None:
    """Load `torch._C`, and what it has of c10d, with empty modules in the places of those that it looks up."""
    package, distributed = types.ModuleType("torch"), types.ModuleType("torch.distributed")
    package.__path__ = folders
    sys.modules.update({"torch": package, "torch.distributed": distributed})
    from torch._C import _c10d_init

    _c10d_init()
    from torch._C._distributed_c10d import TCPStore  # noqa: F401


def _end_with_agent(line: socket.socket) -> None:
    """End this process when the agent has ended or is suspended, whatever the other threads do.

    The line stays open while a process that the agent forked has inherited its end: a program that calls torch's
    launcher may fork its workers.
    """
    agent_pid, _ = linux.peer_of(line)
    end = select.poll()
    end.register(line, 0)
    try:
        end.register(os.pidfd_open(agent_pid), select.POLLIN)
    except ProcessLookupError:
        os._exit(0)
    suspended_looks = 0
    while suspended_looks < _SUSPENDED_LOOKS and not end.poll(_LOOK_EVERY_MS):
        agent = linux.read_process(agent_pid)  # None, too, when this process has too many open files
        suspended_looks = suspended_looks + 1 if agent is not None and agent.frozen else 0
    os._exit(0)


def _receive(line: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Return the next request and the descriptor that came with it, -1 without one; None: the agent is gone."""
    data, fds = linux.receive(line, MESSAGE_BYTES)
    return (json.loads(data), fds[0] if fds else -1) if data else None


def _carry_out(request: dict[str, Any], fd: int, stores: dict[int, TCPStore]) -> str:
    """Return the error, or nothing."""
    if "close" in request:
        del stores[request["close"]]  # its destructor closes the server
        return ""
    if fd < 0:
        return "the process of the stores has too many open files"
    try:
        stores[request["number"]] = serve_store(socket.socket(fileno=fd), request["serve"])
    except Exception as error:
        failed = first_line(error) or "the server could not be made"
        # EAGAIN: a thread cannot be made, perhaps as there is no room for its stack.
        limit = memory_limit() if os.strerror(errno.EAGAIN) in failed else ""
        return f"{failed} ({limit})" if limit else failed
    return ""


if __name__ == "__main__":
    run(socket.socket(fileno=int(sys.argv[1])))
