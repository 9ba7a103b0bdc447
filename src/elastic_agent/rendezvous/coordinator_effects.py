"""The effects of the coordinator's driver on the store and the disk, and how a thread performs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_agent.protocol import History, Lease, Plan
from elastic_agent.transport import CoordinatorLink, Snapshot

from .effects import Effect, T_co
from .run_history import RunHistoryStore


class StoreEffect(Effect[T_co]):
    """A request to the store of one run. Raises StoreLostError when its outcome is unknown."""

    __slots__ = ()

    def perform(self, link: CoordinatorLink) -> T_co:
        """Perform it over this connection, in this thread."""
        raise NotImplementedError


class DiskEffect(Effect[T_co]):
    """A request to the state directory. Raises OSError."""

    __slots__ = ()

    def perform(self, run_id: str, history_store: RunHistoryStore) -> T_co:
        """Perform it, in this thread."""
        raise NotImplementedError


# -- the store -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadRecords(StoreEffect[Snapshot]):
    """Read the member and lease records of these incarnations, or of all (None)."""

    incarnations: Collection[str] | None = None

    def perform(self, link: CoordinatorLink) -> Snapshot:
        return link.read(self.incarnations)


@dataclass(frozen=True)
class ReadLeases(StoreEffect[Mapping[str, Lease]]):
    """Read the leases of all incarnations."""

    def perform(self, link: CoordinatorLink) -> Mapping[str, Lease]:
        return link.read_leases()


@dataclass(frozen=True)
class ReadPlan(StoreEffect[Plan | None]):
    """Read the newest plan."""

    def perform(self, link: CoordinatorLink) -> Plan | None:
        return link.read_plan()


@dataclass(frozen=True)
class Publish(StoreEffect[bool]):
    """Write a plan; False if its version does not follow the newest one."""

    plan: Plan

    def perform(self, link: CoordinatorLink) -> bool:
        return link.publish(self.plan)


@dataclass(frozen=True)
class Revoke(StoreEffect[bool]):
    """End a lease, so that it can never be renewed; False if it is not as it was read any more."""

    lease: Lease
    reason: str

    def perform(self, link: CoordinatorLink) -> bool:
        return link.revoke(self.lease, self.reason)


@dataclass(frozen=True)
class Forget(StoreEffect[None]):
    """Remove the records of an incarnation."""

    incarnation: str

    def perform(self, link: CoordinatorLink) -> None:
        link.forget(self.incarnation)


@dataclass(frozen=True)
class WriteStatus(StoreEffect[None]):
    """Write what the coordinator waits for (see :class:`~elastic_agent.protocol.Waiting`)."""

    text: str

    def perform(self, link: CoordinatorLink) -> None:
        link.write_status(self.text)


# -- the disk --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadHistory(DiskEffect[History | None]):
    """Read the run history on this machine's disk."""

    def perform(self, run_id: str, history_store: RunHistoryStore) -> History | None:
        return history_store.load(run_id)


@dataclass(frozen=True)
class SaveHistory(DiskEffect[None]):
    """Write the run history to disk, unless a newer one is there."""

    history: History

    def perform(self, run_id: str, history_store: RunHistoryStore) -> None:
        history_store.save(run_id, self.history)


# -- what each runner performs in its own way -------------------------------------------------------


LEAST_WAIT_S = 0.001
"""For which hints are waited for at least: a time that is over by a rounding error must not make the driver spin."""


@dataclass(frozen=True)
class WaitForHints(Effect[Collection[str]]):
    """Wait until records changed, or until this time: the incarnations whose records did."""

    until_s: float


@dataclass(frozen=True)
class RemoveRun(Effect[bool]):
    """Remove all records of the run; False if a node has registered meanwhile."""

    ended: History | None
    """The state of this run that the next run of its name needs; None if it never began."""


def performer(
    run_id: str, link: CoordinatorLink, history_store: RunHistoryStore
) -> Callable[[Effect[Any]], Any]:
    """What performs the effects on the store and the disk in the calling thread."""

    def perform(effect: Effect[Any]) -> Any:
        if isinstance(effect, StoreEffect):
            return effect.perform(link)
        if isinstance(effect, DiskEffect):
            return effect.perform(run_id, history_store)
        raise TypeError(f"no effect on the store or the disk: {effect}")

    return perform
