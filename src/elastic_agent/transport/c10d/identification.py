"""The protocol in which an agent identifies the owners of connections from its machine; without I/O.

A connection from another machine does not show which user owns it. As in the Identification Protocol (RFC 1413,
"ident"), the machine at its other end is asked. Unlike there, both sides prove that they have the secret of the run,
and the machine that is asked opens the channel, so that it needs no port of its own:

    agent ──▶ relay    HELLO | name of the channel (16 random bytes)
    relay ──▶ agent    name of the relay's end (16 random bytes)
    agent ──▶ relay    empty: it has the secret, too
    relay ──▶ agent    question: number, both ends of a connection
    agent ──▶ relay    answer: number, whether it belongs to the user of the agent

All but the first are frames: length (2 bytes, big-endian) and a sealed message (see
:mod:`elastic_agent.transport.sealing`). The path of the seal contains the direction and both names, and the sequence
number counts the messages of the direction, so that nothing can be replayed, reordered or reflected.
"""

from __future__ import annotations

import ipaddress
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from elastic_agent.transport.base import TransportError
from elastic_agent.transport.sealing import Seal, Unverified

HELLO = b"EAI1"
"""Begins a channel. A client of torch's store begins with a zero byte."""

NAME_BYTES = 16
MOST_FRAME_BYTES = 256

_LENGTH = struct.Struct("!H")
_QUESTION = struct.Struct("!I16sH16sH")
_ANSWER = struct.Struct("!I?")
_TO_AGENT, _TO_RELAY = "to agent", "to relay"


class IdentificationError(TransportError):
    """The other end of a channel does not speak this protocol, or has not the secret; the message says which."""


@dataclass(frozen=True)
class Ends:
    """Both ends of a TCP connection, numeric addresses, as its client sees them."""

    client: tuple[str, int]
    server: tuple[str, int]


@dataclass(frozen=True)
class Question:
    """Does this connection belong to your user?"""

    number: int
    ends: Ends

    def encode(self) -> bytes:
        """As the content of a message."""
        (client, client_port), (server, server_port) = self.ends.client, self.ends.server
        return _QUESTION.pack(self.number, _packed(client), client_port, _packed(server), server_port)

    @classmethod
    def decode(cls, content: bytes) -> Question:
        """Raises ``IdentificationError``."""
        if len(content) != _QUESTION.size:
            raise IdentificationError(f"a question of {len(content)} bytes; expected {_QUESTION.size}")
        number, client, client_port, server, server_port = _QUESTION.unpack(content)
        return cls(number, Ends((_unpacked(client), client_port), (_unpacked(server), server_port)))


@dataclass(frozen=True)
class Answer:
    """The answer to the question of this number."""

    number: int
    is_same_user: bool
    """Whether the connection belongs to a process of the user that the agent runs as."""

    def encode(self) -> bytes:
        """As the content of a message."""
        return _ANSWER.pack(self.number, self.is_same_user)

    @classmethod
    def decode(cls, content: bytes) -> Answer:
        """Raises ``IdentificationError``."""
        if len(content) != _ANSWER.size:
            raise IdentificationError(f"an answer of {len(content)} bytes; expected {_ANSWER.size}")
        return cls(*_ANSWER.unpack(content))


class _Channel:
    """What both ends have in common: sealed frames, numbered in each direction."""

    def __init__(self, seal: Seal, sends: str, receives: str) -> None:
        self._seal = seal
        self._sends, self._receives = sends, receives
        self._names = b""
        """Of the agent's end, then of the relay's."""
        self._sent = self._received = 0
        self._buffer = bytearray()

    def _frame(self, content: bytes) -> bytes:
        sealed = self._seal.close(f"{self._sends} {self._names.hex()}", content, self._sent)
        self._sent += 1
        return _LENGTH.pack(len(sealed)) + sealed

    def _contents(self, data: bytes) -> Iterator[bytes]:
        """The contents of all frames that are complete now."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MOST_FRAME_BYTES:
                raise IdentificationError("what it sent is no message of an agent")
            if len(self._buffer) < _LENGTH.size + length:
                return
            sealed = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            yield self._opened(sealed)

    def _opened(self, sealed: bytes) -> bytes:
        content, number = self._seal.open_numbered(f"{self._receives} {self._names.hex()}", sealed)
        if isinstance(content, Unverified):
            raise IdentificationError(f"what it sent does not verify: {content.why}")
        if number != self._received:
            raise IdentificationError("what it sent is out of order")
        self._received += 1
        return content


class AgentEnd(_Channel):
    """The end of the agent that is asked."""

    def __init__(self, seal: Seal) -> None:
        """``seal``: of all agents of the run."""
        super().__init__(seal, sends=_TO_RELAY, receives=_TO_AGENT)
        self._names = secrets.token_bytes(NAME_BYTES)
        self.is_open = False
        """Whether the relay has proved that it has the secret."""

    def hello(self) -> bytes:
        """What to send first."""
        return HELLO + self._names

    def proof(self) -> bytes:
        """What to send when the channel is open, before anything else."""
        return self._frame(b"")

    def received(self, data: bytes) -> list[Question]:
        """The questions in what arrived; raises ``IdentificationError``."""
        questions = []
        for content in self._contents(data):
            if self.is_open:
                questions.append(Question.decode(content))
                continue
            if len(content) != NAME_BYTES:
                raise IdentificationError("what it sent is no name of a channel")
            self._names += content
            self.is_open = True
        return questions

    def answer(self, answer: Answer) -> bytes:
        """What to send to answer a question."""
        return self._frame(answer.encode())


class RelayEnd(_Channel):
    """The end of the relay, which asks."""

    def __init__(self, seal: Seal) -> None:
        """``seal``: of all agents of the run."""
        super().__init__(seal, sends=_TO_AGENT, receives=_TO_RELAY)
        self._hello = bytearray()
        self._greeted = False
        self.is_open = False
        """Whether the agent has proved that it has the secret."""

    def received(self, data: bytes) -> tuple[bytes, list[Answer]]:
        """What to send now, and the answers in what arrived; raises ``IdentificationError``."""
        reply = b""
        if not self._greeted:
            self._hello += data
            if len(self._hello) < len(HELLO) + NAME_BYTES:
                return b"", []
            reply = self._greet()
            data = bytes(self._hello[len(HELLO) + NAME_BYTES :])
        answers = []
        for content in self._contents(data):
            if self.is_open:
                answers.append(Answer.decode(content))
            self.is_open = True
        return reply, answers

    def _greet(self) -> bytes:
        if not self._hello.startswith(HELLO):
            raise IdentificationError("what it sent is no message of an agent")
        self._greeted = True
        self._names = bytes(self._hello[len(HELLO) : len(HELLO) + NAME_BYTES])
        own = secrets.token_bytes(NAME_BYTES)
        reply = self._frame(own)
        self._names += own
        return reply

    def question(self, question: Question) -> bytes:
        """What to send to ask it."""
        return self._frame(question.encode())


def _packed(host: str) -> bytes:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return b"\0" * 10 + b"\xff\xff" + address.packed
    return address.packed


def _unpacked(packed: bytes) -> str:
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)
