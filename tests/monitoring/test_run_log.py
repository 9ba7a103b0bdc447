"""The history of a run as its plans tell it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from elastic_agent.diagnosis.cause import CauseKind, RootCause
from elastic_agent.monitoring.run_log import (
    KEPT_GENERATIONS,
    KEPT_STACKS,
    NO_LEASE,
    NOT_RECORDED,
    NOT_SEEN,
    SLOW_OR_NO_LEASE,
    Change,
    RunLog,
)
from elastic_agent.monitoring.status import GenerationStatus, RunStatus, run_status
from elastic_agent.monitoring.status_text import generation_row, status_text
from elastic_agent.protocol import Address, Failure, FailureKind, Phase, Plan, Policy, Seat, World
from elastic_agent.protocol.records import Budget


def running(generation: int, version: int = 0) -> Plan:
    seats = (Seat("n0", "i0", "10.0.0.1", 2, 0), Seat("n1", "i1", "10.0.0.2", 1, 2))
    world = World(generation, seats, Address("10.0.0.1", 1234), "n0")
    return Plan(1, version, Phase.RUNNING, generation, "all nodes are ready", Policy(), world)


def forming(generation: int, reason: str, failure: Failure | None = None) -> Plan:
    world = running(generation - 1).world if generation > 1 else None
    return Plan(1, 0, Phase.FORMING, generation, reason, Policy(), world, failure=failure)


def test_a_generation_ends_with_the_plan_that_forms_the_next_one() -> None:
    log = RunLog("n0")
    assert log.see(forming(1, "waiting for nodes"), 5.0, "i0") == Change()
    assert log.see(running(1), 10.0, "i0") == Change(has_begun=True)
    assert log.see(running(1, version=1), 11.0, "i0") == Change(), "a notice, for example"
    assert log.since_s == 10.0
    failure = Failure(FailureKind.WORKER, "worker n1/0 exited with code 1")
    assert log.see(forming(2, "worker n1/0 exited with code 1", failure), 70.0, "i0") == Change(ended=(1,))
    log.explain(1, RootCause(1, CauseKind.EXIT_CODE, "exited with code 1", node_id="n1", slot=0))
    (first,) = log.generations
    assert (first.began_s, first.ended_s, first.nodes, first.workers) == (10.0, 70.0, ("n0", "n1"), 3)
    assert (first.end, first.culprit) == ("worker n1/0 exited with code 1", "n1/0")
    assert first.cause.startswith("root cause: worker n1/0 exited with code 1")
    assert list(log.failures) == [1]
    assert first.failed


def test_a_generation_that_ended_as_planned_is_no_failure() -> None:
    log = ran()
    assert log.see(Plan(1, 2, Phase.FINISHED, 1, "all workers succeeded", Policy()), 20.0, "i0") == Change(
        ended=(1,)
    )
    assert log.failures == {}
    assert log.generations[0].end == "all workers succeeded"
    assert not log.generations[0].failed


VICTIM = "worker n0/0: connection closed by peer"
NOTICED = Failure(FailureKind.WORKER, VICTIM)


def ran(*plans: Plan) -> RunLog:
    """Return a log of generation 1, which began at 10 s, and of these plans, one every 10 s."""
    log = RunLog("n0")
    for number, plan in enumerate((running(1), *plans), 1):
        log.see(plan, 10.0 * number, "i0")
    return log


def status(log: RunLog) -> RunStatus:
    return run_status(RunStatus("r", "h:1", 30.0, generations=log.generations), log.plan)


@pytest.mark.parametrize("is_certain", [True, False])
def test_the_victim_that_was_noticed_first_is_never_named_as_the_cause(is_certain: bool) -> None:
    noticed = forming(2, f"{VICTIM}; n1 lost", NOTICED)
    log = ran(msgspec.structs.replace(noticed, lost=("n1",)))
    before = status_text(status(log))
    words = ": workers failed, n1 lost; the root cause is being determined"
    assert before.splitlines()[0].endswith(words)
    assert before.count("; the root cause is being determined") == 2, "in the table, too"
    lost = RootCause(1, CauseKind.NODE_LOST, "node n1 was lost", node_id="n1", host="lab3")
    log.explain(1, msgspec.structs.replace(lost, is_certain=is_certain))
    after = status_text(status(log))
    words = f"{'' if is_certain else 'probable root cause: '}node n1 was lost (lab3)"
    assert after.count(words) == 2
    assert log.generations[0].cause.partition("\n")[0].endswith(words), "as elastic-agent why says it"
    assert VICTIM not in before + after


def test_another_reason_than_the_failure_of_the_last_generation_stays() -> None:
    log = ran(forming(2, VICTIM, NOTICED))
    log.explain(1, RootCause(1, CauseKind.NODE_LOST, "node n1 was lost", node_id="n1"))
    why = "only 1 of at least 2 nodes within 600 s (--join-timeout)"
    failed = forming(2, why, Failure(FailureKind.TOO_FEW, why))
    log.see(msgspec.structs.replace(failed, phase=Phase.FAILED, version=9), 30.0, "i0")
    assert status(log).reason == why


def test_the_words_of_a_hang_are_told_once() -> None:
    words, detail = "the workers made no progress for 10 s", "worker n0/0 is behind"
    hang = Failure(FailureKind.HANG, words, detail=detail, signature="same")
    last = forming(2, hang.words, hang)
    log = ran(last)
    reason = f"the same failure repeated without progress: {hang.words}; remove the cause, then start the run again"
    repeated = msgspec.structs.replace(
        last, phase=Phase.FAILED, reason=reason, budget=Budget(signature="same")
    )
    log.see(repeated, 20.0, "i0")
    assert status(log).reason == reason
    log.explain(1, RootCause(1, CauseKind.HANG, "worker n0/0 is behind", node_id="n0"))
    assert status(log).reason == reason.replace(hang.words, "worker n0/0 is behind")


def test_a_run_that_used_its_restarts_ends_with_the_root_cause_whatever_its_words() -> None:
    """The words of the plan are those of a victim, with what else was noticed, and may be cut."""
    noticed = forming(2, f"{VICTIM[:20]}…; n1 lost", NOTICED)
    log = ran(noticed)
    why = "the only restart is used"
    failed = msgspec.structs.replace(
        noticed, phase=Phase.FAILED, reason=f"{VICTIM[:20]}…; {why}", charged=1, policy=Policy(max_restarts=1)
    )
    log.see(failed, 30.0, "i0")
    assert status(log).reason == f"workers failed; the root cause is being determined; {why}"
    log.explain(1, RootCause(1, CauseKind.NODE_LOST, "node n1 was lost", node_id="n1"))
    assert status(log).reason == f"node n1 was lost; {why}"


def test_a_generation_that_nobody_asked_about_in_time_is_said_to_be_unexplained() -> None:
    log = RunLog("n0")
    for number in range(1, 12):
        log.see(running(number), 10.0 * number, "i0")
        log.see(forming(number + 1, VICTIM, NOTICED), 10.0 * number + 5.0, "i0")
    first = log.generations[0]
    assert not first.is_pending
    assert "not recorded" in first.end_words


def recorded(*numbers: int, **changes: Any) -> list[GenerationStatus]:
    return [
        GenerationStatus(number, float(number), number + 0.5, ("n0",), 1, **changes) for number in numbers
    ]


def numbers(log: RunLog) -> list[int]:
    return [row.generation for row in log.generations]


def test_what_earlier_agents_recorded_precedes_what_is_seen() -> None:
    log = RunLog("n0")
    log.see(forming(4, "resuming the run"), 5.0, "i0")
    log.recall(recorded(1, 2, 3, cause="generation: boom", failed=True))
    log.see(running(4), 10.0, "i0")
    assert numbers(log) == [1, 2, 3, 4]
    assert [row.cause for row in log.generations] == ["generation: boom"] * 3 + [""]
    assert log.failures == {}, "they are explained already"
    assert log.last is not None
    assert log.last.generation == 4


def test_generations_that_a_run_cannot_have_had_are_those_of_another_run_of_its_name() -> None:
    for first, known in (
        (forming(2, "new"), [1]),
        (running(2), [1, 2]),
        (Plan(1, 2, Phase.STOPPED, 3, "stopped", Policy()), [1, 2, 3]),
    ):
        log = RunLog("n0")
        log.recall(recorded(1, 2, 3, 4))
        log.see(first, 10.0, "i0")
        assert numbers(log) == known
        log.see(running(5), 20.0, "i0")
        assert numbers(log) == [*known, 5]


def test_a_generation_whose_end_nobody_recorded_does_not_run_any_more() -> None:
    log = RunLog("n0")
    log.recall([*recorded(1), GenerationStatus(2, 20.0, nodes=("n0", "n1"))])
    log.see(forming(3, "resuming the run"), 30.0, "i0")
    first, second = log.generations
    assert (first.cause, first.ended_s) == ("", 1.5)
    assert (second.is_running, second.ended_s) == (False, None)
    assert second.cause == f"its end was {NOT_RECORDED}; elastic-agent why on n1 may tell"


def test_the_history_of_a_run_that_is_resumed_for_ever_stays_small() -> None:
    log = RunLog("n0")
    log.recall(recorded(*range(1, KEPT_GENERATIONS + 1), stacks="stacks of a large world"))
    log.see(running(KEPT_GENERATIONS + 1), 10.0, "i0")
    assert len(log.generations) == KEPT_GENERATIONS
    with_stacks = [row.generation for row in log.generations if row.stacks]
    assert with_stacks == [*range(KEPT_GENERATIONS - KEPT_STACKS + 1, KEPT_GENERATIONS + 1)]
    log.see(forming(KEPT_GENERATIONS + 2, "they hang"), 20.0, "i0")
    log.explain(KEPT_GENERATIONS + 1, RootCause(1, CauseKind.HANG, "hangs"), "more stacks")
    assert sum(1 for row in log.generations if row.stacks) == KEPT_STACKS
    assert log.generations[-1].stacks == "more stacks"


def without_n1(generation: int, **changes: Any) -> Plan:
    world = World(generation, (Seat("n0", "i0", "10.0.0.1", 2, 0),), Address("10.0.0.1", 1234), "n0")
    return msgspec.structs.replace(running(generation), world=world, **changes)


def departures(*plans: Plan) -> list[tuple[str, str, float | None, str]]:
    log = RunLog("n0")
    for at, plan in enumerate(plans):
        log.see(plan, float(at), "i0")
    return [(gone.node_id, gone.role, gone.departed_s, gone.note) for gone in log.departures]


def test_a_node_that_is_lost_or_leaves_is_remembered_until_it_comes_back() -> None:
    lost = msgspec.structs.replace(forming(2, "n1 did not renew its lease"), lost=("n1",))
    leaving = msgspec.structs.replace(forming(2, "n1 is leaving"), leaving=("i1",))
    assert departures(running(1)) == []
    for forms, role, reason in ((lost, "lost", NO_LEASE), (leaving, "left", "n1 is leaving")):
        gone = [("n1", role, 1.0, reason)]
        assert departures(running(1), forms) == gone
        assert departures(running(1), forms, without_n1(2), without_n1(2, version=3)) == gone
        assert departures(running(1), forms, without_n1(2), running(3)) == []


def test_a_node_whose_loss_is_noticed_after_the_failure_it_caused_is_lost() -> None:
    failed = forming(2, "worker n0/0: connection closed by peer")
    lost = msgspec.structs.replace(failed, lost=("n1",), reason="n1 did not renew its lease")
    assert departures(running(1), failed) == []
    assert departures(running(1), failed, lost) == [("n1", "lost", 2.0, NO_LEASE)]
    # A coordinator that has begun to form the next world counts the loss when it seals that.
    counted = without_n1(2, losses={"n1": 1})
    assert departures(running(1), failed, counted) == [("n1", "lost", 2.0, SLOW_OR_NO_LEASE)]
    assert departures(running(1), failed, without_n1(2)) == [("n1", "left", 2.0, failed.reason)]


@pytest.mark.parametrize("lost", [(), ("n1",)], ids=["left", "lost"])
@pytest.mark.parametrize("failed_node", ["n0", "n1"])
def test_the_failure_of_another_nodes_worker_is_no_reason_why_a_node_is_gone(
    failed_node: str, lost: tuple[str, ...]
) -> None:
    failure = Failure(FailureKind.WORKER, f"worker {failed_node}/0: boom")
    failed = msgspec.structs.replace(
        forming(2, f"{failure.summary}; n1 is gone", failure), failed_node=failed_node, lost=lost
    )
    ((node_id, _, _, reason),) = departures(running(1), failed, without_n1(2))
    expected = failure.summary if failed_node == "n1" else NO_LEASE if lost else ""
    assert (node_id, reason) == ("n1", expected)


def seated(generation: int, **incarnations: str) -> Plan:
    """A generation that runs on these nodes."""
    seats = tuple(
        Seat(node_id, incarnation, "10.0.0.1", 1, rank)
        for rank, (node_id, incarnation) in enumerate(incarnations.items())
    )
    world = World(generation, seats, Address("10.0.0.1", 1234), next(iter(incarnations)))
    return msgspec.structs.replace(running(generation), world=world)


def history(log: RunLog) -> list[tuple[str, ...]]:
    """Return of each generation BEGAN, without the time; LASTED; and END."""
    rows = [generation_row(generation, "running") for generation in log.generations]
    return [("before" if "before" in row[1] else "at", row[2], row[4]) for row in rows]


def test_of_generations_while_this_machine_was_away_nothing_is_told_that_was_not_seen() -> None:
    log = RunLog("n1")
    log.see(seated(1, n1="i1", n0="i0", n2="i2"), 10.0, "i1")
    log.see(seated(2, n0="i0", n2="i2"), 40.0, "i3", was_away=True)
    end = f"{NOT_SEEN}; run elastic-agent why on n0"
    assert history(log) == [("at", "-", end), ("before", "running", "-")]
    assert log.generations[0].cause == f"its end was {end}"
    assert log.departures == ()
    assert log.since_s is None
    log.see(forming(3, "n1 joined"), 41.0, "i3")
    log.see(seated(3, n0="i0", n2="i2", n1="i3"), 42.0, "i3")
    log.see(forming(4, "n3 joined"), 52.0, "i3")
    assert history(log)[1:] == [("before", "-", "n1 joined"), ("at", "10 s", "n3 joined")]


def test_a_failure_of_a_later_generation_explains_none_that_ended_unseen() -> None:
    log = RunLog("n1")
    log.see(running(1), 10.0, "i1")
    later = forming(4, VICTIM, NOTICED)
    assert log.see(later, 40.0, "i3", was_away=True) == Change(ended=(1,))
    assert (log.generations[0].failed, log.failures) == (False, {})


def test_an_agent_that_was_started_again_knows_no_begin_of_what_ran_before() -> None:
    log = RunLog("n1")
    log.recall([GenerationStatus(1, 5.0, nodes=("n0", "n1"), workers=2)])
    log.see(seated(2, n0="i0"), 40.0, "i3")
    assert history(log) == [
        ("at", "-", f"{NOT_RECORDED}; elastic-agent why on n0 may tell"),
        ("before", "running", "-"),
    ]
