"""What the tests of whole jobs share: the job scripts of ``deploy/slurm``, and what the workers noted down."""

from __future__ import annotations

from pathlib import Path

from elastic_agent.testing.processes import Line, Lines

from .cluster import ROOT, Job

DEPLOY = ROOT / "deploy" / "slurm"
SMALL = ("--gpus-per-node=1", "--cpus-per-task=1", "--time=10")
"""The job scripts are written for larger nodes."""


def notes(folder: Path, kind: str) -> list[Line]:
    """What the workers noted down so far (see tests/faults/handling_notices.py)."""
    return Lines(folder / "steps.jsonl").of(kind)


def steps(folder: Path) -> list[Line]:
    """The steps of rank 0, which are those of all."""
    return [record for record in notes(folder, "step") if record["rank"] == 0]


def wait_steps(job: Job, after: int = 0) -> list[Line]:
    """Until five steps were taken in generations above ``after``; those steps."""

    def look() -> list[Line] | None:
        assert job.state != "FAILED", job.output
        taken = [record for record in steps(job.folder) if record["generation"] > after]
        return taken if len(taken) >= 5 else None

    return job.wait(f"five steps in a generation above {after}", look)


def nodes_of(born: list[Line], generation: int) -> dict[str, int]:
    """How many workers each node had in a generation."""
    nodes = [record["node_id"] for record in born if record["generation"] == generation]
    return {node: nodes.count(node) for node in sorted(set(nodes))}


def finish(job: Job) -> None:
    """Let the training end, and the job with it, in good order."""
    (job.folder / "finish").touch()
    assert job.wait_state("COMPLETED", "FAILED") == "COMPLETED", job.output


def requeue(job: Job) -> None:
    """Announce the end of the job's time, by scancel: Slurm's own clock for it goes by half minutes; begin again."""
    job.slurm.ask("scancel", "--signal=USR1", job.id)
    job.wait_state("PENDING")
    job.start_soon()


def check_each_step_once(folder: Path) -> None:
    """Check that no step was lost or trained twice."""
    taken = [record["step"] for record in steps(folder)]
    assert taken == list(range(1, len(taken) + 1))
