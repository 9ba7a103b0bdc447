"""A watch that stays open between waits.

etcd serves a watch that begins in the past, even by one revision, only in a loop that runs ten times a second; and
since every renewal of a lease is a revision, almost every watch begins in the past. One that is open gets changes
at once.
"""

from __future__ import annotations

import queue
import threading

from elastic_agent.transport.base import StoreLostError

from .client import EtcdClient, News


class Watch:
    """Changes of some keys since a revision, collected by a thread that ends with its client's connection."""

    def __init__(self, client: EtcdClient, key: bytes, end: bytes | None, revision: int) -> None:
        """Begin at once. ``end``: of a range of keys, or None for one key; ``revision``: the first of interest."""
        self._changes = client.follow(key, end, revision)
        self._inbox: queue.SimpleQueue[News | Exception] = queue.SimpleQueue()
        self._error: Exception | None = None
        threading.Thread(target=self._collect, name="etcd-watch", daemon=True).start()

    def _collect(self) -> None:
        try:
            for news in self._changes:
                self._inbox.put(news)
            self._inbox.put(StoreLostError("etcd closed a watch"))
        except Exception as error:
            self._inbox.put(error)

    def wait(self, timeout_s: float) -> list[News]:
        """What has come since the last time; if nothing, wait for the next. Empty at the time-out.

        Raises:
            CompactedError: some revisions are gone: read the keys again and begin another watch.
            StoreLostError: the connection broke.
        """
        found: list[News] = []
        while self._error is None:
            try:
                item = self._inbox.get(block=not found, timeout=timeout_s)
            except queue.Empty:
                return found
            if isinstance(item, Exception):
                self._error = item
            else:
                found.append(item)
        if not found:
            raise self._error
        return found
