"""The keys of an etcd below one root as a :class:`~elastic_agent.transport.table.Table`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

from elastic_agent.transport.base import StoreLostError
from elastic_agent.transport.keys import is_life

from .api import delete, get, has_value, is_missing, prefix_end, put, replace, value_in
from .client import MAX_OPERATIONS, CompactedError, EtcdClient, LeaseGoneError, News

T = TypeVar("T")

KEPT_LEASES = 4.0
"""After this many lease times without a keep-alive, etcd removes a node's records."""

LEAST_KEPT_S = 20.0

Transact = Callable[..., Awaitable[Any]]
"""Carries out a transaction that writes (see ``EtcdClient.transact``), under conditions of its own: the answers to
``otherwise`` come first in its answer."""


@dataclass(eq=False, repr=False)
class EtcdTable:
    """One connection (see :class:`~elastic_agent.transport.table.Table`). For one task at a time."""

    is_shared = True

    client: EtcdClient
    """Closed with the table."""
    root: str
    """Of all keys."""
    _: KW_ONLY
    lease: KeptLease | None = None
    """What new keys hang on; None: they stay until they are removed."""
    transact: Transact | None = None
    """Carries out every write, in place of the client."""
    on_close: Callable[[], None] = lambda: None
    """Called when the table is closed."""

    def __post_init__(self) -> None:
        self.store_id = self.client.store
        self.local_address = self.client.local_address
        self._transact: Transact = self.transact if self.transact is not None else self.client.transact
        self._read_at = 0
        """The revision as of which was read last."""
        self._written_at: dict[str, int] = {}
        """In which revision each key was written last, of those that were read last."""
        self._watches: dict[str, Watch] = {}
        """By folder."""

    async def read(self, keys: Collection[str]) -> dict[str, bytes]:
        """Return the values of those keys that are there."""
        return await self._read([(self._full(key), None) for key in keys])

    async def keys(self, folder: str) -> Sequence[str]:
        """Return every key that begins with ``folder``."""
        start = self._full(folder)
        found = await self.client.range(start, prefix_end(start), keys_only=True)
        return [self._short(kv.key) for kv in found.kvs]

    async def read_folders(self, *folders: str) -> dict[str, bytes]:
        """Return every key that begins with one of ``folders``, with its value."""
        return await self._read([(start, prefix_end(start)) for start in map(self._full, folders)])

    async def _read(self, spans: Sequence[tuple[bytes, bytes | None]]) -> dict[str, bytes]:
        """Return what lies in ranges of keys."""
        if not spans:
            return {}
        if len(spans) == 1:
            answer = await self.client.range(*spans[0])
            self._read_at, ranges = int(answer.header.revision), [answer]
        else:
            batches = [
                spans[start : start + MAX_OPERATIONS] for start in range(0, len(spans), MAX_OPERATIONS)
            ]
            answers = [await self.client.transact([], [get(*span) for span in batch]) for batch in batches]
            self._read_at = int(answers[0].header.revision)
            ranges = [response.response_range for answer in answers for response in answer.responses]
        found = {self._short(kv.key): kv for answer in ranges for kv in answer.kvs if kv.value}
        self._written_at = {key: int(kv.mod_revision) for key, kv in found.items()}
        return {key: bytes(kv.value) for key, kv in found.items()}

    async def swap(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Compare-and-set; the value afterwards. Without a lease of its own, a key keeps the one that it hangs on."""
        name = self._full(key)
        # The life of a run's records outlasts the node that begins it.
        lease = None if is_life(key) else self.lease
        condition = is_missing(name) if expected is None else has_value(name, expected)

        async def exchange(lease_id: int) -> Any:
            keeps_lease = expected is not None and lease is None
            write = replace(name, desired) if keeps_lease else put(name, desired, lease_id)
            return await self._transact([condition], [write], [get(name)])

        done = await self._hanging_on(lease, exchange)
        if done.succeeded:
            return desired
        stored = value_in(done.responses[0])
        if stored == b"":  # that counts as missing
            return await self.swap(key, b"", desired) if expected is None else None
        return stored

    async def put(self, key: str, value: bytes, lasts_s: float | None = None) -> None:
        """Write."""
        name = self._full(key)
        lease = self.lease if lasts_s is None else KeptLease(lasts_s)
        await self._hanging_on(lease, lambda lease_id: self._transact([], [put(name, value, lease_id)]))

    async def _hanging_on(self, lease: KeptLease | None, write: Callable[[int], Awaitable[Any]]) -> Any:
        return await (lease.write(self.client, write) if lease is not None else write(0))

    async def delete(self, keys: Collection[str], *folders: str) -> None:
        """Remove those keys that are there, and every key that begins with one of ``folders``; of few, all at once."""
        starts = [self._full(folder) for folder in folders]
        operations = [
            *(delete(self._full(key)) for key in keys),
            *(delete(start, prefix_end(start)) for start in starts),
        ]
        for first in range(0, len(operations), MAX_OPERATIONS):
            await self._transact([], operations[first : first + MAX_OPERATIONS])

    async def wait(self, key: str, timeout_s: float) -> bool:
        """Wait until the key has been written since the last reading; False at the time-out.

        A watch of its whole folder stays open from the first time on. True also if etcd has removed the revisions
        since then: the key has to be read again.
        """
        name, folder = self._full(key), key[: key.rindex("/") + 1]
        deadline_s = time.monotonic() + timeout_s
        watch = self._watches.get(folder)
        if watch is None:
            start = self._full(folder)
            watch = Watch(self.client, start, prefix_end(start), self._read_at + 1)
            self._watches[folder] = watch
        try:
            while news := await watch.wait(max(0.0, deadline_s - time.monotonic())):
                fresh = [change for change in news if change.next_revision > self._read_at + 1]
                if any(name in change.written or name in change.deleted for change in fresh):
                    return True
        except CompactedError:
            del self._watches[folder]
            return True
        return False

    async def hint(self, run_id: str, incarnation: str) -> None:
        """Do nothing: the coordinator watches the folder of the member records."""

    def written_by(self, key: str) -> float | None:
        """Return the latest time at which the key can have been written, as of the last reading; None: not known."""
        revision = self._written_at.get(key)
        return self.client.written_by(revision) if revision is not None else None

    def _full(self, key: str) -> bytes:
        return f"{self.root}{key}".encode()

    def _short(self, key: bytes) -> str:
        return key.decode("utf-8", "replace").removeprefix(self.root)

    def close(self) -> None:
        """Release the connection; a call in progress raises ``StoreLostError``."""
        self.on_close()
        self.client.close()


class KeptLease:
    """Granted with the first key that hangs on it, kept alive with later ones; it outlives any one connection.

    For one task at a time.
    """

    def __init__(self, ttl_s: float) -> None:
        """``ttl_s``: how long its keys last when nothing is written over it."""
        self._ttl_s = math.ceil(ttl_s)
        self._id: int | None = None
        self._renewed_s = 0.0

    @classmethod
    def of_node(cls, lease_ttl_s: float) -> KeptLease:
        """Return one for the records of a node, whose own lease lasts ``lease_ttl_s``."""
        return cls(max(LEAST_KEPT_S, KEPT_LEASES * lease_ttl_s))

    async def id(self, client: EtcdClient) -> int:
        """Return the id that etcd gave it; it is kept alive now and then."""
        lease_id, now_s = self._id, time.monotonic()
        if lease_id is not None and now_s - self._renewed_s > self._ttl_s / 4:
            try:
                await client.keep_alive(lease_id)
                self._renewed_s = now_s
            except LeaseGoneError:
                lease_id = None
        if lease_id is None:
            lease_id = self._id = await client.grant(self._ttl_s)
            self._renewed_s = now_s
        return lease_id

    async def write(self, client: EtcdClient, write: Callable[[int], Awaitable[T]]) -> T:
        """Write keys that hang on it: ``write`` gets its id. One that is gone is granted anew.

        Raises:
            StoreLostError: the new one is gone as well.
        """
        for _ in range(2):
            lease_id = await self.id(client)
            try:
                return await write(lease_id)
            except LeaseGoneError:
                self._id = None
        raise StoreLostError("etcd leases expire as fast as they are granted")


class Watch:
    """Changes of some keys since a revision, collected by a task that ends with its client's connection.

    etcd serves a watch that begins in the past, even by one revision, only in a loop that runs ten times a second; and
    since every renewal of a lease is a revision, almost every watch begins in the past. One that is open gets changes
    at once.
    """

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
