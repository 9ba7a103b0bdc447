"""Exchanges values between programs that meet at a store, beside its runs."""

from __future__ import annotations

from .table import Table


class Exchange:
    """Values by topic and name. Every call raises :class:`StoreLostError` when the store is gone."""

    def __init__(self, table: Table) -> None:
        """``table``: of a folder other than that of the runs; closed with the exchange."""
        self._table = table
        self.local_address = table.local_address
        """The address of this machine on the way to the store."""

    async def write(self, topic: str, name: str, value: bytes) -> None:
        """Replace what is stored under this name."""
        await self._table.put(f"{topic}/of/{name}", value)

    async def read(self, topic: str) -> dict[str, bytes]:
        """Return all values of a topic, by name."""
        folder = f"{topic}/of/"
        found = await self._table.read_folders(folder)
        return {key.removeprefix(folder): value for key, value in found.items()}

    async def decide(self, topic: str, value: bytes) -> bytes:
        """Return the first value that was proposed; ``b""`` if there is none, or to propose none."""
        key = f"{topic}/decision"
        if not value:
            return (await self._table.read([key])).get(key, b"")
        return await self._table.swap(key, None, value) or b""

    async def remove(self, topic: str) -> None:
        """Remove everything of a topic."""
        await self._table.delete((), f"{topic}/")

    def close(self) -> None:
        """Close the connection; never blocks."""
        self._table.close()
