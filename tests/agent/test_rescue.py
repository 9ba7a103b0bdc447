"""A job that lost the node of its batch script: which of the surviving agents acts, and how."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from elastic_agent.agent.events import Requeued
from elastic_agent.agent.slurm.job import SlurmJob
from elastic_agent.agent.slurm.requeue import rescue
from elastic_agent.config.settings import Settings

AUTO = Settings(requeue="auto", max_requeues=100)
FACTS = (
    "JobId=4711 JobName=a JobState={state} Restarts={restarts} BatchFlag=1 NodeList={nodes} BatchHost=n0 \n"
)
LOST = FACTS.format(state="RUNNING", restarts=1, nodes="n[1-5]")
COMMANDS = """\
#!/bin/sh
case "${0##*/} $*" in
    "scontrol show job -o 4711") exec /bin/cat $FOLDER/facts ;;
    "scontrol requeue 4711") test -e $FOLDER/may-requeue || { echo refused >&2; exit 1; } ;;
esac
echo "${0##*/} $*" >>$FOLDER/done
echo "JobState=PENDING" >$FOLDER/facts
"""


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands on the PATH that answer what stands in the folder's file ``facts``, and write down what was done."""
    for name in ("scontrol", "scancel"):
        (tmp_path / name).write_text(COMMANDS)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FOLDER", str(tmp_path))
    (tmp_path / "facts").write_text(LOST)
    (tmp_path / "may-requeue").touch()
    (tmp_path / "done").touch()
    return tmp_path


def rescued(node: str, settings: Settings = AUTO) -> Requeued | None:
    return asyncio.run(rescue(settings, SlurmJob("4711", requeues=1, node=node)))


def done(controller: Path) -> list[str]:
    return (controller / "done").read_text().splitlines()


def test_the_first_survivor_requeues_the_job(controller: Path) -> None:
    said = rescued("n1")
    assert said is not None
    assert (said.failed, done(controller)) == (False, ["scontrol requeue 4711"])
    assert said.words.startswith(
        "job 4711 lost its batch host and with it the rendezvous store: requeued the job"
    )


@pytest.mark.parametrize(
    "facts",
    [
        FACTS.format(state="RUNNING", restarts=1, nodes="n[0-5]"),
        FACTS.format(state="RUNNING", restarts=2, nodes="n[1-5]"),
        FACTS.format(state="COMPLETING", restarts=1, nodes="n[1-5]"),
        LOST.replace("BatchFlag=1", "BatchFlag=0"),
        LOST.replace("BatchHost=n0", "BatchHost="),
    ],
    ids=["its node is there", "requeued already", "ending", "no batch job", "its batch host is unknown"],
)
def test_other_jobs_are_not_touched(controller: Path, facts: str) -> None:
    (controller / "facts").write_text(facts)
    assert rescued("n1") is None
    assert done(controller) == []


def test_other_survivors_leave_the_job_to_the_first(controller: Path) -> None:
    assert rescued("n2") is None
    assert done(controller) == []


@pytest.mark.parametrize(
    "settings",
    [dataclasses.replace(AUTO, requeue="never"), dataclasses.replace(AUTO, max_requeues=1)],
    ids=["never", "most"],
)
def test_a_job_that_may_not_be_requeued_is_cancelled(controller: Path, settings: Settings) -> None:
    said = rescued("n1", settings)
    assert said is not None
    assert said.failed
    assert done(controller) == ["scancel --state=RUNNING 4711"]


def test_a_job_that_slurm_does_not_requeue_is_cancelled(controller: Path) -> None:
    (controller / "may-requeue").unlink()
    said = rescued("n1")
    assert said is not None
    assert "refused; its state is saved" in said.words
    assert "cancelled the job, submit it again to resume" in said.words
    assert done(controller) == ["scancel --state=RUNNING 4711"]


def test_after_a_custom_requeue_command_the_remaining_job_is_cancelled(controller: Path) -> None:
    said = rescued("n1", dataclasses.replace(AUTO, requeue_command=f"echo resubmitted >>{controller}/done"))
    assert said is not None
    assert done(controller) == ["resubmitted", "scancel --state=RUNNING 4711"]


def test_without_an_answer_the_job_is_not_touched(controller: Path) -> None:
    (controller / "facts").unlink()
    said = rescued("n1")
    assert said is not None
    assert (said.failed, done(controller)) == (True, [])
