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
from elastic_agent.protocol.records import State

from .mutants import Mutant, Mutants, always, applied, edited

MUTANTS = Mutants()
add, change = MUTANTS.add, MUTANTS.change

add(
    "obeys-void-requests",
    "requests of an earlier life are obeyed",
    (notices, "_is_of_this_life", always(True)),
)
add(
    "waits-for-a-hung-start",
    "a start that hangs is waited for without end",
    (running, "_is_slow", always(False)),
)
add(
    "waits-for-a-hung-stop",
    "a node that renews its lease and does not stop its workers is waited for without end",
    (forming, "STOP_SLACK_S", lambda right: float("inf")),
)
add(
    "first-registered-leaver-stops",
    "a run is stopped when the first node that registers in a new store leaves, before the others have registered",
    (notices, "_may_register", always(False)),
)
add(
    "second-agent-leaves-for-the-first",
    "a request to leave by an agent with the node id of another removes the other's node",
    (notices, "_is_of_a_second_agent", always(False)),
)
add(
    "stopped-while-saving",
    "that all workers have exited after a stop is published while some still save",
    (coordinator.Coordinator, "_still_stopping", lambda right: staticmethod(lambda now: {})),
)
add(
    "resumed-by-requester",
    "a node that requested the stop before it read a plan resumes the run",
    (node.Node, "_requests_end", lambda right: property(lambda self: False)),
)
add(
    "forgets-the-lease",
    "a new store goes by the lease of the node that is back first",
    (records.Policy, "covering", lambda right: lambda self, history: self),
)


@change("a leaving node counts as gone while its workers still save", (coordinator, "departed"))
def left_before_exit(right: Any) -> Any:
    def departed(now: cluster_view.ClusterView) -> tuple[str, ...]:
        known = {key: now.ledger.sightings.get(key) for key in now.plan.leaving}
        early = (key for key, seen in known.items() if seen is not None and seen.member.state is State.READY)
        return tuple(dict.fromkeys((*right(now), *early)))

    return departed


@change("a leaving node gets a seat", (cluster_view.ClusterView, "ready"))
def seats_a_leaver(right: Any) -> Any:
    return lambda self: right(replace(self, plan=edited(self.plan, leaving=())))


@change(
    "with a new generation the coordinator forgets which requests it has acknowledged",
    (notices, "forming_plan"),
    (running, "forming_plan"),
)
def processes_requests_twice(right: Any) -> Any:
    return lambda *args, **changes: edited(right(*args, **changes), acknowledged={})


@change("a node outside the world leaves before the coordinator knows", (node.Node, "_concerns_others"))
def leaves_without_asking(right: Any) -> Any:
    return property(lambda self: self.activity in (node.Activity.STARTING, node.Activity.RUNNING))


@change(
    "a node that has not read the stop yet resumes the run",
    (coordinator.Coordinator, "_newcomers_after_stop"),
)
def resumed_by_stopped_node(right: Any) -> Any:
    def newcomers(now: cluster_view.ClusterView) -> list[leases.Sighting]:
        if now.plan.phase is not records.Phase.STOPPED:
            return []
        ready = [seen for seen in now.by_node.values() if seen.member.state is State.READY]
        return [seen for seen in ready if seen.member.generation in (0, now.plan.generation + 1)]

    return staticmethod(newcomers)


@change("ranks are not contiguous", (forming, "seat_members"))
def gapped_ranks(right: Any) -> Any:
    def seat_members(ordered: Any) -> tuple[records.Seat, ...]:
        *others, last = right(ordered)
        return (*others, edited(last, first_rank=last.first_rank + bool(others)))

    return seat_members


@change(
    "of two histories the one that only knew the generation forming may win",
    (coordinator.Coordinator, "_newest_history"),
)
def history_tie(right: Any) -> Any:
    return lambda self: max(self._histories(), key=lambda history: history.generation, default=None)


@change(
    "a new coordinator dates a lease by revisions of an etcd whose data are lost",
    (revisions.RevisionTimes, "saw"),
    (revisions.RevisionTimes, "written_by"),
)
def dates_by_another_etcd(right: Any) -> Any:
    return lambda self, store, *args: right(self, "etcd", *args)


@change("of two agents with one node id the younger one counts", (cluster_view, "_precedes"))
def youngest_first(right: Any) -> Any:
    def precedes(first: leases.Sighting, second: leases.Sighting, seated: set[str]) -> Any:
        succeeds = first.member.incarnation in second.member.replaces or (
            second.member.incarnation in first.member.replaces
        )
        return right(first, second, seated) if succeeds else right(second, first, seated)

    return precedes


@change("a new coordinator rejects the agent with the seat for a second one", (cluster_view, "_precedes"))
def seat_is_no_claim(right: Any) -> Any:
    return lambda first, second, seated: right(first, second, set())


@change(
    "a generation that a former leader could not publish ends the running world, uncharged",
    (coordinator.Coordinator, "_higher_history"),
)
def goes_above_unpublished(right: Any) -> Any:
    def higher(self: coordinator.Coordinator) -> records.History | None:
        newest = self._newest_history()
        if newest is None or self.plan is None or newest.generation <= self.plan.generation:
            return None
        return newest

    return higher


@change(
    "above a generation of which a node tells, a world forms while the one before it still runs",
    (coordinator.Coordinator, "_above"),
)
def clears_only_what_it_is_told(right: Any) -> Any:
    def above(now: cluster_view.ClusterView, history: records.History) -> Any:
        if history.settled:
            return right(now, history)
        return right(replace(now, plan=edited(now.plan, world=None, uncleared=())), history)

    return staticmethod(above)


@change("a failure is charged although nothing is known of a participant any more", (forming, "_departed"))
def charges_beside_the_unknown(right: Any) -> Any:
    return lambda now, incarnation: incarnation in now.ledger.sightings and right(now, incarnation)


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
