"""Agents of a job authenticate each other by a file that one of them creates in the state directory they share."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.config.sources.slurm import endpoint_port
from elastic_agent.exit_codes import ExitCode

from .cluster import ADDRESSES, Slurm
from .support import DEPLOY, SMALL, finish, notes, steps, wait_steps

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]


def test_agents_of_a_job_share_a_secret_that_one_of_them_creates_also_after_a_requeue(
    slurm: Slurm, folder: Path
) -> None:
    state = folder / "state"
    own = {"ELASTIC_AGENT_SECRET_SOURCE": "slurm", "ELASTIC_AGENT_STATE_DIR": str(state)}
    job = slurm.submit(DEPLOY / "elastic.sbatch", *SMALL, "--nodes=2", folder=folder, **own)
    before = wait_steps(job)[-1]["generation"]
    (file,) = (state / "secrets").iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == (f"job-lab.slurm-{job.id}", 0o600)
    secret = file.read_text()

    endpoint = f"{ADDRESSES['n0']}:{endpoint_port(int(job.id))}"
    stranger = slurm.command(
        *("elastic-agent", "--rdzv-endpoint", endpoint, "--rdzv-id", f"slurm-{job.id}", "--nnodes", "1:4"),
        *("--nproc-per-node", "1", "--state-dir", str(folder / "strange"), str(folder / "train.py")),
    )
    assert stranger.returncode == ExitCode.NO_STORE, stranger.stderr
    refusals = [
        line for line in stranger.stderr.splitlines() if "accepts only agents with its secret" in line
    ]
    assert len(refusals) == 1, stranger.stderr

    slurm.ask("scancel", "--signal=USR1", job.id)
    job.wait_state("PENDING")
    job.start_soon()
    wait_steps(job, after=before)
    finish(job)
    assert file.read_text() == secret
    taken = [one["step"] for one in steps(folder)]
    assert taken == list(range(1, len(taken) + 1)), "a step was lost or trained twice"
    assert {one["run_id"] for one in notes(folder, "born")} == {f"slurm-{job.id}"}
    assert secret.strip() not in job.output


def test_agents_whose_state_directory_is_not_shared_train_nothing(slurm: Slurm, folder: Path) -> None:
    """The one on the other node waits for the file in vain, and says what it expected."""
    script = folder / "apart.sbatch"
    agent = (
        f"elastic-agent --secret-source slurm --join-timeout 3 --state-dir {folder}/$SLURMD_NODENAME train.py"
    )
    script.write_text(f"#!/bin/bash\nsrun --nodes=2 bash -c '{agent}; echo $SLURMD_NODENAME ended with $?'\n")
    job = slurm.submit(script, *SMALL, "--nodes=2", folder=folder)
    job.wait_said(f"the agent on n0 did not create {folder}/n1/secrets/job-lab.slurm-{job.id} within 3 s")
    job.wait_said(f"n1 ended with {ExitCode.NO_STORE.value}")
    job.wait_said(f"n0 ended with {ExitCode.TOO_FEW_NODES.value}")
    assert not notes(folder, "born")
