"""The keys of torch's TCPStore server as a :class:`~elastic_agent.transport.table.Table`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from elastic_agent.transport.keys import INBOX

from .client import TCPStoreClient

CALL_TIMEOUT_S = 10.0

MAX_COMPARED_BYTES = 4 * 1024 * 1024
"""A larger value was written by another program, and may be too large for a message."""

ROOT = "elastic-agent/2/"
"""Of all keys; the number is that of their layout."""

_BATCH = 512
_HINTS = 64
"""The number that is asked for at once."""


@dataclass(eq=False, repr=False)
class C10dTable:
    """One connection (see :class:`~elastic_agent.transport.table.Table`). Its calls wait for each other."""

    is_shared = False

    client: TCPStoreClient
    """Closed with the table."""
    local_address: str = ""
    """Of this machine on the way to the store."""
    store_id: str = ""
    """Of the store."""
    root: str = ROOT
    """Of all keys."""

    def __post_init__(self) -> None:
        self._expiring: deque[tuple[float, str]] = deque()
        """The keys that expire, each with its time, in the order in which they were written."""

    async def read(self, keys: Collection[str]) -> dict[str, bytes]:
        """Return the values of those keys that are there."""
        wanted = [*keys]
        found: dict[str, bytes] = {}
        for start in range(0, len(wanted), _BATCH):
            batch = wanted[start : start + _BATCH]
            values = await self.client.get([self.root + key for key in batch])
            found.update((key, value) for key, value in zip(batch, values, strict=True) if value)
        return found

    async def read_folders(self, *folders: str) -> dict[str, bytes]:
        """Return every key that begins with one of ``folders``, with its value."""
        return await self.read(await self.keys(*folders))

    async def keys(self, *folders: str) -> list[str]:
        """Return every key that begins with one of ``folders``."""
        begins = tuple(self.root + folder for folder in folders)
        found = await self.client.list_keys()  # in no order
        return sorted(key.removeprefix(self.root) for key in found if key.startswith(begins))

    async def swap(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Compare-and-set; the value afterwards. A value that may be too large to be sent is removed first."""
        if expected == desired:  # the server's answer does not tell whether it was there
            return (await self.read([key])).get(key)
        if expected is not None and len(expected) > MAX_COMPARED_BYTES:
            if (await self.read([key])).get(key) == expected:
                await self.delete([key])
            expected = None
        stored = await self.client.compare_and_set(self.root + key, expected or b"", desired)
        return None if stored in (expected, b"") else stored  # the former it answers for a missing key

    async def put(self, key: str, value: bytes, lasts_s: float | None = None) -> None:
        """Write; what expires is removed with a later call, by the connection that wrote it."""
        await self.client.set(self.root + key, value)
        if lasts_s is not None:
            now_s = time.monotonic()
            self._expiring.append((now_s + lasts_s, key))
            while self._expiring[0][0] <= now_s:
                await self.delete([self._expiring.popleft()[1]])

    async def delete(self, keys: Collection[str], *folders: str) -> None:
        """Remove those keys that are there, then every key that begins with one of ``folders``."""
        names = [self.root + key for key in keys]
        for start in range(0, len(names), _BATCH):
            await self.client.delete(names[start : start + _BATCH])
        if folders:
            await self.delete(await self.keys(*folders))

    async def wait(self, key: str, timeout_s: float) -> bool:
        """Wait until the key is there; False at the time-out."""
        return await self.client.wait(self.root + key, timeout_s)

    async def hint(self, run_id: str, incarnation: str) -> None:
        """Put it into the coordinator's inbox."""
        await self.client.queue_push(self.root + INBOX, f"{run_id} {incarnation}".encode())

    def written_by(self, key: str) -> float | None:
        """Return None: the server keeps no times."""
        return None

    async def take_hints(self, timeout_s: float, most: int) -> list[bytes]:
        """Wait until there is a hint; that and what else is there, up to ``most``. Empty at the time-out."""
        queue, hints = self.root + INBOX, list[bytes]()
        if await self.client.wait(queue, timeout_s):
            while len(hints) < most:
                wanted = min(_HINTS, most - len(hints))
                taken = await self.client.queue_pop(queue, wanted)
                hints += taken
                if len(taken) < wanted:
                    break
        return hints

    def close(self) -> None:
        """Close the connection; a call in progress raises ``StoreLostError``."""
        self.client.close()
