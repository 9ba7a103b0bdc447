"""A watch that stays open between waits.

etcd serves a watch that begins in the past, even by one revision, only in a loop that runs ten times a second; and
since every renewal of a lease is a revision, almost every watch begins in the past. One that is open gets changes
at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing

from .client import EtcdClient, News


class Watch:
    """Changes of some keys since a revision, collected by a task that ends with its client's connection."""

    def __init__(self, client: EtcdClient, key: bytes, end: bytes | None, revision: int) -> None:
        """Begin at once. ``end``: of a range of keys, or None for one key; ``revision``: the first of interest."""
        self._news: list[News] = []
        self._error: Exception | None = None
        self._came = asyncio.Event()
        self._task = asyncio.create_task(self._collect(client, key, end, revision))

    async def _collect(self, client: EtcdClient, key: bytes, end: bytes | None, revision: int) -> None:
        try:
            async with aclosing(client.follow(key, end, revision)) as changes:
                async for news in changes:
                    self._news.append(news)
                    self._came.set()
        except Exception as error:
            self._error = error
        finally:
            self._came.set()

    async def wait(self, timeout_s: float) -> list[News]:
        """Return what has come since the last time; if nothing, wait for the next. Empty at the time-out.

        Raises:
            CompactedError: some revisions are gone: read the keys again and begin another watch.
            StoreLostError: the connection broke.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._came.wait()
        found, self._news = self._news, []
        if self._error is None:
            self._came.clear()
        elif not found:
            raise self._error
        return found
