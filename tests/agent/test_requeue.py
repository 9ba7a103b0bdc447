"""Whether the job goes back into the queue, and what happens when it should."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.agent.slurm import job
from elastic_agent.agent.slurm.job import JobEnd, SlurmJob, parse_facts
from elastic_agent.agent.slurm.requeue import decide, how_to_resume, requeue
from elastic_agent.config.settings import Settings
from elastic_agent.config.value_types import NodeRange
from tests.waiting import wait_for

AUTO = Settings(requeue="auto")
JOB = SlurmJob("4711", requeues=0)

NEVER = replace(AUTO, requeue="never", requeue_command="true")


@pytest.mark.parametrize(
    ("settings", "job", "reason", "is_chosen", "act", "why"),
    [
        (AUTO, JOB, "walltime", True, True, "requeueing the job (walltime, requeue 1 of at most 100)"),
        (AUTO, JOB, "preempted", True, True, "requeueing the job (preempted, requeue 1 of at most 100)"),
        (AUTO, JOB, "walltime", False, False, "the agent of another node requeues the job"),
        (AUTO, JOB, "drain", True, False, ""),
        (AUTO, JOB, "grow", True, False, ""),
        (AUTO, JOB, "operator", True, False, ""),
        (AUTO, JOB, "", True, False, ""),
        (NEVER, JOB, "walltime", True, False, "not requeueing the job: --requeue is never"),
        (AUTO, None, "walltime", True, False, "not requeueing the job: this is not a Slurm job step, and"),
        (replace(AUTO, requeue_command="true"), None, "walltime", True, True, "requeueing the job"),
        (AUTO, replace(JOB, requeues=99), "walltime", True, True, "requeueing the job"),
        (AUTO, replace(JOB, requeues=100), "walltime", True, False, "not requeueing the job: it has been"),
    ],
)
def test_a_job_is_requeued_by_one_agent_if_it_was_interrupted_and_may_be(
    settings: Settings, job: SlurmJob | None, reason: str, is_chosen: bool, act: bool, why: str
) -> None:
    decision = decide(settings, job, reason, is_chosen=is_chosen)
    assert (decision.act, decision.why[: len(why)]) == (act, why)
    assert bool(decision.why) is bool(why)
    assert decision.requeued is (act or not is_chosen)


def test_a_run_that_is_not_requeued_is_resumed_by_hand() -> None:
    named = replace(AUTO, rdzv_id="exp7")
    for settings, within, words in (
        (AUTO, None, "start it again with the same command and --rdzv-id exp7"),
        (
            replace(named, nnodes=NodeRange(1, 4)),
            None,
            "start it again with the same command and --rdzv-id exp7, on every node",
        ),
        (named, JOB, "submit the job again with --rdzv-id exp7"),
    ):
        assert how_to_resume(settings, "exp7", within) == f"to resume the run, {words}"


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


AGAIN = {"SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "1795265604"}


@pytest.mark.parametrize(
    ("changes", "job"),
    [
        ({"SLURM_JOB_ID": None}, None),
        ({"SLURM_STEP_ID": None}, None),
        ({}, SlurmJob("4711", 0)),
        (AGAIN, SlurmJob("4711", 2, 1795265604.0)),
        ({"SLURM_PROCID": "1"}, SlurmJob("4711", 0, first=False)),
        ({"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}, SlurmJob("4711_3", 0)),
        ({"SLURM_JOB_ID": "4712", "SLURM_JOB_ID_HET_GROUP_0": "4711"}, SlurmJob("4711", 0)),
    ],
    ids=[
        "no job",
        "no step",
        "first start",
        "later start",
        "not the first task",
        "array",
        "heterogeneous job",
    ],
)
def test_the_job_of_a_task_is_known_from_its_environment(
    changes: dict[str, str | None], job: SlurmJob | None
) -> None:
    environ = {name: value for name, value in {**STEP, **changes}.items() if value is not None}
    assert SlurmJob.from_environment(environ) == job


def test_job_facts_are_read_from_the_first_component() -> None:
    text = (
        "JobId=4 HetJobId=4 JobName=a Restarts=1 EndTime=1795265604 PreemptTime=None Comment=x EndTime=7\n"
        "JobId=5 HetJobId=4 JobName=a Restarts=0 EndTime=9 PreemptTime=9\n"
    )
    assert parse_facts(text, "Restarts", "EndTime", "PreemptTime") == {
        "Restarts": "1",
        "EndTime": "1795265604",
        "PreemptTime": "None",
    }
