"""Another client of an etcd in which a run is authenticated: it may write under the run's prefix, without the secret.

Beside what :class:`~.forgers.Forgers` does, it removes the plan or writes an earlier one back, ends the life of the
run's records or begins an earlier one again, takes the leader key away, and ends etcd leases. It leaves alone what
docs/security.md excepts: it does not forge the name or the age of the etcd, and what it writes as leader key or as
life of the run goes when its attack ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_agent.protocol.codec import encode

from .forgers import KINDS, Forgers
from .keyed_etcd import ID, LEADER, LIFE, PLAN, PREFIX, KeyedEtcd

ONLY_C10D = ("withhold", "point", "greet")
SPARED = (LIFE, LEADER, ID)
"""Keys that only those of its acts change that are meant for them."""


class EtcdForgers(Forgers):
    """What such a client does under one seed."""

    all_kinds = (
        *(kind for kind in KINDS if kind not in ONLY_C10D),
        "withhold",
        "end life",
        "depose",
        "expire",
    )

    @property
    def _acts(self) -> dict[str, Callable[[Any, str | None], None]]:
        return {**super()._acts, "end life": self._end_life, "depose": self._depose, "expire": self._expire}

    def _write(self, store: Any, key: str, value: bytes | None) -> None:
        if key not in SPARED:
            super()._write(store, key, value)

    def _forge_plan(self, store: Any) -> None:
        """The run has ended, or goes on elsewhere."""
        changed = self._changed_plan(store)
        if changed is not None:
            self._write(store, PLAN, self._sealed(PLAN, encode(changed)))

    def _withhold(self, store: Any, key: str | None) -> None:
        """The newest plan is removed, or an earlier one stands in its place."""
        values = self.recorded.get(PLAN, [])
        self._write(store, PLAN, self.random.choice((None, *values[-2:-1])))

    def _end_life(self, store: KeyedEtcd, key: str | None) -> None:
        """The run's records have no life, or an earlier one, or the same begun anew."""
        lives = self.recorded.get(LIFE, [])
        super()._write(store, LIFE, self.random.choice((None, *lives[:1], *lives[-1:])))

    def _depose(self, store: KeyedEtcd, key: str | None) -> None:
        """The leader key goes."""
        super()._write(store, LEADER, None)

    def _expire(self, store: KeyedEtcd, key: str | None) -> None:
        """An etcd lease on which keys of the run hang is revoked."""
        ids = [
            one for one, grant in store.grants.items() if any(key.startswith(PREFIX) for key in grant.keys)
        ]
        if ids:
            store.expire(self.random.choice(ids))
