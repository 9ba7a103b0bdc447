"""The effects of the coordinator's driver on the store and the disk, and how a task performs them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_agent.protocol import History, Lease, Plan
from elastic_agent.transport import CoordinatorRecords, Snapshot

from .effects import Effect, T_co
from .run_history import RunHistoryStore


class StoreEffect(Effect[T_co]):
    """A request to the store of one run. Raises StoreLostError when its outcome is unknown."""

    __slots__ = ()

    def perform(self, records: CoordinatorRecords) -> Coroutine[Any, Any, T_co]:
        """Return the coroutine that performs it."""
        raise NotImplementedError


class DiskEffect(Effect[T_co]):
    """A request to the state directory. Raises OSError."""

    __slots__ = ()

    def perform(self, run_id: str, history_store: RunHistoryStore) -> Coroutine[Any, Any, T_co]:
        """Return the coroutine that performs it."""
        raise NotImplementedError


# -- the store -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadRecords(StoreEffect[Snapshot]):
    """Read the member and lease records of these incarnations, or of all (None)."""

    incarnations: Collection[str] | None = None

    def perform(self, records: CoordinatorRecords) -> Coroutine[Any, Any, Snapshot]:
        return records.read(self.incarnations)


@dataclass(frozen=True)
class ReadLeases(StoreEffect[Mapping[str, Lease]]):
    """Read the leases of these incarnations."""

    incarnations: Collection[str]

    def perform(self, records: CoordinatorRecords) -> Coroutine[Any, Any, Mapping[str, Lease]]:
        return records.read_leases(self.incarnations)


@dataclass(frozen=True)
class ReadPlan(StoreEffect[Plan | None]):
    """Read the newest plan."""

    def perform(self, records: CoordinatorRecords) -> Coroutine[Any, Any, Plan | None]:
        return records.read_plan()


@dataclass(frozen=True)
class Publish(StoreEffect[None]):
    """Write the plan that follows the newest one."""

    plan: Plan

    def perform(self, records: CoordinatorRecords) -> Coroutine[Any, Any, None]:
        return records.publish(self.plan)


@dataclass(frozen=True)
class Revoke(StoreEffect[bool]):
    """End a lease, so that it can never be renewed; False if it is not as it was read any more."""

    lease: Lease
    reason: str

    def perform(self, records: CoordinatorRecords) -> Coroutine[Any, Any, bool]:
        return records.revoke(self.lease, self.reason)


@dataclass(frozen=True)
class Forget(StoreEffect[None]):
    """Remove the records of an incarnation."""

    incarnation: str

    def perform(self, records: CoordinatorRecords) -> Coroutine[Any, Any, None]:
        return records.forget(self.incarnation)


@dataclass(frozen=True)
class WriteStatus(StoreEffect[None]):
    """Write what the coordinator waits for (see :class:`~elastic_agent.protocol.Waiting`)."""

    text: str

    def perform(self, records: CoordinatorRecords) -> Coroutine[Any, Any, None]:
        return records.write_status(self.text)


@dataclass(frozen=True)
class ReadEnded(StoreEffect[History | None]):
    """Read how the last run of this name ended, whose records were removed."""

    def perform(self, records: CoordinatorRecords) -> Coroutine[Any, Any, History | None]:
        return records.read_ended()


@dataclass(frozen=True)
class RemoveRun(StoreEffect[None]):
    """Remove all records of the run."""

    ended: History | None
    """The state of this run that the next run of its name needs; None if it never began."""

    def perform(self, records: CoordinatorRecords) -> Coroutine[Any, Any, None]:
        return records.remove_run(self.ended)


# -- the disk --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadHistory(DiskEffect[History | None]):
    """Read the run history on this machine's disk."""

    def perform(self, run_id: str, history_store: RunHistoryStore) -> Coroutine[Any, Any, History | None]:
        return history_store.load(run_id)


@dataclass(frozen=True)
class SaveHistory(DiskEffect[None]):
    """Write the run history to disk, unless a newer one is there."""

    history: History

    def perform(self, run_id: str, history_store: RunHistoryStore) -> Coroutine[Any, Any, None]:
        return history_store.save(run_id, self.history)


# -- what each runner performs in its own way -------------------------------------------------------


LEAST_WAIT_S = 0.001
"""For which hints are waited for at least: a time that is over by a rounding error must not make the driver spin."""


@dataclass(frozen=True)
class WaitForHints(Effect[Collection[str]]):
    """Wait until records changed, or until this time: the incarnations whose records did."""

    until_s: float


def performer(
    run_id: str, records: CoordinatorRecords, history_store: RunHistoryStore
) -> Callable[[Effect[Any]], Awaitable[Any]]:
    """Return what performs the effects on the store and the disk in the calling task."""

    async def perform(effect: Effect[Any]) -> Any:
        if isinstance(effect, StoreEffect):
            return await effect.perform(records)
        if isinstance(effect, DiskEffect):
            return await effect.perform(run_id, history_store)
        raise TypeError(f"no effect on the store or the disk: {effect}")

    return perform
