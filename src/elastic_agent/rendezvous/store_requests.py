"""Requests of a node's session to the store and to bootstrap stores: effects for its runner to perform."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol

from elastic_agent.protocol import Address, Lease, Member, Plan
from elastic_agent.transport import NodeRecords

from .effects import Effect, T_co


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


class Connection(Protocol):
    """A connection to the run's store, made by :class:`Connect`."""

    @property
    def store_id(self) -> str:
        """Random name of this life of the store."""

    @property
    def local_address(self) -> str:
        """The address of this machine on the way to the store."""

    def close(self) -> None:
        """Give it up, whatever is under way on it; returns at once."""


@dataclass(frozen=True)
class Connect(Effect[Connection]):
    """Dial the store. Raises :class:`~elastic_agent.transport.base.TransportError` if that fails."""


class Request(ABC, Generic[T_co]):
    """One request over a connection, which is occupied until it is answered."""

    @abstractmethod
    def perform(self, records: NodeRecords) -> Coroutine[Any, Any, T_co]:
        """Return the coroutine that makes it."""


@dataclass(frozen=True)
class Call(Effect[T_co]):
    """Make a request and receive the answer.

    Raises:
        StoreLostError: there was no answer in time, or the connection broke. The request may or may not have been
        carried out, and the connection is of no use any more.
    """

    connection: Connection
    request: Request[T_co]
    timeout_s: float


@dataclass(frozen=True)
class Register(Request[Lease | None]):
    """Write an incarnation's first records; the lease as written, None if an earlier one was revoked."""

    member: Member
    lease: Lease

    def perform(self, records: NodeRecords) -> Coroutine[Any, Any, Lease | None]:
        return records.register(self.member, self.lease)


@dataclass(frozen=True)
class WriteMember(Request[None]):
    """Replace the member record."""

    member: Member

    def perform(self, records: NodeRecords) -> Coroutine[Any, Any, None]:
        return records.write(self.member)


@dataclass(frozen=True)
class Renew(Request[bool]):
    """Compare-and-set the lease; False if it is not as expected any more."""

    expected: Lease
    renewed: Lease

    def perform(self, records: NodeRecords) -> Coroutine[Any, Any, bool]:
        return records.renew(self.expected, self.renewed)


@dataclass(frozen=True)
class ReadLease(Request[Lease | None]):
    """The lease as it stands in the store."""

    incarnation: str

    def perform(self, records: NodeRecords) -> Coroutine[Any, Any, Lease | None]:
        return records.read_lease(self.incarnation)


@dataclass(frozen=True)
class ReadPlan(Request[Plan | None]):
    """The newest plan."""

    def perform(self, records: NodeRecords) -> Coroutine[Any, Any, Plan | None]:
        return records.read_plan()


@dataclass(frozen=True)
class ReadStatus(Request[str]):
    """Read what the coordinator waits for (see :class:`~elastic_agent.protocol.Waiting`)."""

    def perform(self, records: NodeRecords) -> Coroutine[Any, Any, str]:
        return records.read_status()


@dataclass(frozen=True)
class NextPlan(Request[Plan | None]):
    """Wait for a plan newer than this version; None if there is none after ``wait_s`` seconds."""

    after_version: int
    wait_s: float

    def perform(self, records: NodeRecords) -> Coroutine[Any, Any, Plan | None]:
        return records.next_plan(self.after_version, self.wait_s)


@dataclass(frozen=True)
class OfferBootstrap(Effect[BootstrapOffer]):
    """Serve a fresh bootstrap store at this address of the machine; raises TransportError if that fails."""

    local_address: str


@dataclass(frozen=True)
class DialBootstrap(Effect[None]):
    """Check that a generation's bootstrap store answers; raises TransportError or OSError if it does not."""

    address: Address
