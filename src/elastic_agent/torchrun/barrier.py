"""A barrier of the nodes of a world at its bootstrap store: all of them have joined, or none proceeds."""

from __future__ import annotations

from elastic_agent.protocol import Address
from elastic_agent.transport.c10d import StoreClient

_ROOT = "elastic-agent/gathering"
_CAME, _DECISION, _GONE, _ALL_GONE = (f"{_ROOT}/{name}" for name in ("came", "decision", "gone", "all-gone"))
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
        self._client = StoreClient.connect(address.host, address.port, timeout_s)
        self._size = size

    def come(self, rank: int, timeout_s: float) -> bool:
        """Wait for all nodes; False if one of them cancelled. All nodes that get an answer get the same one.

        At the time-out, this node cancels.
        """
        if self._enlist(_CAME, rank):
            self._client.exchange(_DECISION, b"", _COMPLETE)
        elif not self._client.wait(_DECISION, timeout_s):
            self.call_off()
        return self._client.peek(_DECISION) == _COMPLETE

    def call_off(self) -> None:
        """Cancel: this node will not join, or not stay; without effect once all nodes have joined."""
        self._client.exchange(_DECISION, b"", _CALLED_OFF)

    def go(self, rank: int) -> None:
        """This node needs the store no more."""
        if self._enlist(_GONE, rank):
            self._client.put(_ALL_GONE, b"yes")
        self._client.confirm()

    def see_all_gone(self, timeout_s: float) -> bool:
        """Wait until no node needs the store any more; False at the time-out."""
        return self._client.wait(_ALL_GONE, timeout_s)

    def _enlist(self, key: str, rank: int) -> bool:
        """Whether all nodes are on the list now."""
        self._client.append(key, str(rank))
        return len(set((self._client.peek(key) or b"").split())) >= self._size
