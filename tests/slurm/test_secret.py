"""Agents of a job authenticate each other by a secret that the batch script makes, as the example script shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.config.sources.slurm import endpoint_port
from elastic_agent.exit_codes import ExitCode

from .cluster import ADDRESSES, Slurm
from .support import DEPLOY, SMALL, check_each_step_once, finish, notes, requeue, wait_steps

pytestmark = [pytest.mark.system, pytest.mark.prove]


def test_agents_of_a_job_share_the_secret_of_the_batch_script_also_after_a_requeue(
    slurm: Slurm, folder: Path
) -> None:
    shown = (DEPLOY / "elastic.sbatch").read_text()
    export = 'export ELASTIC_AGENT_SECRET="$(elastic-agent secret)"'
    assert f"# {export}\n" in shown
    script = folder / "elastic.sbatch"
    script.write_text(shown.replace(f"# {export}", f'{export}; echo "$ELASTIC_AGENT_SECRET" >>secrets'))
    own = {"ELASTIC_AGENT_STATE_DIR": str(folder / "state")}
    job = slurm.submit(script, *SMALL, "--nodes=2", folder=folder, **own)
    before = wait_steps(job)[-1]["generation"]

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

    requeue(job)
    wait_steps(job, after=before)
    finish(job)
    first, second = (folder / "secrets").read_text().split()
    assert first != second, "one for each start of the job"
    check_each_step_once(folder)
    assert {note["run_id"] for note in notes(folder, "born")} == {f"slurm-{job.id}"}
    assert first not in job.output
    assert second not in job.output
