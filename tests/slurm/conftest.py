"""One Slurm for all tests, empty again after each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Slurm, need_slurm


@pytest.fixture(scope="session")
def _slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    need_slurm()
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm(_slurm: Slurm) -> Iterator[Slurm]:
    """A Slurm with three idle nodes and no jobs."""
    yield _slurm
    _slurm.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a job runs: with a train.py, as the job scripts want it."""
    (tmp_path / "train.py").symlink_to(Path(__file__).with_name("train.py"))
    return tmp_path
