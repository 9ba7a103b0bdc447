"""The effects of the coordinator's driver on the store and the disk, and how a task performs them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from elastic_agent.protocol import History
from elastic_agent.transport import CoordinatorRecords

from .effects import Effect, Request, T_co
from .run_history import RunHistoryStore


class StoreCall(Request[T_co], Effect[T_co]):
    """A call of a method of :class:`CoordinatorRecords`. Raises StoreLostError when its outcome is unknown."""

    __slots__ = ()


class DiskEffect(Effect[T_co]):
    """A request to the state directory. Raises OSError."""

    __slots__ = ()

    def perform(self, run_id: str, history_store: RunHistoryStore) -> Coroutine[Any, Any, T_co]:
        """Return the coroutine that performs it."""
        raise NotImplementedError


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
        if isinstance(effect, StoreCall):
            return await effect.perform(records)
        if isinstance(effect, DiskEffect):
            return await effect.perform(run_id, history_store)
        raise TypeError(f"no effect on the store or the disk: {effect}")

    return perform
