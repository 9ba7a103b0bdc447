"""What the controller of a real Slurm answers: when a job ends, and whether it may go back into the queue."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from .cluster import Job, Slurm

ASK = Path(__file__).with_name("ask.py")

pytestmark = [pytest.mark.system, pytest.mark.prove]


def asking(slurm: Slurm, folder: Path, *words: str, options: tuple[str, ...] = ()) -> Job:
    """A job with a step that does this (see ask.py)."""
    script = folder / "ask.sbatch"
    script.write_text(f"#!/bin/bash\nexec srun python {ASK} {' '.join(words)}\n")
    return slurm.submit(script, "--nodes=1", *options, folder=folder)


def answer(job: Job) -> dict[str, Any]:
    """What the controller said of the job's end."""
    answered: dict[str, Any] = ast.literal_eval(job.wait_said("left_s"))
    return answered


def test_the_end_of_a_job_is_known(slurm: Slurm, folder: Path) -> None:
    end = answer(asking(slurm, folder, "end", options=("--time=10",)))
    assert 560 < end["left_s"] <= 600
    assert (end["preempted"], end["unknown_because"]) == (False, "")


def test_a_preempted_job_has_its_grace_time(slurm: Slurm, folder: Path) -> None:
    """And is told at once, not at ``--signal``'s time (SlurmctldParameters=preempt_send_user_signal)."""
    options = ("--nodes=3", "--exclusive", "--time=60", "--signal=USR1@60")
    job = asking(slurm, folder, "notice", "end", options=options)
    job.wait_said("in life 0")
    other = folder / "urgent.sbatch"
    other.write_text("#!/bin/bash\nsleep 0.1\n")
    slurm.submit(other, "--nodes=3", "--exclusive", "--partition=urgent", folder=folder)
    end = answer(job)
    assert end["preempted"]
    assert 10 < end["left_s"] <= 20


def test_a_job_is_requeued_only_once(slurm: Slurm, folder: Path) -> None:
    job = asking(slurm, folder, "first-life", "requeue", "requeue")
    job.wait_said(f"requeued the job: scontrol requeue {job.id}")
    job.wait_said(f"requeued the job: Slurm has already requeued job {job.id}")
    job.wait("the job to wait in the queue", lambda: job.state == "PENDING")
    job.start_soon()
    job.wait_said("in life 1")
    assert job.facts()["Restarts"] == "1"


def test_only_its_own_task_of_an_array_is_requeued(slurm: Slurm, folder: Path) -> None:
    """One of the tasks has the array's own job id, by which all of them would be."""
    words = ("first-life", "wait-unless-named-like-the-array", "requeue")
    job = asking(slurm, folder, *words, options=("--array=1-2",))
    said = job.wait_said(f"requeued the job: scontrol requeue {job.id}_")
    one = re.findall(r"requeue \d+_(\d)", said)[0]
    listing = slurm.ask("scontrol", "show", "job", "-o", job.id)
    restarts = dict(re.findall(r" ArrayTaskId=(\d) .* Restarts=(\d)", listing))
    assert restarts == {one: "1", {"1": "2", "2": "1"}[one]: "0"}


def test_a_heterogeneous_job_is_requeued_once_as_a_whole(slurm: Slurm, folder: Path) -> None:
    script = folder / "two.sbatch"
    parts = ("#!/bin/bash", "#SBATCH --nodes=1", "#SBATCH hetjob", "#SBATCH --nodes=1")
    step = f"exec srun --het-group=0,1 python {ASK} first-life requeue"
    script.write_text("\n".join((*parts, step, "")))
    job = slurm.submit(script, folder=folder)

    def restarts() -> list[str]:  # what the two say is lost when Slurm ends their srun
        return re.findall(r" Restarts=(\d)", slurm.ask("scontrol", "show", "job", "-o", job.id))

    job.wait("both parts to be requeued", lambda: restarts() == ["1", "1"])
    assert "cannot requeue" not in job.output


def test_a_refused_requeue_is_reported_in_one_line(slurm: Slurm, folder: Path) -> None:
    job = asking(slurm, folder, "requeue", options=("--no-requeue",))
    said = job.wait_said("cannot requeue")
    assert (
        f"Requested operation is presently disabled for job {job.id}; its state is saved: requeue or" in said
    )
