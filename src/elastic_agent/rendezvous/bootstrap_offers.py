"""The part of a backend that a node's session needs: connections to the store of its run, and bootstrap stores."""

from __future__ import annotations

from typing import Protocol

from elastic_agent.protocol import Address, World
from elastic_agent.transport import NodeRecords, TransportError


class BootstrapOffer(Protocol):
    """A fresh store that this node offers for one generation."""

    rests: bool
    """Its port is not used again for a while, as workers of other machines may know it; True at first."""

    @property
    def address(self) -> Address:
        """Where the workers of every node dial it."""

    def close(self) -> None:
        """Stop serving it."""


class StoreDialer(Protocol):
    """Dials the store of one run."""

    async def connect(self) -> NodeRecords:
        """Return a new connection.

        Raises:
            UnreachableError: nothing answers (yet); dialling again may help.
            NotAStoreError: another program answers there; dialling again will not help.
        """

    async def offer_bootstrap(self, local_address: str) -> BootstrapOffer:
        """Start a fresh store for the workers of the generation this node gets ready for, at this address.

        Raises:
            TransportError: it cannot be started now; the message is one line.
        """

    async def dial_bootstrap(self, address: Address) -> None:
        """Check that a generation's bootstrap store answers.

        Raises:
            TransportError, OSError: it does not; the message is one line.
        """


class BootstrapOffers:
    """Serves a fresh store for each generation that the node is ready for."""

    def __init__(self, dialer: StoreDialer) -> None:
        self._dialer = dialer
        self.newest: BootstrapOffer | None = None
        self._last: BootstrapOffer | None = None
        """The one before: others may still be reading from it while they stop."""
        self._used_by: World | None = None
        """Whose workers start or run here."""

    async def open(self, local_address: str) -> BootstrapOffer:
        """Serve a fresh store. Raises TransportError if that fails."""
        offer = await self._open(local_address)
        if self._last is not None:
            self._last.close()
        self.newest, self._last = offer, self.newest
        return offer

    async def _open(self, local_address: str) -> BootstrapOffer:
        """Open a store; the one before stays until the next world is ready, unless its port is needed and unused."""
        try:
            return await self._dialer.offer_bootstrap(local_address)
        except TransportError:
            if self.newest is None and self._last is None:
                raise
        self.close(but=self._used_by.bootstrap if self._used_by is not None else None)
        return await self._dialer.offer_bootstrap(local_address)

    def keep_only(self, world: World) -> None:
        """Close all stores but that of this world, which is about to start."""
        newest = self.newest
        if newest is not None and (newest.address != world.bootstrap or len(world.seats) == 1):
            newest.rests = False
        self._used_by = world
        self.close(but=world.bootstrap)

    def ready(self, generation: int) -> None:
        """Take in that this node is ready for a generation: the workers of earlier ones are gone."""
        if self._used_by is not None and self._used_by.generation < generation:
            self._used_by = None

    def close(self, but: Address | None = None) -> None:
        """Stop serving every store but the one at this address."""
        kept = None
        for offer in (self.newest, self._last):
            if offer is not None and offer.address == but:
                kept = offer
            elif offer is not None:
                offer.close()
        self.newest, self._last = kept, None
