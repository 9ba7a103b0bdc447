"""Whether the job goes back into the queue, and what happens when it should."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.agent.slurm import job
from elastic_agent.agent.slurm.job import JobEnd, SlurmJob, parse_facts
from elastic_agent.agent.slurm.requeue import Decision, decide, how_to_resume, requeue
from elastic_agent.config.settings import Settings
from elastic_agent.config.values import NodeRange
from tests.waiting import wait_for

AUTO = Settings(requeue="auto", max_requeues=100)
JOB = SlurmJob("4711", requeues=0)


def decided(
    settings: Settings, job: SlurmJob | None = JOB, reason: str = "walltime", *, is_chosen: bool = True
) -> Decision:
    return decide(settings, job, reason, is_chosen=is_chosen)


@pytest.mark.parametrize("reason", ["walltime", "preempted"])
def test_an_interrupted_job_is_requeued_by_the_plans_requeuer(reason: str) -> None:
    decision = decided(AUTO, reason=reason)
    assert decision.act
    assert decision.why == f"requeueing the job ({reason}, requeue 1 of at most 100)"
    others = decided(AUTO, reason=reason, is_chosen=False)
    assert (others.act, others.why) == (False, "the agent of another node requeues the job")


@pytest.mark.parametrize("reason", ["drain", "grow", "operator", ""])
def test_a_job_that_a_user_stopped_or_that_has_ended_is_not_requeued(reason: str) -> None:
    decision = decided(AUTO, reason=reason)
    assert (decision.act, decision.why) == (False, "")


def test_requeue_never_disables_requeueing() -> None:
    decision = decided(replace(AUTO, requeue="never", requeue_command="true"))
    assert not decision.act
    assert "--requeue is never" in decision.why


def test_outside_slurm_requeueing_requires_a_command() -> None:
    decision = decided(AUTO, None)
    assert not decision.act
    assert "not a Slurm job step" in decision.why
    assert decided(replace(AUTO, requeue_command="true"), None).act


@pytest.mark.parametrize(("before", "act"), [(0, True), (2, True), (3, False), (9, False)])
def test_requeues_are_limited(before: int, act: bool) -> None:
    decision = decided(replace(AUTO, max_requeues=3), replace(JOB, requeues=before))
    assert decision.act is act
    assert act or f"requeued {before} times, and --max-requeues is 3" in decision.why


def test_a_limit_of_0_disables_requeueing() -> None:
    assert not decided(replace(AUTO, max_requeues=0)).act


def test_a_run_that_is_not_requeued_is_resumed_by_hand() -> None:
    named = replace(AUTO, rdzv_id="exp7")
    for settings, within, words in (
        (named, None, "start it again with the same command"),
        (replace(named, nnodes=NodeRange(1, 4)), None, "start it again with the same command on every node"),
        (AUTO, None, "start it again with the same command and --rdzv-id exp7"),
        (named, JOB, "submit the job again with --rdzv-id exp7"),
    ):
        assert how_to_resume(settings, "exp7", within) == f"to resume the run, {words}"
    assert decided(AUTO, is_chosen=False).requeued, "another agent does it"
    assert not decided(replace(AUTO, requeue="never")).requeued


# -- the effect ---------------------------------------------------------------------------------


def test_the_sites_command_is_run_by_a_shell(tmp_path: Path) -> None:
    command = f"echo again >{tmp_path}/note && test -s {tmp_path}/note"
    done = asyncio.run(requeue(replace(AUTO, requeue_command=command), JOB))
    assert (done.failed, done.words) == (False, f"requeued the job: {command}")
    assert (tmp_path / "note").read_text() == "again\n"


def test_a_failing_command_is_quoted() -> None:
    done = asyncio.run(requeue(replace(AUTO, requeue_command="echo first; echo not today >&2; exit 3"), JOB))
    assert done.failed
    assert "failed with exit code 3: not today; its state is saved" in done.words


def test_a_hanging_command_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "REQUEUE_TIMEOUT_S", 0.3)
    held = tmp_path / "held"
    os.mkfifo(held)
    with open(os.open(held, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as pipe:
        done = asyncio.run(requeue(replace(AUTO, requeue_command=f"exec 3>{held}; sleep 1000 & wait"), JOB))
        assert "did not complete within 0.3 s" in done.words
        wait_for("the end of all that hold the pipe open", lambda: pipe.read(1) == b"")


def test_a_missing_scontrol_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = asyncio.run(requeue(AUTO, JOB))
    assert done.failed
    assert "cannot requeue job 4711: cannot start scontrol on this node" in done.words
    assert "\n" not in done.words


def test_without_scontrol_only_the_jobs_end_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    end = asyncio.run(JOB.end())
    assert (end.left_s, end.preempted) == (None, False)
    assert "cannot start scontrol" in end.unknown_because
    assert asyncio.run(replace(JOB, end_s=1.0).end()) == JobEnd(0.0, False, end.unknown_because)


# -- which job ----------------------------------------------------------------------------------

STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("missing", [*STEP])
def test_outside_a_step_there_is_no_job(missing: str) -> None:
    assert SlurmJob.from_environment({name: value for name, value in STEP.items() if name != missing}) is None


def test_the_first_start_of_a_job_has_no_requeues() -> None:
    assert SlurmJob.from_environment(STEP) == SlurmJob("4711", 0)
    again = SlurmJob.from_environment(
        {**STEP, "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "1795265604"}
    )
    assert again == SlurmJob("4711", 2, 1795265604.0)


def test_one_task_of_a_step_is_the_first() -> None:
    first, second = (SlurmJob.from_environment({**STEP, "SLURM_PROCID": number}) for number in "01")
    assert (first, second) == (SlurmJob("4711", 0), SlurmJob("4711", 0, first=False))


def test_a_task_of_an_array_is_named_as_one() -> None:
    array = {**STEP, "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}
    assert SlurmJob.from_environment(array) == SlurmJob("4711_3", 0)


def test_a_heterogeneous_job_is_named_by_its_leader() -> None:
    component = {**STEP, "SLURM_JOB_ID": "4712", "SLURM_JOB_ID_HET_GROUP_0": "4711"}
    assert SlurmJob.from_environment(component) == SlurmJob("4711", 0)


def test_job_facts_are_read_from_the_first_component() -> None:
    text = (
        "JobId=4 HetJobId=4 JobName=a Restarts=1 EndTime=1795265604 PreemptTime=None Comment=x EndTime=7\n"
        "JobId=5 HetJobId=4 JobName=a Restarts=0 EndTime=9 PreemptTime=9\n"
    )
    assert parse_facts(text) == {"Restarts": "1", "EndTime": "1795265604", "PreemptTime": "None"}
