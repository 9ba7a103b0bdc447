"""A small cluster without cgroups and without a name server of its own: Slurm signals every process of a step
(``proctrack/linuxproc``), and only Slurm knows the names of the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Slurm, need_slurm
from .support import DEPLOY, SMALL, finish, nodes_of, notes

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]


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


def test_agents_meet_although_only_slurm_knows_the_names_of_the_nodes(slurm: Slurm, folder: Path) -> None:
    job = slurm.submit(DEPLOY / "plain.sbatch", *SMALL, "--nodes=2", folder=folder)
    finish(job)
    assert nodes_of(notes(folder, "born"), 1) == {"n0": 1, "n1": 1}
    job.wait_said("n0 is no host name here; Slurm reaches that node at")
