"""The history of a run as its plans tell it."""

from __future__ import annotations

from elastic_agent.diagnosis.cause import CauseKind, RootCause
from elastic_agent.monitoring.run_log import KEPT_GENERATIONS, KEPT_WORLDS, Change, RunLog
from elastic_agent.protocol import Address, Failure, FailureKind, Phase, Plan, Policy, Seat, World


def running(generation: int, version: int = 0) -> Plan:
    seats = (Seat("n0", "i0", "10.0.0.1", 2, 0), Seat("n1", "i1", "10.0.0.2", 1, 2))
    world = World(generation, seats, Address("10.0.0.1", 1234), "n0")
    return Plan(1, version, Phase.RUNNING, generation, "all nodes are ready", Policy(), world)


def forming(generation: int, reason: str, failure: Failure | None = None) -> Plan:
    return Plan(
        1, 0, Phase.FORMING, generation, reason, Policy(), running(generation - 1).world, failure=failure
    )


def test_a_generation_ends_with_the_plan_that_forms_the_next_one() -> None:
    log = RunLog()
    assert log.see(forming(1, "waiting for nodes"), 5.0) == Change()
    assert log.see(running(1), 10.0) == Change(has_begun=True)
    assert log.see(running(1, version=1), 11.0) == Change(), "a notice, for example"
    assert log.since_s == 10.0
    failure = Failure(FailureKind.WORKER, "worker n1/0 exited with code 1")
    assert log.see(forming(2, "worker n1/0 exited with code 1", failure), 70.0) == Change(ended=(1,))
    log.explain(1, RootCause(1, CauseKind.EXIT_CODE, "exited with code 1", node_id="n1", slot=0))
    (first,) = log.generations
    assert (first.began_s, first.ended_s, first.nodes, first.workers) == (10.0, 70.0, ("n0", "n1"), 3)
    assert (first.end, first.culprit) == ("worker n1/0 exited with code 1", "n1/0")
    assert first.cause.startswith("generation 1: root cause: worker n1/0 exited with code 1")
    assert list(log.failures) == [1]
    assert first.failed


def test_a_generation_that_ended_as_planned_is_no_failure() -> None:
    log = RunLog()
    log.see(running(1), 10.0)
    assert log.see(Plan(1, 2, Phase.FINISHED, 1, "all workers succeeded", Policy()), 20.0) == Change(
        ended=(1,)
    )
    assert log.failures == {}
    assert log.generations[0].end == "all workers succeeded"
    assert not log.generations[0].failed


def test_the_history_of_a_run_that_restarts_for_ever_stays_small() -> None:
    log = RunLog()
    failure = Failure(FailureKind.WORKER, "boom")
    for number in range(1, KEPT_GENERATIONS + 10):
        log.see(running(number), float(number))
        log.see(forming(number + 1, "boom", failure), number + 0.5)
    assert len(log.generations) == KEPT_GENERATIONS
    assert len(log.failures) == KEPT_WORLDS
    assert log.world(1) is None
