"""What arrives on the sockets of an agent: commands, reports of workers, HTTP; and the answers to commands."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import socket
from types import SimpleNamespace
from typing import Any

import msgspec

from elastic_agent.agent.control import socket as control
from elastic_agent.agent.control.socket import Answer, Command, ControlSocket, command
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.agent.worker_group.datagrams import WorkerDatagrams
from elastic_agent.protocol.records import Address
from elastic_agent.torchrun.messages import Channel, FromSidecar, NextWorld, Over, Sealed
from elastic_agent.web.server import _Handler
from elastic_agent.workers.guard.messages import LineBuffer, encode
from tests.fuzz.target import Target, ViolationError

from . import support


def targets() -> list[Target]:
    """Sockets of the agent and of the commands."""
    loop = _Loop()
    commands = tuple(
        msgspec.json.encode(one) + b"\n"
        for one in (Command("describe"), Command("drain", "n0", 5.0, "by hand"))
    )
    answers = tuple(
        msgspec.json.encode(one) + b"\n"
        for one in (
            Answer("draining", done=False),
            Answer(run_id="run", node="n0", status=support.statuses()[1]),
        )
    )
    progress = _Progress(loop)
    return [
        Target(
            "control-command",
            commands,
            lambda data: loop.run(_converse(data)),
            ("agent/control/socket.py ControlSocket._converse",),
            0.4,
        ),
        Target(
            "control-answer",
            answers,
            lambda data: loop.run(_ask(data)),
            ("agent/control/socket.py command",),
            0.2,
        ),
        Target(
            "worker-progress",
            _progress_samples(),
            progress.feed,
            ("agent/worker_group/collectives.py Collectives._receive",),
            0.5,
            progress.close,
        ),
        Target("status-page", _requests(), _http, weight=0.2),
        Target(
            "guard-lines",
            (encode({"event": "exited", "slot": 1, "pid": 7}) * 5,),
            _lines,
            ("workers/guard/messages.py decode",),
            0.5,
        ),
        Target(
            "sidecar-lines",
            _sidecar_samples(),
            _sidecar,
            ("torchrun/messages.py Channel.arrived",),
            0.3,
            loop.close,
        ),
    ]


class _Loop:
    """An event loop that fails when something in it does."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.error: BaseException | None = None
        self._loop.set_exception_handler(self._failed)

    def close(self) -> None:
        self._loop.close()

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.error = context.get("exception") or RuntimeError(context["message"])

    def run(self, work: Any) -> Any:
        try:
            return self._loop.run_until_complete(work)
        finally:
            error, self.error = self.error, None
            if error is not None:
                raise error


class _Writer:
    """The other end's, which takes everything."""

    def __init__(self) -> None:
        self.data = bytearray()
        ours, self._theirs = socket.socketpair()
        self._socket = ours

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def get_extra_info(self, _: str) -> socket.socket:
        return self._socket

    def close(self) -> None:
        self._socket.close()
        self._theirs.close()


async def _act(_: Command) -> Any:
    yield Answer("done")


async def _converse(data: bytes) -> None:
    reader = asyncio.StreamReader(limit=control.LONGEST_LINE)
    reader.feed_data(data)
    reader.feed_eof()
    writer = _Writer()
    await ControlSocket(_act)._serve(reader, writer)  # type: ignore[arg-type]
    for line in bytes(writer.data).splitlines():
        msgspec.json.decode(line, type=Answer)


async def _ask(data: bytes) -> None:
    """What ``elastic-agent status`` and others read."""

    async def connected(*_: object, **__: object) -> tuple[asyncio.StreamReader, _Writer]:
        reader = asyncio.StreamReader(limit=control.LONGEST_ANSWER)
        reader.feed_data(data)
        reader.feed_eof()
        return reader, _Writer()

    original, asyncio.open_unix_connection = asyncio.open_unix_connection, connected  # type: ignore[assignment]
    try:
        address = control.AgentAddress("name", os.geteuid(), 1)
        async for answer in command(address, Command("status")):
            msgspec.json.encode(answer)
    except (OSError, ValueError):
        pass
    finally:
        asyncio.open_unix_connection = original


class _Datagrams:
    """A worker's socket, and an agent's that reads what it sends."""

    def __init__(self, loop: _Loop) -> None:
        self._run = loop.run
        self.worker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.worker.bind("")

    def _deliver(self, datagrams: WorkerDatagrams, data: bytes) -> None:
        async def deliver() -> None:
            assert datagrams.address is not None or datagrams.open()
            try:
                self.worker.sendto(data, "\0" + str(datagrams.address))
            except OSError:  # longer than a datagram can be
                return
            datagrams._readable()

        self._run(deliver())

    def close(self) -> None:
        self.worker.close()


