"""A barrier of the nodes of a world at its bootstrap store: all of them have joined, or none proceeds."""

from __future__ import annotations

from elastic_agent.protocol import Address
from elastic_agent.transport.c10d import C10dTable

_CAME, _DECISION, _GONE, _ALL_GONE = "came/", "decision", "gone/", "all-gone"
_COMPLETE, _CALLED_OFF = b"complete", b"called off"


class Gathering:
    """One node's presence at a bootstrap store. Each call raises ``StoreLostError`` when the store is gone."""

    def __init__(self, table: C10dTable, size: int) -> None:
        """See :meth:`connect`."""
        self._table = table
        self._size = size

    @classmethod
    async def connect(cls, address: Address, size: int, timeout_s: float) -> Gathering:
        """Connect. ``size``: how many nodes are to come.

        Raises:
            TransportError: the store cannot be reached.
        """
        table = await C10dTable.connect(address.host, address.port, timeout_s, "elastic-agent/gathering/")
        return cls(table, size)

    def close(self) -> None:
        """Close the connection; calls in progress raise ``StoreLostError``."""
        self._table.close()

    async def come(self, rank: int, timeout_s: float) -> bool:
        """Wait for all nodes; False if one of them cancelled. All nodes that get an answer get the same one.

        At the time-out, this node cancels.
        """
        if await self._enlist(_CAME, rank):
            await self._table.swap(_DECISION, None, _COMPLETE)
        elif not await self._table.wait(_DECISION, timeout_s):
            await self.call_off()
        return (await self._table.read([_DECISION])).get(_DECISION) == _COMPLETE

    async def call_off(self) -> None:
        """Cancel: this node will not join, or not stay; without effect once all nodes have joined."""
        await self._table.swap(_DECISION, None, _CALLED_OFF)

    async def go(self, rank: int) -> None:
        """This node needs the store no more."""
        if await self._enlist(_GONE, rank):
            await self._table.put(_ALL_GONE, b"yes")

    async def see_all_gone(self, timeout_s: float) -> bool:
        """Wait until no node needs the store any more; False at the time-out."""
        return await self._table.wait(_ALL_GONE, timeout_s)

    async def _enlist(self, folder: str, rank: int) -> bool:
        """Whether all nodes are on the list now."""
        await self._table.put(f"{folder}{rank}", b"yes")
        return len(await self._table.keys(folder)) >= self._size
