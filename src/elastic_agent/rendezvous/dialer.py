"""What a node's session needs of a backend: connections to the store of its run, and bootstrap stores."""

from __future__ import annotations

from typing import Protocol

from elastic_agent.protocol import Address
from elastic_agent.transport import NodeRecords


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
