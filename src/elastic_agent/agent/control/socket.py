"""The control socket, on which an agent receives commands of this machine's users: one JSON message a line.

The socket is a name outside the file system, so nothing is left of it when the agent is gone, however it ended. The
name contains the user's number, the agent's process id and random digits; only that user and root are served.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from elastic_agent.linux import peer_of
from elastic_agent.monitoring.status import RunStatus
from elastic_agent.protocol import Count, Generation, Name, Seconds

LONGEST_LINE = 16 * 1024
"""Of a command, bytes."""

LONGEST_ANSWER = 16 * 1024 * 1024
"""Bytes; the status of a run with many nodes and generations is long."""

ANSWER_S = 2.0
"""The time that an agent has to describe itself, before it counts as unable to."""

_NAME = re.compile(rb" @(elastic-agent/([0-9]{1,10})/([0-9]{1,10})-[0-9a-f]{1,32})$", re.MULTILINE)
"""Our sockets in /proc/net/unix. Other programs' names may hold any bytes."""


class Question(Struct, frozen=True, omit_defaults=True):
    """A user's question about workers; also the record by which another agent is asked."""

    do: Annotated[str, Meta(max_length=32)]
    """logs or stacks."""
    slot: Count | None = None
    """logs: of which worker of a node; None: of all."""
    generation: Generation | None = None
    """logs: of which one; None: of the newest."""
    lines: Count = 0
    follows: bool = False
    """logs: what is new is asked for again and again."""
    known: dict[str, Count] = {}
    """logs: what was told before; see `workers/output/read_output.py`."""
    id: Name = "-"


class Command(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request of a user of this machine."""

    do: Annotated[str, Meta(max_length=32)]
    """describe, status, ask, drain or stop."""
    node: Name | None = None
    """drain: the node that is to leave; None: that of the agent that receives this. ask: which one; None: all."""
    left_s: Seconds | None = None
    """Seconds that workers have to save; None: by the agent's settings."""
    words: Annotated[str, Meta(max_length=256)] = ""
    """The origin of the command, in words."""
    question: Question | None = None


class Answer(Struct, frozen=True, omit_defaults=True):
    """The agent's answer; the last one has ``done``. Also the record by which another agent answers a question."""

    text: str = ""
    done: bool = True
    failed: bool = False
    unconfirmed: bool = False
    """drain, stop: workers may still run."""
    run_id: str = ""
    node: str = ""
    status: RunStatus | None = None
    """status: of the run."""
    output: dict[str, str] = {}
    """ask: what workers have written, by worker."""
    known: dict[str, Count] = {}
    """ask: how much of that is known now, by file."""


Act = Callable[[Command], AsyncGenerator[Answer]]


class ControlSocket:
    """The agent's end."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self._server: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, act: Act) -> ControlSocket:
        """Listen; every command is handed to ``act``, whose answers go back.

        Raises:
            OSError: the name is taken, or this system has no such sockets.
        """
        control = cls(act)
        # Containers that share the host's network share these names too, and have pids of their own.
        name = f"\0elastic-agent/{os.geteuid()}/{os.getpid()}-{secrets.token_hex(4)}"
        control._server = await asyncio.start_unix_server(control._serve, name, limit=LONGEST_LINE)
        return control

    async def close(self, patience_s: float) -> None:
        """Accept no more commands; sending the last answers may take this long."""
        if self._server is not None:
            self._server.close()
        if self._conversations:
            await asyncio.wait(self._conversations, timeout=patience_s)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # the server made one for this connection
        self._conversations.add(task)
        try:
            if peer_of(writer.get_extra_info("socket"))[1] in (0, os.geteuid()):
                await self._converse(reader, writer)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            pass  # it has gone, or uses another protocol: others are not affected
        finally:
            self._conversations.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readuntil(b"\n")
        try:
            command = msgspec.json.decode(line, type=Command)
        except (msgspec.ValidationError, RecursionError) as error:
            writer.write(msgspec.json.encode(Answer(f"invalid command: {error}", failed=True)) + b"\n")
            return
        async with aclosing(self._act(command)) as answers:
            async for answer in answers:
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()


# -- the other end ------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentAddress:
    """The socket of an agent of this machine."""

    name: str
    uid: int
    """The user in its name; checked on connection."""
    pid: int
    """The agent's, in its own namespace."""


def agents_here() -> list[AgentAddress]:
    """Return the agents of this machine that accept commands of this user: the user's own, for root all."""
    try:
        listed = Path("/proc/net/unix").read_bytes()
    except OSError:
        return []
    own = os.geteuid()
    found = {AgentAddress(name.decode(), int(uid), int(pid)) for name, uid, pid in _NAME.findall(listed)}
    return sorted((address for address in found if own in (0, address.uid)), key=lambda address: address.name)


async def describe_all(addresses: list[AgentAddress]) -> dict[AgentAddress, Answer]:
    """Ask these agents to describe themselves; one that is stopped, or a fake, delays no other, and is left out."""

    async def describe(address: AgentAddress) -> Answer | None:
        try:
            async with asyncio.timeout(ANSWER_S), aclosing(command(address, Command("describe"))) as answers:
                return await anext(answers, None)
        except (OSError, ValueError):  # gone, silent, another user's, or no agent
            return None

    answers = await asyncio.gather(*map(describe, addresses))
    found = zip(addresses, answers, strict=True)
    return {address: answer for address, answer in found if answer is not None and not answer.failed}


async def command(address: AgentAddress, wanted: Command) -> AsyncGenerator[Answer]:
    """Send an agent a command; its answers until the last, or until it is gone.

    Raises:
        OSError: there is no such agent any more, or the socket is another user's.
        ValueError: what it answers is not this protocol.
    """
    reader, writer = await asyncio.open_unix_connection(f"\0{address.name}", limit=LONGEST_ANSWER)
    try:
        if peer_of(writer.get_extra_info("socket"))[1] != address.uid:
            raise PermissionError(f"the socket {address.name} belongs to another user")
        writer.write(msgspec.json.encode(wanted) + b"\n")
        await writer.drain()
        async for line in reader:
            try:
                answer = msgspec.json.decode(line, type=Answer)
            except RecursionError as error:
                raise ValueError(str(error)) from None
            yield answer
            if answer.done:
                return
    finally:
        writer.close()
