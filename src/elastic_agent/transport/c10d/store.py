"""torch's TCPStore client with workarounds for its pitfalls; every call of it in the package is made here.

Observations with torch 2.13 that this module is based on:

- ``get`` and ``multi_get`` block on a missing key. A compare-and-set whose expected and desired value are the same
  unused value answers at once, creates nothing, and distinguishes a missing key from an empty one. But it wakes
  all clients that wait for that key: two that wait and poll in this way wake each other for ever. Keys that are
  waited for are read with ``check`` first.
- ``set``, ``append`` and ``queue_push`` are sent and not answered: only a later call shows that they arrived.
- ``queue_len`` and ``list_keys`` hold Python's global lock while they wait for the answer, so a frozen server
  freezes the whole process: they are not used.
- Time-outs do not bound a call to a frozen server, nor the constructor: hence :mod:`.wire` and
  :mod:`elastic_agent.transport.abandonable_thread`.
- A message of more than 8 MiB makes the server drop the connection.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from elastic_agent.transport.base import StoreLostError
from elastic_agent.transport.name_lookups import no_dns_queries

CALL_TIMEOUT_S = 10.0

MAX_COMPARED_BYTES = 4 * 1024 * 1024
"""A larger value was appended to by another program, and may be too large for a message (see above)."""

_NOTHING = b"\x00elastic-agent: no such key\x00"
_BATCH = 512
_FEW = 2
"""So few values are read one by one: a batch takes three requests, as ``multi_get`` itself first waits for the keys."""


@contextmanager
def store_errors() -> Iterator[None]:
    """torch's errors as ours, one line each."""
    try:
        yield
    except RuntimeError as error:  # DistNetworkError and DistStoreError among them
        raise StoreLostError(one_line(error)) from None


def one_line(error: BaseException) -> str:
    """The first line of a torch error, without its C++ traceback."""
    return str(error).strip().split("\n", 1)[0][:300]


class RecordFormat(Protocol):
    """How a connection stores records."""

    def closed(self, key: str, record: bytes) -> bytes:
        """The bytes to store under this key."""

    def expected(self, key: str, record: bytes) -> bytes:
        """The bytes that are stored if this record, which was read or written before, is still there."""

    def opened(self, key: str, data: bytes) -> bytes:
        """The record in stored bytes."""

    def newest(self, key: str) -> int:
        """The highest number of a record seen under this key; 0: none, or they have none."""


class PlainRecords:
    """Records as they are."""

    def closed(self, key: str, record: bytes) -> bytes:
        """The same."""
        return record

    def expected(self, key: str, record: bytes) -> bytes:
        """The same."""
        return record

    def opened(self, key: str, data: bytes) -> bytes:
        """The same."""
        return data

    def newest(self, key: str) -> int:
        """They have no numbers."""
        return 0


