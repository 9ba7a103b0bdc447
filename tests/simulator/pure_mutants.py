"""Deliberate bugs in pure functions of the protocol that the table tests of ``tests/protocol`` must detect.

``python -m tests.simulator.pure_mutants [NAME ...]`` runs these tests once with each bug; exit code 1 if they pass with
one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import msgspec
import pytest

from elastic_agent.protocol import (
    cluster_view,
    coordinator,
    forming,
    leases,
    node,
    notices,
    records,
    revisions,
    running,
)
from elastic_agent.protocol.records import Plan, State

from .mutants import Mutant, always, applied


def _takes_any_etcd_for_the_same(right: Any) -> Any:
    return lambda self, store, *args: right(self, "etcd", *args)


def _above_intentions(right: Any) -> Any:
    def higher(self: coordinator.Coordinator) -> records.History | None:
        newest = self._newest_history()
        if newest is None or self.plan is None or newest.generation <= self.plan.generation:
            return None
        return newest

    return higher


def _clears_the_reported_world_alone(right: Any) -> Any:
    def above(now: cluster_view.ClusterView, history: records.History) -> cluster_view.Decision:
        if history.settled:
            return right(now, history)  # type: ignore[no-any-return]
        plan = msgspec.structs.replace(now.plan, world=None, uncleared=())
        return right(replace(now, plan=plan), history)  # type: ignore[no-any-return]

    return staticmethod(above)


def _unknown_is_present(right: Any) -> Any:
    def departed(now: cluster_view.ClusterView, incarnation: str) -> bool:
        return incarnation in now.ledger.sightings and right(now, incarnation)

    return departed


def _gapped_ranks(right: Any) -> Any:
    def seat_members(ordered: Any) -> tuple[records.Seat, ...]:
        seats: tuple[records.Seat, ...] = right(ordered)
        last = msgspec.structs.replace(seats[-1], first_rank=seats[-1].first_rank + (len(seats) > 1))
        return (*seats[:-1], last)

    return seat_members


def _highest_generation_first_told(right: Any) -> Any:
    def newest(self: coordinator.Coordinator) -> records.History | None:
        return max(self._histories(), key=lambda one: one.generation, default=None)

    return newest


def _the_youngest_first(right: Any) -> Any:
    def precedes(one: leases.Sighting, other: leases.Sighting, seated: set[str]) -> bool:
        succeeds = one.member.incarnation in other.member.replaces or (
            other.member.incarnation in one.member.replaces
        )
        return right(one, other, seated) if succeeds else right(other, one, seated)  # type: ignore[no-any-return]

    return precedes


def _ignores_seats(right: Any) -> Any:
    return lambda one, other, seated: right(one, other, set())


def _only_with_workers(right: Any) -> Any:
    def concerns_others(self: node.Node) -> bool:
        return self.activity in (node.Activity.STARTING, node.Activity.RUNNING)  # type: ignore[attr-defined]

    return property(concerns_others)


def _seats_leavers(right: Any) -> Any:
    def ready(self: cluster_view.ClusterView) -> list[leases.Sighting]:
        forgetful = replace(self, plan=msgspec.structs.replace(self.plan, leaving=()))
        return right(forgetful)  # type: ignore[no-any-return]

    return ready


def _forgets_what_it_heard(right: Any) -> Any:
    def forming_plan(plan: Plan, reason: str, **changes: object) -> Plan:
        return msgspec.structs.replace(right(plan, reason, **changes), acknowledged={})  # type: ignore[no-any-return]

    return forming_plan


def _leaving_is_left(right: Any) -> Any:
    def departed(now: cluster_view.ClusterView) -> tuple[str, ...]:
        known = {key: now.ledger.sightings.get(key) for key in now.plan.leaving}
        early = (key for key, one in known.items() if one is not None and one.member.state is State.READY)
        return tuple(dict.fromkeys((*right(now), *early)))

    return departed


def _none_still_stop(right: Any) -> Any:
    return staticmethod(lambda now: {})


def _takes_any_for_newcomers(right: Any) -> Any:
    def newcomers(now: cluster_view.ClusterView) -> list[leases.Sighting]:
        if now.plan.phase is not records.Phase.STOPPED:
            return []
        next_generation = now.plan.generation + 1
        return [
            one
            for one in now.by_node.values()
            if one.member.state is State.READY and one.member.generation in (0, next_generation)
        ]

    return staticmethod(newcomers)


_ALL = (
    Mutant(
        "left-before-exit",
        "a leaving node counts as gone while its workers still save",
        ((coordinator, "departed", _leaving_is_left),),
    ),
    Mutant(
        "stopped-while-saving",
        "that all workers have exited after a stop is published while some still save",
        ((coordinator.Coordinator, "_still_stopping", _none_still_stop),),
    ),
    Mutant(
        "seats-a-leaver", "a leaving node gets a seat", ((cluster_view.ClusterView, "ready", _seats_leavers),)
    ),
    Mutant(
        "processes-requests-twice",
        "with a new generation the coordinator forgets which requests it has acknowledged",
        (
            (notices, "forming_plan", _forgets_what_it_heard),
            (running, "forming_plan", _forgets_what_it_heard),
        ),
    ),
    Mutant(
        "obeys-void-requests",
        "a request from before the run was stopped and resumed is carried out afterwards",
        ((notices, "_is_of_this_life", always(True)),),
    ),
    Mutant(
        "leaves-without-asking",
        "a node outside the world that is asked to leave does so before the coordinator knows",
        ((node.Node, "_concerns_others", _only_with_workers),),
    ),
    Mutant(
        "first-registered-leaver-stops",
        "a run is stopped when the first node that registers in a new store leaves, before the others have registered",
        ((notices, "_may_register", always(False)),),
    ),
    Mutant(
        "second-agent-leaves-for-the-first",
        "a request to leave by an agent with the node id of another removes the other's node",
        ((notices, "_is_of_a_second_agent", always(False)),),
    ),
    Mutant(
        "resumed-by-stopped-node",
        "a node that has not read the stop yet resumes the run",
        ((coordinator.Coordinator, "_newcomers_after_stop", _takes_any_for_newcomers),),
    ),
    Mutant(
        "resumed-by-requester",
        "a node that requested the stop before it read a plan resumes the run",
        ((node.Node, "_requests_end", lambda right: property(lambda self: False)),),
    ),
    Mutant("gapped-ranks", "ranks are not contiguous", ((forming, "seat_members", _gapped_ranks),)),
    Mutant(
        "history-tie",
        "of two histories the one that only knew the generation forming may win",
        ((coordinator.Coordinator, "_newest_history", _highest_generation_first_told),),
    ),
    Mutant(
        "forgets-the-lease",
        "a new store goes by the lease of the node that is back first",
        ((records.Policy, "covering", lambda right: lambda self, history: self),),
    ),
    Mutant(
        "dates-by-another-etcd",
        "a new coordinator dates a lease by revisions of an etcd whose data are lost",
        (
            (revisions.RevisionTimes, "saw", _takes_any_etcd_for_the_same),
            (revisions.RevisionTimes, "written_by", _takes_any_etcd_for_the_same),
        ),
    ),
    Mutant(
        "youngest-first",
        "of two agents with one node id the younger one counts",
        ((cluster_view, "_precedes", _the_youngest_first),),
    ),
    Mutant(
        "seat-is-no-claim",
        "a new coordinator, which sees both for the first time, rejects the agent with the seat for a second one",
        ((cluster_view, "_precedes", _ignores_seats),),
    ),
    Mutant(
        "goes-above-unpublished",
        "a generation that a former leader could not publish ends the running world, uncharged",
        ((coordinator.Coordinator, "_higher_history", _above_intentions),),
    ),
    Mutant(
        "clears-only-what-it-is-told",
        "above a generation of which a node tells, a world forms while the one before it still runs",
        ((coordinator.Coordinator, "_above", _clears_the_reported_world_alone),),
    ),
    Mutant(
        "charges-beside-the-unknown",
        "a failure is charged although nothing is known of a participant any more",
        ((forming, "_departed", _unknown_is_present),),
    ),
    Mutant(
        "waits-for-a-hung-stop",
        "a node that renews its lease and does not stop its workers is waited for without end",
        ((forming, "STOP_SLACK_S", lambda right: float("inf")),),
    ),
    Mutant(
        "waits-for-a-hung-start",
        "a node whose workers never start is waited for without end",
        ((running, "_is_slow", always(False)),),
    ),
)

MUTANTS = {mutant.name: mutant for mutant in _ALL}


def main(names: Sequence[str]) -> int:
    """Test each bug in a process of its own, which imports the tests after it is in place."""
    survivors = 0
    for name in names or MUTANTS:
        process = get_context("fork").Process(target=_run_tests, args=(MUTANTS[name],))
        process.start()
        process.join()
        detected = process.exitcode == int(pytest.ExitCode.TESTS_FAILED)
        survivors += not detected
        print(f"{name}: {'detected' if detected else 'NOT DETECTED'}", flush=True)
    return min(survivors, 1)


def _run_tests(mutant: Mutant) -> None:
    with applied(mutant), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        code = pytest.main(["tests/protocol", "-x", "-q", "-n0", "-p", "no:cacheprovider"])
    os._exit(int(code))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
