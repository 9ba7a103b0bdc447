"""Jobs without a run id: what is kept of those whose agents were killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_agent.rendezvous.run_history import KEPT_JOBS, JobFiles


def leave(jobs: JobFiles, folder: Path, count: int) -> None:
    """Agents that were killed, one after the other."""
    for number in range(count):
        before = set(folder.glob("jobs/*"))
        jobs.write(f"job-{number}", f"run-{number}")
        (file,) = set(folder.glob("jobs/*")) - before
        os.utime(file, (number, number))  # the clock is coarser than this loop


def test_the_job_of_a_killed_agent_is_resumed_and_a_finished_one_is_not(tmp_path: Path) -> None:
    jobs = JobFiles(tmp_path)
    jobs.write("host:29400 abc", "run-1")
    assert JobFiles(tmp_path).run_of("host:29400 abc") == "run-1"
    assert jobs.run_of("host:29401 abc") is None
    jobs.remove("host:29400 abc")
    assert jobs.run_of("host:29400 abc") is None
    jobs.remove("host:29400 abc")


def test_the_newest_job_files_are_kept(tmp_path: Path) -> None:
    jobs = JobFiles(tmp_path)
    (tmp_path / "nodes" / "run-1").mkdir(parents=True)
    leave(jobs, tmp_path, KEPT_JOBS + 3)
    kept = {number for number in range(KEPT_JOBS + 3) if jobs.run_of(f"job-{number}") is not None}
    assert kept == {1, *range(3, KEPT_JOBS + 3)}


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"run_id": ".."}', b'{"run_id": 1}', b"\xff"])
def test_a_job_file_without_a_run_id_counts_as_none(tmp_path: Path, content: bytes) -> None:
    jobs = JobFiles(tmp_path)
    jobs.write("job", "run-1")
    (file,) = tmp_path.glob("jobs/*")
    file.write_bytes(content)
    assert jobs.run_of("job") is None