class StoreClient:
    """One connection. Its calls wait for each other; each raises :class:`StoreLostError` when the store is gone."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        """Connect; ``timeout_s`` bounds it only while the other side behaves."""
        self._records: RecordFormat = PlainRecords()
        with store_errors(), no_dns_queries():
            self._open: Any = TCPStore(host, port, None, False, _span(timeout_s), wait_for_workers=False)
            self._open.set_timeout(_span(CALL_TIMEOUT_S))

    def storing(self, records: RecordFormat) -> StoreClient:
        """The same connection, with another format of its records."""
        other = copy.copy(self)
        other._records = records
        return other

    @property
    def _store(self) -> Any:  # torch's stubs lack half of the methods, and bytes as values
        if self._open is None:
            raise StoreLostError("the connection was closed")
        return self._open

    def newest_number(self, key: str) -> int:
        """See ``RecordFormat.newest``."""
        return self._records.newest(key)

    # -- reading, never blocking on what is not there -------------------------------------------

    def peek(self, key: str) -> bytes | None:
        """The value, or None. Not for keys that a client may be waiting for: see :meth:`peek_awaited`."""
        with store_errors():
            value: bytes = self._store.compare_set(key, _NOTHING, _NOTHING)
        return None if value == _NOTHING else self._records.opened(key, value)

    def peek_awaited(self, key: str) -> bytes | None:
        """The value, or None, without waking clients that wait for the key while it is missing."""
        return self.peek(key) if self.has_all([key]) else None

    def has_all(self, keys: Sequence[str]) -> bool:
        """Whether every one of these keys exists; does not wake clients that wait for one of them."""
        with store_errors():
            there: bool = self._store.check(list(keys))
        return there

    def peek_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of those keys that exist. Not for keys that a client may be waiting for."""
        if len(keys) <= _FEW:
            return self._peek_each(keys)
        found: dict[str, bytes] = {}
        for start in range(0, len(keys), _BATCH):
            found.update(self._peek_batch(keys[start : start + _BATCH]))
        return found

    def _peek_batch(self, keys: Sequence[str]) -> dict[str, bytes]:
        present = self._present(keys)
        if not present:
            return {}
        try:
            with store_errors():
                values = self._store.multi_get(present)
            return {key: self._records.opened(key, data) for key, data in zip(present, values, strict=True)}
        except StoreLostError:
            # One of them was deleted after the check, or the connection is gone: then this raises too.
            return self._peek_each(present)

    def _peek_each(self, keys: Collection[str]) -> dict[str, bytes]:
        found = {key: self.peek(key) for key in keys}
        return {key: value for key, value in found.items() if value is not None}

    def _present(self, keys: Sequence[str]) -> list[str]:
        """Those that exist. One request checks all; only if some are missing, each half is checked."""
        if not keys:
            return []
        if self.has_all(keys):
            return list(keys)
        if len(keys) == 1:
            return []
        middle = len(keys) // 2
        return self._present(keys[:middle]) + self._present(keys[middle:])

    # -- writing --------------------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> None:
        """Write without waiting for an answer; :meth:`confirm` waits for all that was sent."""
        data = self._records.closed(key, value)
        with store_errors():
            self._store.set(key, data)
        self._records.opened(key, data)  # what was there before does not count any more

    def append(self, key: str, line: str) -> None:
        """Add a line to the value in one step on the server, without waiting for an answer."""
        with store_errors():
            self._store.append(key, f"{line}\n")

    def push(self, queue: str, item: str) -> None:
        """Add to the end of a queue, without waiting for an answer."""
        with store_errors():
            self._store.queue_push(queue, item)

    def exchange(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Compare-and-set; the value afterwards. ``b""`` is expected of a missing key.

        For a missing key with another expected value, the answer is that expected value: only the answer
        ``desired`` means success. A value that may be too large to be sent is removed first.
        """
        if len(expected) > MAX_COMPARED_BYTES:
            if self.peek(key) == expected:
                self.delete([key])
            expected = b""
        before, after = self._records.expected(key, expected), self._records.closed(key, desired)
        with store_errors():
            value: bytes = self._store.compare_set(key, before, after)
            if value not in (before, after) and value and self._records.opened(key, value) == expected:
                value = self._store.compare_set(key, value, after)  # the same record in other bytes
        return self._records.opened(key, value)

    def delete(self, keys: Collection[str]) -> None:
        """Remove the keys that exist."""
        with store_errors():
            for key in keys:
                self._store.delete_key(key)

    def confirm(self) -> None:
        """Return when the server has carried out everything sent before: it works off a connection in order."""
        self.peek("")

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, key: str, timeout_s: float) -> bool:
        """Block until the key exists; False at the time-out."""
        with store_errors():
            try:
                self._store.wait([key], _span(timeout_s))
            except DistStoreError:
                return False  # the connection stays usable
        return True

    def pop(self, queue: str, timeout_s: float, most: int) -> list[bytes]:
        """Block until the queue has an item; that and what else is there, up to ``most``. Empty at the time-out."""
        items: list[bytes] = []
        with store_errors():
            self._store.set_timeout(_span(timeout_s))
            try:
                items.append(self._store.queue_pop(queue))
                while len(items) < most:
                    items.append(self._store.queue_pop(queue, block=False))
            except DistStoreError:  # the time-out, or QueueEmptyError; the connection stays usable
                pass
            finally:
                self._store.set_timeout(_span(CALL_TIMEOUT_S))
        return items

    def close(self) -> None:
        """Release the connection; it closes when no call is in progress any more."""
        self._open = None


def _span(timeout_s: float) -> timedelta:
    return timedelta(seconds=max(0.001, timeout_s))
