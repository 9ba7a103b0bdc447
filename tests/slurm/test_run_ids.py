"""Job scripts with a constant run id: each job trains, and a requeued one goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cluster import Slurm
from .support import DEPLOY, SMALL, finish, notes, wait_steps

pytestmark = [pytest.mark.system, pytest.mark.prove]


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
