"""The file in a shared state directory with the secret of a Slurm job: who creates it, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elastic_agent.config import job_secret
from elastic_agent.config.errors import UsageError
from elastic_agent.config.job_secret import JobSecret, NoSecretError

STEP = {
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[2-4]",
    "SLURM_PROCID": "1",
}
FIRST = {**STEP, "SLURM_PROCID": "0"}
CREATES = """
import sys
from pathlib import Path
from elastic_agent.config.job_secret import JobSecret
sys.stdin.readline()
print(JobSecret(Path(sys.argv[1]), True, "n2").wait(60, print)[0].decode())
"""


def file_of(folder: Path, **variables: str) -> Path:
    return JobSecret.of_step(folder, {**STEP, **variables}).file


def refused(secret: JobSecret) -> str:
    with pytest.raises(UsageError) as caught:
        secret.look()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_first_agent_creates_the_secret_and_the_others_read_it(tmp_path: Path) -> None:
    first, other = (JobSecret.of_step(tmp_path / "state", environ) for environ in (FIRST, STEP))
    assert other.look() is None
    secret = first.look()
    assert secret is not None
    assert len(secret[0]) == 64
    assert other.look() == first.look() == secret
    assert (first.file.stat().st_mode & 0o777, first.file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert os.listdir(first.file.parent) == [first.file.name]


def test_all_steps_and_lives_of_a_job_share_the_file_and_no_other_job(tmp_path: Path) -> None:
    own = file_of(tmp_path)
    assert own == tmp_path / "secrets" / "job-lab.slurm-4711"
    assert file_of(tmp_path, SLURM_STEP_ID="3") == own
    assert file_of(tmp_path, SLURM_RESTART_COUNT="2") == own
    array = [
        file_of(tmp_path, SLURM_ARRAY_JOB_ID="4711", SLURM_ARRAY_TASK_ID=task, SLURM_JOB_ID=job)
        for task, job in (("1", "4712"), ("2", "4711"))
    ]
    others = [file_of(tmp_path, SLURM_CLUSTER_NAME="../x"), file_of(tmp_path, SLURM_JOB_ID="4712"), *array]
    assert len({own, *others}) == 5
    assert {one.parent for one in others} == {own.parent}


def test_agents_that_create_it_at_once_have_the_same_secret(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "job"
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", CREATES, str(path)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    for agent in agents:
        assert agent.stdin is not None
        agent.stdin.write("\n")
        agent.stdin.flush()
    found = {agent.communicate(timeout=60)[0].strip() for agent in agents}
    assert found == {path.read_text().strip()}
    assert os.listdir(path.parent) == ["job"]


def test_an_agent_waits_for_the_one_that_creates_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_secret, "SILENT_S", 0.0)
    first, other = (JobSecret.of_step(tmp_path, environ) for environ in (FIRST, STEP))
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        threading.Thread(target=first.look).start()

    assert other.wait(60.0, say) == first.look()
    assert said == [f"waiting for the agent on n2 to create the secret of this job, {other.file}"]


def test_without_a_shared_directory_an_agent_says_so_and_makes_no_secret_of_its_own(tmp_path: Path) -> None:
    secret = JobSecret.of_step(tmp_path, STEP)
    with pytest.raises(
        NoSecretError, match=r"the agent on n2 did not create .* expected a state directory that all"
    ):
        secret.wait(0.0, print)
    assert not secret.file.parent.exists()


@pytest.mark.parametrize("mode", [0o640, 0o602])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    first = JobSecret.of_step(tmp_path, FIRST)
    first.look()
    first.file.chmod(mode)
    assert f"file {first.file}: other users can read or write it (mode {mode:04o}); expected 0600" in refused(
        first
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_or_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    first = JobSecret.of_step(tmp_path, FIRST)
    first.look()
    os.chown(first.file, 12345, -1)
    assert "it belongs to user 12345; expected this user" in refused(first)
    os.chown(first.file.parent, 12345, -1)
    assert f"directory {first.file.parent}: it belongs to user 12345" in refused(first)


def test_a_folder_that_others_can_write_and_a_link_are_refused(tmp_path: Path) -> None:
    first = JobSecret.of_step(tmp_path, FIRST)
    first.look()
    first.file.parent.chmod(0o770)
    assert "other users can write it (mode 0770); expected 0700" in refused(first)
    first.file.parent.chmod(0o700)
    first.file.rename(tmp_path / "elsewhere")
    first.file.symlink_to(tmp_path / "elsewhere")
    assert "expected a regular file" in refused(first)


def test_half_a_secret_is_refused(tmp_path: Path) -> None:
    """No agent writes one: it is no reason to take part without authentication, or to write another."""
    first = JobSecret.of_step(tmp_path, FIRST)
    first.look()
    first.file.write_text("")
    assert "no lines; expected one secret" in refused(first)


def test_a_state_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    assert "expected" in refused(JobSecret.of_step(tmp_path / "state", FIRST))


def test_files_of_jobs_that_are_long_over_are_removed(tmp_path: Path) -> None:
    old, recent, own = (
        JobSecret.of_step(tmp_path, {**FIRST, "SLURM_JOB_ID": job}) for job in ("1", "2", "3")
    )
    for one in (old, recent):
        one.look()
    long_ago_s = time.time() - job_secret.KEPT_S - 60
    for one in (old, recent):
        os.utime(one.file, (long_ago_s, long_ago_s))
    recent.look()  # an agent has read it
    own.look()
    assert sorted(os.listdir(own.file.parent)) == [recent.file.name, own.file.name]


def test_outside_a_step_there_is_no_such_secret(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--secret-source slurm: .* expected a step of a Slurm job: start the agents"
    ):
        JobSecret.of_step(tmp_path, {"SLURM_JOB_ID": "4711"})
