"""What becomes of a run whose id was used before: decided by the life of its job and its command."""

from __future__ import annotations

import pytest

from elastic_agent.protocol import History, Job, Phase

from .support import Table, policy

TRAIN = Job("train")
IN_JOB = Job("train", scheduled="100", step="0")


@pytest.mark.parametrize(
    ("earlier", "now", "finish_once", "is_skipped"),
    [
        (TRAIN, TRAIN, False, False),
        (TRAIN, TRAIN, True, True),
        (TRAIN, Job("tune"), True, False),
        (IN_JOB, IN_JOB, False, True),
        (IN_JOB, Job("train", "100", requeues=1, step="0"), False, True),
        (IN_JOB, Job("train", "100", requeues=1, step="1"), False, True),
        (IN_JOB, Job("train", "100", step="1"), False, False),
        (IN_JOB, Job("tune", "100", requeues=1, step="0"), False, False),
        (IN_JOB, Job("train", "101", step="0"), False, False),
        (IN_JOB, TRAIN, False, False),
        (TRAIN, IN_JOB, False, False),
    ],
)
def test_a_finished_run_is_not_repeated_in_its_job_and_with_its_command(
    earlier: Job, now: Job, finish_once: bool, is_skipped: bool
) -> None:
    over = History(7, None, 0, ("a",), Phase.FINISHED, settled=True, job=earlier)
    table = Table(policy(finishes_once=finish_once, job=now), remembered=over)
    table.comes("a")
    assert table.stand == ((Phase.FINISHED, 7) if is_skipped else (Phase.FORMING, 8))


@pytest.mark.parametrize("outcome", [Phase.FAILED, Phase.STOPPED])
def test_only_success_ends_a_run_for_good(outcome: Phase) -> None:
    over = History(7, None, 0, ("a",), outcome, settled=True, job=IN_JOB)
    table = Table(policy(finishes_once=True, job=IN_JOB), remembered=over)
    table.comes("a")
    assert table.stand == (Phase.FORMING, 8)


def test_the_history_names_the_job_of_the_run() -> None:
    table = Table(policy(job=IN_JOB))
    table.comes("a")
    assert table.plan.history().job == IN_JOB


@pytest.mark.parametrize("now", [Job("tune"), Job("train", "101", step="0")], ids=["command", "job"])
def test_an_outcome_that_not_every_node_has_read_is_not_the_outcome_of_another_run(now: Job) -> None:
    over = History(7, None, 0, ("a",), Phase.FINISHED, job=IN_JOB)
    table = Table(policy(job=now), remembered=over)
    table.comes("a")
    assert table.stand == (Phase.FORMING, 8)
    same = Table(policy(job=IN_JOB), remembered=over)
    same.comes("a")
    assert same.stand == (Phase.FINISHED, 7)
