"""The messages between torchrun and its sidecar process: one JSON object a line, over a socket pair."""

from __future__ import annotations

import select
import socket
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from elastic_agent.protocol import Address, Host, Member
from elastic_agent.values import Endpoint, EtcdAccess, PortRange

T = TypeVar("T")


class Begin(Struct, frozen=True, tag=True):
    """torchrun's first message: what the sidecar is for."""

    endpoint: Endpoint
    etcd: EtcdAccess | None
    run_id: str
    member: Member
    state_dir: Path
    local_addr: Host | None
    log_level: str
    secret: tuple[bytes, ...] = ()
    """What all agents of the run share; empty: there is none."""
    port_range: PortRange | None = None
    """The ports for bootstrap stores; None: any."""


class NextWorld(Struct, frozen=True, tag=True):
    """No worker of torchrun runs; it requests a seat in the next world."""


class Finishing(Struct, frozen=True, tag=True):
    """torchrun's workers all succeeded; it waits for the other torchruns at its exit barrier."""


class Leave(Struct, frozen=True, tag=True):
    """torchrun is about to exit, and no worker of it runs. ``succeeded``: they had all exited with 0."""

    succeeded: bool


class Sealed(Struct, frozen=True, tag=True):
    """The next world, all of whose nodes have joined at its bootstrap store."""

    rank: int
    size: int
    bootstrap: Address


class Stale(Struct, frozen=True, tag=True):
    """That world is over; torchrun is to stop its workers and request the next."""


class Over(Struct, frozen=True, tag=True):
    """There will be no other world."""

    reason: str
    unreachable: bool = False
    """Because the store cannot be reached, or the endpoint is not a store."""


class Trouble(Struct, frozen=True, tag=True):
    """Why the store cannot be reached at present."""

    reason: str


FromTorchrun: TypeAlias = Begin | NextWorld | Finishing | Leave
FromSidecar: TypeAlias = Sealed | Stale | Over | Trouble


class Channel(Generic[T]):
    """One end. ``receive`` and ``arrived`` raise :class:`EOFError` when the other end is gone."""

    def __init__(self, sock: socket.socket, received: Any) -> None:
        """``received``: the type of the messages that arrive here."""
        sock.setblocking(False)
        self._sock = sock
        # For paths, which msgspec does not support.
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(
            received, dec_hook=lambda kind, text: kind(text)
        )
        self._buffer = b""

    def fileno(self) -> int:
        """For waiting until something arrives."""
        return self._sock.fileno()

    def send(self, message: FromTorchrun | FromSidecar) -> None:
        """Send a message; it is lost if the other end is gone or its buffer is full."""
        try:
            self._sock.sendall(msgspec.json.encode(message, enc_hook=str) + b"\n")
        except OSError:
            return  # a receiver detects the end

    def arrived(self) -> list[T]:
        """What has come so far, without waiting."""
        ended = self._fill()
        *lines, self._buffer = self._buffer.split(b"\n")
        if ended and not lines:
            raise EOFError
        return [self._decoder.decode(line) for line in lines]

    def _fill(self) -> bool:
        """Take in what is there; whether that was the end."""
        while True:
            try:
                data = self._sock.recv(1 << 16)
            except BlockingIOError:
                return False
            except ConnectionError:
                return True
            if not data:
                return True
            self._buffer += data

    def wait(self, timeout_s: float) -> bool:
        """Block until something arrives or the other end is gone; False at the time-out."""
        return bool(select.select([self._sock], [], [], max(0.0, timeout_s))[0])

    def close(self) -> None:
        """Close this end; the other one detects it."""
        self._sock.close()
