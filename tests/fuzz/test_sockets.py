"""What arrives on the sockets of an agent: commands, reports of workers, HTTP; and the answers to commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncGenerator, Coroutine
from typing import Any
from unittest import mock

import msgspec

from elastic_agent.agent.control import socket as control
from elastic_agent.agent.control.socket import Answer, Command, ControlSocket, Question, command
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.monitoring.status import RunStatus
from elastic_agent.values import Endpoint
from elastic_agent.web.server import ShownRun, StatusServer

from .damage import fuzzed
from .samples import TRACEBACK, statuses

HELLO: dict[str, Any] = {"slot": 0, "generation": 1, "pid": 4711}
GROUP = {"group": "default_pg", "enqueued": 12, "started": 12, "completed": 11}
RECENT = [{"serial": 12, "name": "all_reduce", "size_bytes": 4096}]
DETAILS = {"details": True, "line": "train.py:88", "waits_in": "all_reduce", "stack": TRACEBACK}
PROGRESS = (
    HELLO,
    {**HELLO, "groups": [GROUP]},
    {**HELLO, "groups": [{**GROUP, "recent": RECENT, "ranks": [0, 1], "timeout_s": 600.0}], **DETAILS},
)
HEAD = b" HTTP/1.1\r\nHost: localhost:8080\r\nAccept: */*\r\n\r\n"
PATHS = (b"/", b"/?run=run&all=1", b"/api/status?run=run", b"/metrics", b"/none?a=%ff%00&b")
REQUESTS = (
    *(b"GET " + path + HEAD for path in PATHS),
    b"HEAD /" + HEAD,
    b"GET / HTTP/1.0\r\nHost: [::1]:8080\r\nContent-Length: 5\r\n\r\nhello",
    b"GET /\r\n",
)


def run_loudly(work: Coroutine[Any, Any, None]) -> None:
    """Run it in an event loop; what fails in the loop fails here."""
    failures: list[dict[str, Any]] = []
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda _, context: failures.append(context))
        runner.run(work)
    assert failures == []


def reader_of(data: bytes, limit: int) -> asyncio.StreamReader:
    """A stream of these bytes, to be made in an event loop."""
    reader = asyncio.StreamReader(limit=limit)
    reader.feed_data(data)
    reader.feed_eof()
    return reader


class Writer:
    """The other end's, which takes everything."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._ours, self._theirs = socket.socketpair()

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def get_extra_info(self, _: str) -> socket.socket:
        return self._ours

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


def lines_of(*messages: msgspec.Struct) -> bytes:
    """These messages as lines."""
    return b"".join(msgspec.json.encode(message) + b"\n" for message in messages)


ASK = Command("ask", "n0", question=Question("logs", 1, 2, 20, known={"/logs/000001/n0/0/stdout.log": 7}))


@fuzzed(lines_of(Command("describe")), lines_of(Command("drain", "n0", 5.0, "by hand")), lines_of(ASK))
def test_command(data: bytes) -> None:
    run_loudly(converse(data))


async def converse(data: bytes) -> None:
    """Send a control socket these bytes; its answers are well-formed."""

    async def act(_: Command) -> AsyncGenerator[Answer]:
        yield Answer("done")

    writer = Writer()
    await ControlSocket(act)._serve(reader_of(data, control.LONGEST_LINE), writer)  # type: ignore[arg-type]
    for line in bytes(writer.data).splitlines():
        msgspec.json.decode(line, type=Answer)


@fuzzed(
    lines_of(Answer("draining", done=False)), lines_of(Answer(run_id="run", node="n0", status=statuses()[1]))
)
def test_answer_to_a_command(data: bytes) -> None:
    """Read it as ``elastic-agent status`` and others do."""

    async def connected(*_: object, **__: object) -> tuple[asyncio.StreamReader, Writer]:
        return reader_of(data, control.LONGEST_ANSWER), Writer()

    async def ask() -> None:
        address = control.AgentAddress("name", os.geteuid(), 1)
        with contextlib.suppress(OSError, ValueError):
            async for answer in command(address, Command("status")):
                msgspec.json.encode(answer)

    with mock.patch.object(asyncio, "open_unix_connection", connected):
        run_loudly(ask())


@fuzzed(*(json.dumps(report).encode() for report in PROGRESS))
def test_progress_of_a_worker(data: bytes) -> None:
    run_loudly(report(data))


async def report(data: bytes) -> None:
    """Send an agent these bytes as a worker's datagram, after a valid one."""
    collectives = Collectives()
    collectives.open()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as worker:
        worker.bind("")
        for message in (json.dumps(PROGRESS[1]).encode(), data):
            with contextlib.suppress(OSError):  # longer than a datagram can be
                worker.sendto(message, f"\0{collectives.address}")
            collectives._readable()
    for progress in collectives.workers.values():
        msgspec.json.encode(progress.groups)
    collectives.close()


async def _status() -> RunStatus:
    return statuses()[1]


async def request(data: bytes) -> bytes:
    """Return the answer of a status page to a client that sends these bytes and no more."""
    page = StatusServer(Endpoint("127.0.0.1", 0), ShownRun(_status))
    client, accepted = socket.socketpair()
    with client:
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(BlockingIOError):  # longer than a request can be
            client.send(data)
        client.shutdown(socket.SHUT_WR)
        accepted.setblocking(False)
        await page._attend(accepted)
        answer = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while more := await loop.sock_recv(client, 65536):
                answer += more
    page.close()
    return bytes(answer)


@fuzzed(*REQUESTS)
def test_request_for_a_page(data: bytes) -> None:
    head = asyncio.run(request(data)).partition(b"\r\n\r\n")[0]
    if head.startswith(b"HTTP/"):
        assert b"\n" not in head.replace(b"\r\n", b""), "a header of the answer has a line of the client's"
    assert b" 500 " not in head[:20]
