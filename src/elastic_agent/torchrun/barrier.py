"""A barrier of the nodes of a world at its bootstrap store: all of them have joined, or none proceeds."""

from __future__ import annotations

from elastic_agent.protocol import Address
from elastic_agent.transport import drive
from elastic_agent.transport.c10d import C10dTable

_CAME, _DECISION, _GONE, _ALL_GONE = "came/", "decision", "gone/", "all-gone"
_COMPLETE, _CALLED_OFF = b"complete", b"called off"


class Gathering:
    """One node's presence at a bootstrap store. Used by one thread at a time; every call may block.

    Each call raises ``StoreLostError`` when the store is gone.
    """

    def __init__(self, address: Address, size: int, timeout_s: float) -> None:
        """Connect. ``size``: how many nodes are to come.

        Raises:
            TransportError: the store cannot be reached.
        """
        self._table = C10dTable.connect(address.host, address.port, timeout_s, "elastic-agent/gathering/")
        self._size = size

    def come(self, rank: int, timeout_s: float) -> bool:
        """Wait for all nodes; False if one of them cancelled. All nodes that get an answer get the same one.

        At the time-out, this node cancels.
        """
        if self._enlist(_CAME, rank):
            drive(self._table.swap(_DECISION, None, _COMPLETE))
        elif not drive(self._table.wait(_DECISION, timeout_s)):
            self.call_off()
        return drive(self._table.read([_DECISION])).get(_DECISION) == _COMPLETE

    def call_off(self) -> None:
        """Cancel: this node will not join, or not stay; without effect once all nodes have joined."""
        drive(self._table.swap(_DECISION, None, _CALLED_OFF))

    def go(self, rank: int) -> None:
        """This node needs the store no more."""
        if self._enlist(_GONE, rank):
            drive(self._table.put(_ALL_GONE, b"yes"))

    def see_all_gone(self, timeout_s: float) -> bool:
        """Wait until no node needs the store any more; False at the time-out."""
        return drive(self._table.wait(_ALL_GONE, timeout_s))

    def _enlist(self, folder: str, rank: int) -> bool:
        """Whether all nodes are on the list now."""
        drive(self._table.put(f"{folder}{rank}", b"yes"))
        return len(drive(self._table.keys(folder))) >= self._size
