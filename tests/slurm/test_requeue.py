"""A job whose time runs out, or whose place another one takes, saves, goes back into the queue, and goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cluster import Job, Slurm
from .support import DEPLOY, SMALL, check_each_step_once, finish, notes, requeue, wait_steps

ELASTIC = DEPLOY / "elastic.sbatch"

pytestmark = [pytest.mark.system, pytest.mark.prove]


def started(slurm: Slurm, folder: Path, *options: str, script: Path = ELASTIC, **variables: str) -> Job:
    """The elastic job, training."""
    job = slurm.submit(script, *SMALL, *options, folder=folder, **variables)
    wait_steps(job)
    return job


def check_next_life(job: Job, reason: str) -> None:
    """It went on where all had saved, as the same run, and no step was taken twice."""
    folder = job.folder
    left = notes(folder, "left")
    saved, before = left[0]["step"], left[0]["generation"]
    assert {(record["step"], record["reason"], record["generation"]) for record in left} == {
        (saved, reason, before)
    }
    assert {record["worker_id"] for record in left} == {
        record["worker_id"] for record in notes(folder, "born")
    }
    wait_steps(job, after=before)
    check_each_step_once(folder)
    born = [record for record in notes(folder, "born") if record["generation"] > before]
    assert {record["step"] for record in born} == {saved}
    assert {(record["run_id"], record["restarts"]) for record in born} == {(f"slurm-{job.id}", 0)}
    assert len(born) == len(left)
    assert job.facts()["Restarts"] == "1"
    assert job.output.count("all workers have") == len(left)  # one request, and one notice to each
    assert job.output.count("requeueing the job") == 1  # what is said after that, Slurm may cut off


def test_a_job_at_its_time_limit_is_requeued_and_resumes(slurm: Slurm, folder: Path) -> None:
    job = started(slurm, folder, "--nodes=3")
    requeue(job)
    check_next_life(job, "walltime")
    finish(job)
    ended = len(notes(folder, "born"))
    slurm.ask("scontrol", "requeue", job.id)
    job.start_soon()
    job.wait("the third life of the job to end", lambda: "COMPLETED" in job.facts()["JobState"])
    assert len(notes(folder, "born")) == ended, "a run that had finished was run again"


@pytest.mark.parametrize("asked", ["--signal=B:USR1@300", ""], ids=["batch-shell", "no-signal"])
def test_a_preempted_job_is_requeued_and_resumes(slurm: Slurm, folder: Path, asked: str) -> None:
    """srun, in the batch shell's place, hands the signal on. If none was asked for, Slurm sends SIGTERM, as scancel
    does; then the agents ask what it means."""
    script = folder / "elastic.sbatch"
    script.write_text(ELASTIC.read_text().replace("--signal=USR1@300", asked))
    job = started(slurm, folder, "--nodes=2", "--exclusive", script=script)
    other = folder / "urgent.sbatch"
    other.write_text("#!/bin/bash\nsleep 0.1\n")
    urgent = slurm.submit(other, "--nodes=3", "--exclusive", "--partition=urgent", folder=folder)
    urgent.wait_state("COMPLETED")
    job.wait_state("PENDING")
    job.start_soon()
    check_next_life(job, "preempted")


def test_a_job_goes_on_when_its_earlier_start_has_ended_on_a_node_that_hung(
    slurm: Slurm, folder: Path
) -> None:
    """Slurm counts the node as down and starts the job on another one; the first one's agent notices nothing."""
    job = started(slurm, folder, "--nodes=1")
    host = job.facts()["BatchHost"]
    slurm.hang_node(host)
    job.wait("Slurm to requeue the job", lambda: job.facts()["Restarts"] == "1")
    job.start_soon()
    job.wait_said(f"an earlier start of job {job.id} still runs at")
    slurm.wake_node(host)
    job.wait("its processes to end", lambda: not slurm.processes(SLURM_JOB_ID=job.id, SLURMD_NODENAME=host))
    wait_steps(job, after=1)
    finish(job)


def test_a_failed_run_is_not_requeued(slurm: Slurm, folder: Path) -> None:
    script = folder / "elastic.sbatch"
    script.write_text(ELASTIC.read_text().replace("train.py", "failing.py"))
    (folder / "failing.py").write_text("raise SystemExit(3)\n")
    job = slurm.submit(script, *SMALL, "--nodes=2", folder=folder, ELASTIC_AGENT_MAX_RESTARTS="1")
    assert job.wait_state("FAILED", "COMPLETED") == "FAILED"
    facts = job.facts()
    assert (facts["ExitCode"], facts["Restarts"]) == ("1:0", "0")
    job.wait_said("the run failed", "the only restart is used")
    assert "requeue" not in job.output


def test_two_jobs_with_one_run_id_both_train(slurm: Slurm, folder: Path) -> None:
    """The second one is submitted when the first one has finished; it finds the script's order to finish."""
    trained: list[int] = []
    for _ in range(2):
        job = slurm.submit(
            DEPLOY / "plain.sbatch", *SMALL, "--nodes=1", folder=folder, ELASTIC_AGENT_RDZV_ID="101"
        )
        if not trained:
            wait_steps(job)
        finish(job)
        trained.append(len(notes(folder, "born")))
    assert trained == [1, 2]
    assert "finished in job " in job.output
