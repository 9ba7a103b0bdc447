"""Deliberate bugs that random seeds detect, as no directed scenario does."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from elastic_agent.protocol import records
from elastic_agent.rendezvous.backends.etcd.election import Election
from elastic_agent.rendezvous.run_history import RunHistoryStore

from .mutants import Mutant


@dataclass(frozen=True)
class SeededMutant(Mutant):
    """One deliberate bug, with the universes that show it."""

    focus: tuple[str, ...] = ()
    """The faults that it takes to see it, if it takes luck otherwise."""
    hosting: str | None = None
    """Where the store lives, if that is not to be drawn."""
    seeds: int = 400
    """Within how many seeds it must be detected."""
    first: int = 0
    """The first of these seeds: where luck takes many, one that has it by the present scenarios."""


def _last_call_is_written(right: Any) -> Any:
    def save_soon(self: RunHistoryStore, run_id: str, history: records.History) -> Future[None]:
        return self._disk.submit(f"save {run_id}", lambda: self._write(run_id, history))

    return save_soon


def _until_all_know(right: Any) -> Any:
    def winding_up(self: Election) -> bool:
        return self._driver is not None and self._driver.winding_up and not self._driver.over

    return property(winding_up)


_ALL = (
    SeededMutant(
        "last-call-is-written",
        "of the histories that wait for the disk the one that was handed in last is written, not the newest",
        ((RunHistoryStore, "save_soon", _last_call_is_written),),
        focus=("slow disk", "worker fails", "join"),
        hosting="etcd",
        first=340,
    ),
    SeededMutant(
        "leaves-before-the-end",
        "the coordinator leaves when every node knows the outcome, before the records are removed",
        ((Election, "winding_up", _until_all_know),),
        hosting="etcd",
    ),
)

MUTANTS = {mutant.name: mutant for mutant in _ALL}
