"""A small cluster without cgroups and without a name server of its own: Slurm signals every process of a step
(``proctrack/linuxproc``), and only Slurm knows the names of the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Slurm, need_slurm
from .support import DEPLOY, SMALL, check_each_step_once, finish, nodes_of, notes, requeue, steps, wait_steps

pytestmark = [pytest.mark.system, pytest.mark.prove]

LIVES = 4


@pytest.fixture(scope="module")
def _small_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    need_slurm()
    with Slurm(tmp_path_factory.mktemp("slurm"), "linuxproc", names_resolve=False) as cluster:
        yield cluster


@pytest.fixture
def slurm(_small_cluster: Slurm) -> Iterator[Slurm]:
    """Three idle nodes and no jobs."""
    yield _small_cluster
    _small_cluster.clear()


def test_agents_connect_although_only_slurm_knows_the_nodes_names(slurm: Slurm, folder: Path) -> None:
    job = slurm.submit(DEPLOY / "plain.sbatch", *SMALL, "--nodes=2", folder=folder)
    finish(job)
    assert nodes_of(notes(folder, "born"), 1) == {"n0": 1, "n1": 1}
    job.wait_said("the host name n0 does not resolve on this node; using what Slurm reports: ")


def test_a_job_whose_workers_get_the_signal_too_loses_no_step(slurm: Slurm, folder: Path) -> None:
    """Two workers on n0, one on n1; each life ends by the signal that announces the end of a job."""
    job = slurm.submit(DEPLOY / "elastic.sbatch", *SMALL, "--nodes=2", folder=folder)
    before = 0
    for life in range(LIVES):
        before = wait_steps(job, after=before)[-1]["generation"]
        if life == LIVES - 1:
            break
        requeue(job)
    finish(job)
    check_each_step_once(folder)
    assert len({record["generation"] for record in steps(folder)}) == LIVES
    assert {record["restarts"] for record in notes(folder, "born")} == {0}
    assert {record["reason"] for record in notes(folder, "left")} == {"walltime"}
    assert job.facts()["Restarts"] == str(LIVES - 1)
    assert "died" not in job.output, "helper processes outlive the signal as well"
