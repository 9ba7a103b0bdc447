"""How long ago each node renewed its lease, as seen by a reader of the store. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_agent.protocol import Lease


class LeaseAges:
    """Watches the leases of a run; a lease has no time in it, so its age is known once it was seen to be renewed."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float | None]] = {}
        """By incarnation: the number of renewals, and when a new one was first seen."""

    def see(self, leases: Mapping[str, Lease], now_s: float) -> None:
        """Take note of the leases that the store holds, at this time of a clock that does not jump."""
        known = self._seen
        self._seen = {
            name: known[name]
            if name in known and known[name][0] == lease.beat
            else (lease.beat, now_s if name in known else None)
            for name, lease in leases.items()
        }

    def ages_s(self, now_s: float) -> dict[str, float]:
        """By incarnation: at most how long ago its lease was renewed last, in seconds, where that is known."""
        return {name: now_s - at_s for name, (_, at_s) in self._seen.items() if at_s is not None}
