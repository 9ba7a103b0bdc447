"""torch's TCPStore servers, in this process or in a small one of their own, which an agent has made.

The process is forked by the spawner as soon as that has imported torch (where there is no spawner, it is
`python -m elastic_agent.store_servers FD`), and gets its listening sockets over a line to the agent. It ends with the
agent, whose end of the line closes then. Nothing is imported here but what the spawner has, or torch brings along.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import signal
import socket
import sys

from elastic_agent import linux
from elastic_agent.name_lookups import no_dns_queries, shorten_lookups

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from torch._C._distributed_c10d import TCPStore

MESSAGE_BYTES = 4096

_START_S = 30.0
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


def run(line: socket.socket) -> NoReturn:
    """Be the process of the servers, until the line closes.

    A request is `{"serve": ADDRESS, "number": N}` with a listening socket, or `{"close": N}`; the answer is
    `{"error": TEXT}`, empty for success. The first message is `{"pid": PID}`, when torch has been imported.
    """
    for signum in linux.JOB_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # it ends when the agent does, which handles them
    linux.unblock_job_signals()
    allow_many_connections()
    shorten_lookups()
    stores: dict[int, TCPStore] = {}
    with contextlib.suppress(OSError):  # the agent is gone
        import torch  # noqa: F401

        line.send(json.dumps({"pid": os.getpid()}).encode())
        while request := _receive(line):
            line.send(json.dumps({"error": _carry_out(*request, stores)}).encode())
    os._exit(0)


def _receive(line: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Return the next request and the descriptor that came with it, -1 without one; None: the agent is gone."""
    data, ancillary, _, _ = line.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content)
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
    except RuntimeError as error:
        return first_line(error) or "the server could not be made"
    return ""


if __name__ == "__main__":
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch's server warns of every client that hangs up
    run(socket.socket(fileno=int(sys.argv[1])))
