"""The keys and values of one store, and how what is written above them runs.

Everything that knows a record of a run (:mod:`.records`, :mod:`.plans`) is written once, above a :class:`Table`. There
are two: torch's TCPStore (:mod:`.c10d.table`) and etcd (:mod:`.etcd.table`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class Table(Protocol):
    """One connection to a store. Keys are paths below a root that belongs to elastic-agent.

    A value has at least one byte: one without counts as missing.

    Every call raises:
        StoreLostError: no answer in time, or the connection broke; whether the call was carried out is not known.
    """

    @property
    def store_id(self) -> str:
        """Random name of this life of the store; a new one means that everything written before is gone."""

    @property
    def local_address(self) -> str:
        """The address of this machine on the way to the store: one that the other nodes can reach too."""

    @property
    def root(self) -> str:
        """What precedes every key in the store, as users find it there."""

    @property
    def is_shared(self) -> bool:
        """Whether many runs that have nothing to do with each other use this store by design."""

    async def read(self, keys: Collection[str]) -> dict[str, bytes]:
        """Return the values of those keys that are there."""

    async def keys(self, folder: str) -> Sequence[str]:
        """Return every key that begins with ``folder``."""

    async def read_folders(self, *folders: str) -> dict[str, bytes]:
        """Return every key that begins with one of ``folders``, with its value."""

    async def swap(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Write ``desired`` if the value is ``expected`` (None: if there is none); return the value afterwards."""

    async def put(self, key: str, value: bytes, lasts_s: float | None = None) -> None:
        """Write; after ``lasts_s`` seconds the store may remove the key."""

    async def delete(self, keys: Collection[str], *folders: str) -> None:
        """Remove those keys that are there, then every key that begins with one of ``folders``."""

    async def wait(self, key: str, timeout_s: float) -> bool:
        """Wait until the key has been written since this connection read it last; False at the time-out."""

    async def hint(self, run_id: str, incarnation: str) -> None:
        """Tell the coordinator of a run that this member record was written."""

    def written_by(self, key: str) -> float | None:
        """Return the latest time at which what was read last under this key can have been written.

        By ``time.monotonic()``; None: not known.
        """

    def close(self) -> None:
        """Close the connection; never blocks."""
