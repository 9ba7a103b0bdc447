"""Where an agent hears commands of this machine's users: a socket of its own, one JSON message a line.

The socket is a name outside the file system, so nothing is left of it when the agent is gone, however that ended. It
carries the user's number and the agent's process id, and some chance; only that user and root are listened to.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
from msgspec import Struct

PREFIX = "elastic-agent/"
LONGEST_LINE = 16 * 1024


class Command(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What somebody wants."""

    do: str
    """describe, drain or stop."""
    node: str | None = None
    """drain: who is to leave; None: the agent that hears this."""
    left_s: float | None = None
    """How long workers have to save; None: as the agent's settings say."""
    words: str = ""
    """Who wants it, for people."""


class Answer(Struct, frozen=True, omit_defaults=True):
    """What the agent says to it; the last one has ``done``."""

    text: str = ""
    done: bool = True
    failed: bool = False
    run_id: str = ""
    node: str = ""
    nodes: tuple[str, ...] = ()
    """describe: the nodes of the present world."""


Act = Callable[[Command], AsyncIterator[Answer]]


class ControlSocket:
    """The agent's end."""

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server

    @classmethod
    async def open(cls, act: Act) -> ControlSocket:
        """Listen; every command is handed to ``act``, whose answers go back.

        Raises:
            OSError: the name is taken, or this system has no such sockets.
        """

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await _serve(reader, writer, act)
            except (
                OSError,
                EOFError,
                ValueError,
                asyncio.LimitOverrunError,
            ):  # gone, or no message of ours: nobody else is disturbed
                pass
            finally:
                writer.close()

        # Containers that share the host's network share these names too, and have pids of their own.
        name = f"\0{PREFIX}{os.geteuid()}/{os.getpid()}-{secrets.token_hex(4)}"
        return cls(await asyncio.start_unix_server(serve, name, limit=LONGEST_LINE))

    def close(self) -> None:
        """Hear nothing more."""
        self._server.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, act: Act) -> None:
    if _peer(writer.get_extra_info("socket")) not in (0, os.geteuid()):
        return
    command = msgspec.json.decode(await reader.readuntil(b"\n"), type=Command)
    async for answer in act(command):
        writer.write(msgspec.json.encode(answer) + b"\n")
        await writer.drain()


def _peer(sock: socket.socket) -> int:
    """The user at the other end."""
    _, uid, _ = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return int(uid)


# -- the other end ------------------------------------------------------------------------------


def agents_here() -> list[str]:
    """Names of the sockets of this machine's agents that would listen to this user."""
    try:
        lines = Path("/proc/net/unix").read_text().splitlines()
    except OSError:
        return []
    names = {line.split()[-1] for line in lines if line.rpartition(" ")[2].startswith(f"@{PREFIX}")}
    own = str(os.geteuid())
    return sorted(name[1:] for name in names if own in ("0", name.split("/")[1]))


async def command(name: str, wanted: Command) -> AsyncIterator[Answer]:
    """Have an agent do something; its answers until the last, or until it is gone.

    Raises:
        OSError: there is no such agent any more, or what listens there is another user's.
    """
    reader, writer = await asyncio.open_unix_connection(f"\0{name}", limit=LONGEST_LINE)
    try:
        if _peer(writer.get_extra_info("socket")) not in (0, int(name.split("/")[1])):
            raise PermissionError(f"{name} belongs to somebody else")
        writer.write(msgspec.json.encode(wanted) + b"\n")
        await writer.drain()
        async for line in reader:
            answer = msgspec.json.decode(line, type=Answer)
            yield answer
            if answer.done:
                return
    finally:
        writer.close()


async def answer_of(name: str, wanted: Command) -> Answer | None:
    """The first answer; None if the agent is gone."""
    answers = command(name, wanted)
    try:
        return await anext(answers, None)
    except OSError:
        return None
    finally:
        await _close(answers)


async def _close(answers: AsyncIterator[Answer]) -> None:
    closing: Callable[[], Awaitable[None]] | None = getattr(answers, "aclose", None)
    if closing is not None:
        await closing()
