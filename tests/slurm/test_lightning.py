"""An unmodified Lightning script in a Slurm job with one agent per node: the same command on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.test_lightning import SCRIPT

from .cluster import Slurm
from .support import DEPLOY, SMALL, check_each_step_once, finish, notes, requeue, wait_steps

pytestmark = [pytest.mark.system, pytest.mark.prove]


def test_a_job_is_requeued_at_its_time_limit_and_loses_no_step(slurm: Slurm, folder: Path) -> None:
    """Lightning would see a Slurm job of one task per node, requeue it itself, and save and find hpc_ckpt files."""
    script = folder / "train.py"
    script.unlink()
    script.write_text(
        "import runpy, sys; sys.argv[1:] = ['--folder', '.']\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    job = slurm.submit(DEPLOY / "elastic.sbatch", *SMALL, "--nodes=2", folder=folder)
    before = wait_steps(job)[-1]["generation"]
    requeue(job)
    wait_steps(job, after=before)
    finish(job)
    check_each_step_once(folder)
    assert {record["restarts"] for record in notes(folder, "born")} == {0}
    assert job.facts()["Restarts"] == "1"
    assert not list(folder.rglob("hpc_ckpt*"))