class _Progress(_Datagrams):
    def __init__(self, loop: _Loop) -> None:
        super().__init__(loop)
        self._collectives = Collectives()
        self._count = 0

    def feed(self, data: bytes) -> None:
        self._count += 1
        if self._count % 64 == 0:  # the agent has begun another generation
            self._collectives._generation = 0
            self._collectives._workers.clear()
            self._collectives._peers.clear()
        self._deliver(self._collectives._datagrams, data)
        for one in self._collectives.workers.values():
            msgspec.json.encode(one.groups)

    def close(self) -> None:
        super().close()
        if self._collectives._datagrams._socket is not None:
            self._collectives._datagrams._socket.close()


def _progress_samples() -> tuple[bytes, ...]:
    hello: dict[str, Any] = {"slot": 0, "generation": 1, "pid": 4711}
    group = {"group": "default_pg", "enqueued": 12, "started": 12, "completed": 11}
    recent = [{"serial": 12, "name": "all_reduce", "size_bytes": 4096}]
    detailed = {**group, "recent": recent, "ranks": [0, 1], "timeout_s": 600.0}
    place = {"line": "train.py:88", "waits_in": "all_reduce", "stack": support.TRACEBACK}
    answers = (hello, {**hello, "groups": [group]}, {**hello, "groups": [detailed], "details": True, **place})
    return tuple(json.dumps(one).encode() for one in answers)


def _requests() -> tuple[bytes, ...]:
    head = b" HTTP/1.1\r\nHost: localhost:8080\r\nAccept: */*\r\n\r\n"
    paths = (
        b"/",
        b"/?run=run&all=1",
        b"/api/status?run=run",
        b"/metrics",
        b"/none?a=%ff%00&b",
    )
    wrong = b"GET / HTTP/1.0\r\nHost: [::1]:8080\r\nContent-Length: 5\r\n\r\nhello"
    return (*(b"GET " + path + head for path in paths), b"HEAD /" + head, wrong, b"GET /\r\n")


class _Pages:
    """Of one run."""

    def status(self, run_id: str | None) -> object:
        if run_id not in (None, "run"):
            raise LookupError("there is no run of this name here")
        return support.statuses()[1]

    def run_ids(self) -> list[str]:
        return ["run"]

    def statuses(self) -> list[object]:
        return list(support.statuses())


class _Connection:
    """A client's, without a network."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.answer = bytearray()

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._data)

    def sendall(self, data: bytes) -> None:
        self.answer += data

    def settimeout(self, _: float) -> None: ...


_SERVER = SimpleNamespace(is_local=True, pages=_Pages())


def _http(data: bytes) -> None:
    connection = _Connection(data)
    _Handler(connection, ("127.0.0.1", 1), _SERVER)  # type: ignore[arg-type]
    answer = bytes(connection.answer)
    head = answer.partition(b"\r\n\r\n")[0]
    if answer.startswith(b"HTTP/") and b"\n" in head.replace(b"\r\n", b""):
        raise ViolationError(f"a header of the answer has a line of the client's: {head[:200]!r}")
    if b" 500 " in answer[:20]:
        raise ViolationError("internal error")


def _lines(data: bytes) -> None:
    """However a stream is cut, its messages are the same; lines that are none are refused."""
    expected = [{"event": "exited", "slot": 1, "pid": 7}, {"event": "ready"}]
    stream = b"".join(map(encode, expected))
    buffer, found, dice = LineBuffer(), list[Any](), random.Random(data)
    while stream:
        size = 1 + dice.randrange(30)
        found += buffer.feed(stream[:size])
        stream = stream[size:]
    support.same(found, expected)
    with contextlib.suppress(ValueError, RecursionError):
        LineBuffer().feed(data)


def _sidecar_samples() -> tuple[bytes, ...]:
    messages = (Sealed(0, 2, Address("127.0.0.1", 4000)), Over("finished"), NextWorld())
    return (b"".join(msgspec.json.encode(one) + b"\n" for one in messages[:2]),)


def _sidecar(data: bytes) -> None:
    """The other end is a process of the same package: what it sends is well-formed, but may come in any pieces."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel: Channel[Any] = Channel(ours, FromSidecar)
        theirs.settimeout(0.1)
        theirs.sendall(data[:100_000])
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            channel.arrived()
