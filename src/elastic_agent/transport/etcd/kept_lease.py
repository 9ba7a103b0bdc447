"""A lease of etcd itself, on which keys hang: etcd removes them when it is not kept alive."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from elastic_agent.transport.base import StoreLostError

from .client import EtcdClient, LeaseGoneError

T = TypeVar("T")

KEPT_LEASES = 4.0
"""After this many lease times without a keep-alive, etcd removes a node's records."""

LEAST_KEPT_S = 20.0


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
