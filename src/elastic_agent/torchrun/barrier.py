"""A barrier of the nodes of a world at its bootstrap store: all of them have joined, or none proceeds."""

from __future__ import annotations

import asyncio

from elastic_agent.protocol import Address
from elastic_agent.rendezvous.waits import until_one_ends
from elastic_agent.transport.c10d import C10dTable

ROOT = "elastic-agent/gathering/"
CONNECT_TIMEOUT_S = 5.0

_CAME, _DECISION, _GONE, _ALL_GONE = "came/", "decision", "gone/", "all-gone"
_COMPLETE, _CALLED_OFF = b"complete", b"called off"


class Gathering:
    """One node among those of a world. Calls raise ``TransportError`` when the store is lost."""

    def __init__(self, store: Address, size: int, rank: int) -> None:
        """``store``: of the world; ``size``: how many nodes are to come; ``rank``: of this one."""
        self.store, self.size, self.rank = store, size, rank
        self.cancelled = asyncio.Event()
        """To be set when this node will not join: then none proceeds, unless all have joined already."""
        self.is_complete = False
        self._table: C10dTable | None = None

    async def come(self, timeout_s: float) -> bool:
        """Wait for all nodes; False if one of them cancelled. All nodes that get an answer get the same one.

        At the time-out, this node cancels.
        """
        table = self._table = await C10dTable.connect(
            self.store.host, self.store.port, CONNECT_TIMEOUT_S, ROOT
        )
        decision = _CALLED_OFF
        if not self.cancelled.is_set():
            if await self._enlist(table, _CAME):
                decision = _COMPLETE
            else:
                await until_one_ends(table.wait(_DECISION, timeout_s), self.cancelled.wait())
        self.is_complete = await table.swap(_DECISION, None, decision) == _COMPLETE
        return self.is_complete

    async def go(self, *, await_all_s: float) -> None:
        """Wait, so long at most, until no node needs the store any more; this one does not."""
        if self._table is None:
            return
        if await self._enlist(self._table, _GONE):
            await self._table.put(_ALL_GONE, b"yes")
        await self._table.wait(_ALL_GONE, await_all_s)

    def close(self) -> None:
        """Close the connection; calls in progress raise ``StoreLostError``."""
        if self._table is not None:
            self._table.close()

    async def _enlist(self, table: C10dTable, folder: str) -> bool:
        """Return whether all nodes are on the list now."""
        await table.put(f"{folder}{self.rank}", b"yes")
        return len(await table.keys(folder)) >= self.size
