"""How a session reaches its run's store: the part that differs between stores."""

from __future__ import annotations

from typing import Protocol

from elastic_agent.protocol import Address
from elastic_agent.transport import NodeLink


class BootstrapOffer(Protocol):
    """A fresh store that this node holds out for one generation."""

    rests: bool
    """Whether its port is not used again for a while, as workers of other machines may know it; True at first."""

    @property
    def address(self) -> Address:
        """Where the workers of every node dial it."""

    def close(self) -> None:
        """Stop serving it."""


class StoreDialer(Protocol):
    """Dials the store of one run. All methods block and are called from threads that can be abandoned."""

    def connect(self) -> NodeLink:
        """A new connection.

        Raises:
            UnreachableError: nobody answers (yet); dialling again may help.
            NotAStoreError: somebody else answers there; dialling again will not help.
        """

    def offer_bootstrap(self, local_address: str) -> BootstrapOffer:
        """Start a fresh store for the workers of the generation this node gets ready for.

        Raises:
            TransportError: it cannot be started now; one line says why.
        """

    def dial_bootstrap(self, address: Address, timeout_s: float) -> None:
        """Check that a generation's bootstrap store answers.

        Raises:
            TransportError: it does not; one line says how.
        """
