"""Upper bounds of write times, from the revisions of a store that numbers its writes. Pure.

Theory of operation. A new coordinator finds leases in the store and does not know when they were renewed: clocks of
two machines are never compared, and it did not read them before its term. But every answer of such a store names the
newest revision there is. Whatever carries that revision or a lower one had been written before the answer came. So a
process that keeps, for each answer, the revision and the moment by its own clock knows of every record it finds later
a moment before which it was written: that of the earliest answer that names the record's revision or a higher one.

The moment is never too early, because the answer came after the write. It may be too late by as long as no answer
came; without any that counts, the moment of the reading has to do.
"""

from __future__ import annotations

MOST_KEPT = 64
"""Of the newest answers. What is older is dated by the oldest that is kept: later than need be, which is safe."""


class RevisionTimes:
    """The revisions in the answers of one store to one process, with the times by its clock, in seconds.

    It may be used from several threads: of two answers that are entered at once one may get lost, and what it would
    have dated is dated later.
    """

    def __init__(self) -> None:
        self._seen: tuple[str, tuple[tuple[int, float], ...]] = ("", ())
        """The store, and (revision, when it was seen), both growing."""

    def saw(self, store: str, revision: int, now_s: float) -> None:
        """Note that this store has come to this revision. Another store counts from its own beginning."""
        known, seen = self._seen
        if store != known:
            seen = ()
        if not seen or revision > seen[-1][0]:
            self._seen = (store, (*seen, (revision, now_s))[-MOST_KEPT:])

    def written_by(self, store: str, revision: int) -> float | None:
        """Return the latest time at which this revision can have been written; None if unknown."""
        known, seen = self._seen
        if store != known:
            return None
        return next((at_s for seen_revision, at_s in seen if seen_revision >= revision), None)
