"""Random number generators that preloaded modules make: each worker seeds them anew, as an import of its own would.

Without that, every worker would continue the spawner's sequence, and all would draw the same numbers.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


class Generators:
    """Those of :class:`random.Random` that were seeded by the system. One with a seed of its own is to keep it."""

    def __init__(self) -> None:
        self._found: weakref.WeakSet[random.Random] = weakref.WeakSet()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record those that are made meanwhile."""
        original, found = random.Random.seed, self._found

        def seed(
            self: random.Random, a: int | float | str | bytes | bytearray | None = None, version: int = 2
        ) -> None:
            original(self, a, version)
            (found.add if a is None else found.discard)(self)

        random.Random.seed = seed  # type: ignore[method-assign]
        try:
            yield
        finally:
            random.Random.seed = original  # type: ignore[method-assign]

    def renew(self) -> None:
        """Call once in every forked process."""
        for one in list(self._found):
            one.seed()
