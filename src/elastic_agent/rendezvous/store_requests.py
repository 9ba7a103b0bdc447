"""Requests of a node's session to the store and to bootstrap stores: effects for its runner to perform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from elastic_agent.protocol import Address
from elastic_agent.transport import NodeRecords

from .effects import Effect, Request, T_co


class BootstrapOffer(Protocol):
    """A fresh store that this node offers for one generation."""

    rests: bool
    """Whether its port is not used again for a while, as workers of other machines may know it; True at first."""

    @property
    def address(self) -> Address:
        """Where the workers of every node dial it."""

    def close(self) -> None:
        """Stop serving it."""


class StoreDialer(Protocol):
    """Dials the store of one run. What is no coroutine blocks, and is called from threads that can be abandoned."""

    async def connect(self) -> NodeRecords:
        """A new connection.

        Raises:
            UnreachableError: nothing answers (yet); dialling again may help.
            NotAStoreError: another program answers there; dialling again will not help.
        """

    def offer_bootstrap(self, local_address: str) -> BootstrapOffer:
        """Start a fresh store for the workers of the generation this node gets ready for.

        Raises:
            TransportError: it cannot be started now; the message is one line.
        """

    def dial_bootstrap(self, address: Address, timeout_s: float) -> None:
        """Check that a generation's bootstrap store answers.

        Raises:
            TransportError: it does not; the message is one line.
        """


@dataclass(frozen=True)
class Connect(Effect[NodeRecords]):
    """Dial the store. Raises :class:`~elastic_agent.transport.base.TransportError` if that fails."""


@dataclass(frozen=True)
class Call(Effect[T_co]):
    """Call a method of a connection, which is occupied until that is answered.

    Raises:
        StoreLostError: there was no answer in time, or the connection broke. The request may or may not have been
        carried out, and the connection is of no use any more.
    """

    connection: NodeRecords
    request: Request[T_co]
    timeout_s: float


@dataclass(frozen=True)
class OfferBootstrap(Effect[BootstrapOffer]):
    """Serve a fresh bootstrap store at this address of the machine; raises TransportError if that fails."""

    local_address: str


@dataclass(frozen=True)
class DialBootstrap(Effect[None]):
    """Check that a generation's bootstrap store answers; raises TransportError or OSError if it does not."""

    address: Address
