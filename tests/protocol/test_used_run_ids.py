"""What becomes of a run whose id was used before: decided by the life of its job and its command."""

from __future__ import annotations

import pytest

from elastic_agent.protocol import Job, Phase
from tests.protocol.support import TTL_S, Table, on_disk, policy, world

TRAIN, TUNE = Job(("train",)), Job(("tune",))
IN_JOB = Job(("train",), scheduled="100")
REQUEUED = Job(("train",), scheduled="100", requeues=1)


@pytest.mark.parametrize(
    ("earlier", "now", "finish_once", "is_skipped"),
    [
        (TRAIN, TRAIN, False, False),
        (TRAIN, TRAIN, True, True),
        (TRAIN, TUNE, True, False),
        (IN_JOB, REQUEUED, False, True),
        (IN_JOB, IN_JOB, False, False),
        (IN_JOB, Job(("tune",), "100", requeues=1), False, False),
        (IN_JOB, Job(("train",), "101", requeues=1), False, False),
        (IN_JOB, TRAIN, False, False),
        (TRAIN, REQUEUED, False, False),
        (Job(("train a", "train b"), "100"), Job(("train b",), "100", requeues=1), False, True),
        (Job((), "100"), REQUEUED, False, False),
    ],
)
def test_a_finished_run_is_not_repeated_in_its_job_and_with_its_command(
    earlier: Job, now: Job, finish_once: bool, is_skipped: bool
) -> None:
    over = on_disk(7, None, 0, ("a",), Phase.FINISHED, settled=True, job=earlier)
    for remembered, told in ((over, None), (None, over)):
        table = Table(policy(finishes_once=finish_once, job=now), remembered=remembered)
        table.comes("a", history=told)
        assert table.stand == ((Phase.FINISHED, 7) if is_skipped else (Phase.FORMING, 8))


@pytest.mark.parametrize("outcome", [Phase.FAILED, Phase.STOPPED])
def test_only_success_ends_a_run_for_good(outcome: Phase) -> None:
    over = on_disk(7, None, 0, ("a",), outcome, settled=True, job=IN_JOB)
    table = Table(policy(finishes_once=True, job=IN_JOB), remembered=over)
    table.comes("a")
    assert table.stand == (Phase.FORMING, 8)


def test_the_history_has_the_commands_of_all_nodes_of_the_world() -> None:
    """Arguments may differ between nodes, and each node of a requeued job finds its own."""
    table = Table(policy(min_nodes=2, max_nodes=2, job=IN_JOB))
    table.comes("a")
    table.comes("b", policy=policy(min_nodes=2, max_nodes=2, job=Job(("train b",), "100")))
    assert table.world == ["a", "b"]
    assert table.plan.policy.job == Job(("train", "train b"), "100")


@pytest.mark.parametrize("now", [TUNE, Job(("train",), "101")], ids=["command", "job"])
def test_an_outcome_that_not_every_node_has_read_is_not_the_outcome_of_another_run(now: Job) -> None:
    over = on_disk(7, None, 0, ("a",), Phase.FINISHED, job=IN_JOB)
    table = Table(policy(job=now), remembered=over)
    table.comes("a")
    assert table.stand == (Phase.FORMING, 8)
    same = Table(policy(job=IN_JOB), remembered=over)
    same.comes("a")
    assert same.stand == (Phase.FINISHED, 7)


@pytest.mark.parametrize(("now", "outcome"), [(TUNE, None), (IN_JOB, Phase.STOPPED)], ids=["runs", "stopped"])
def test_workers_of_a_run_that_not_every_node_knows_to_be_over_are_waited_for(
    now: Job, outcome: Phase | None
) -> None:
    known = on_disk(7, world(7, "b-1"), 0, ("b",), outcome, job=IN_JOB)
    table = Table(policy(job=now), remembered=known)
    table.comes("a")
    table.wait(TTL_S)
    assert (table.stand, table.plan.uncleared) == ((Phase.FORMING, 8), world(7, "b-1").seats)
