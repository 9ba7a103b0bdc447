"""What agents make of a real Slurm's jobs: nodes, names and workers without an option; nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.etcd import need_etcd

from .cluster import Slurm
from .support import DEPLOY, SMALL, finish, nodes_of, notes, steps, wait_steps

pytestmark = [pytest.mark.system, pytest.mark.prove]


def test_unequal_nodes_form_one_run_without_options(slurm: Slurm, folder: Path) -> None:
    """n0 has two GPUs, the others one: Slurm says so to each agent."""
    script = folder / "unequal.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=3 --ntasks-per-node=1 --gpus=4\nexec srun elastic-agent train.py\n"
    )
    job = slurm.submit(script, folder=folder)
    wait_steps(job)
    born = notes(folder, "born")
    assert nodes_of(born, 1) == {"n0": 2, "n1": 1, "n2": 1}
    assert {record["run_id"] for record in born} == {f"slurm-{job.id}"}
    assert [record["worker_id"] for record in sorted(born, key=lambda record: record["rank"])] == [
        "n0/0",
        "n0/1",
        "n1/0",
        "n2/0",
    ]
    finish(job)
    assert not job.processes()


def test_two_steps_of_a_job_are_two_runs(slurm: Slurm, folder: Path) -> None:
    """The second is not taken for the first one, which has finished."""
    script = folder / "two.sbatch"
    step = "srun elastic-agent train.py --checkpoints"
    script.write_text(f"#!/bin/bash\n{step} one\n{step} two\n")
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "finish").touch()
    job = slurm.submit(script, folder=folder)
    assert job.wait_state("COMPLETED", "FAILED") == "COMPLETED", job.output
    runs = [{record["run_id"] for record in notes(folder / name, "born")} for name in ("one", "two")]
    assert runs == [{f"slurm-{job.id}"}, {f"slurm-{job.id}.1"}]


def test_a_heterogeneous_job_is_one_run(slurm: Slurm, folder: Path) -> None:
    script = folder / "heterogeneous.sbatch"
    text = (DEPLOY / script.name).read_text()
    script.write_text(
        text.replace("--gpus-per-node=8", "--gpus-per-node=2").replace(
            "--gpus-per-node=4", "--gpus-per-node=1"
        )
    )
    job = slurm.submit(script, folder=folder)
    finish(job)
    born = notes(folder, "born")
    assert nodes_of(born, 1) == {"n0": 2, "n1": 1, "n2": 1}
    assert {record["run_id"] for record in born} == {f"slurm-{job.id}"}


def test_tasks_of_an_array_are_runs_of_their_own_on_the_same_nodes(slurm: Slurm, folder: Path) -> None:
    options = ("--array=3,5", "--nodes=2", "--nodelist=n0,n1", *SMALL, "--gpus-per-node=0")
    job = slurm.submit(DEPLOY / "array.sbatch", *options, folder=folder)
    for task in ("3", "5"):
        place = folder / "checkpoints" / task
        place.mkdir(parents=True)
        (place / "finish").touch()
    job.wait("both tasks to end", lambda: not slurm.ask("squeue", "-h", "-t", "PD,R,CG", "-j", job.id))
    for task in ("3", "5"):
        born = notes(folder / "checkpoints" / task, "born")
        assert nodes_of(born, 1) == {"n0": 1, "n1": 1}, job.output
        assert {record["run_id"] for record in born} == {f"slurm-{job.id}_{task}"}


def test_scancel_lets_workers_save_and_leaves_no_processes(slurm: Slurm, folder: Path) -> None:
    options = ("--nodes=3", *SMALL)
    job = slurm.submit(DEPLOY / "elastic.sbatch", *options, folder=folder)
    wait_steps(job)
    assert len(job.processes()) > 9  # agents, guards, workers
    job.cancel()
    # Slurm may signal a node so late that the others have begun another generation without those that have left.
    left = notes(folder, "left")
    assert {(line["reason"], line["node_id"]) for line in left} == {
        ("drain", f"n{number}") for number in range(3)
    }
    assert job.facts()["Restarts"] == "0"


def test_a_node_that_fails_does_not_end_an_elastic_job(slurm: Slurm, folder: Path) -> None:
    options = ("--nodes=3", *SMALL)
    job = slurm.submit(DEPLOY / "elastic.sbatch", *options, folder=folder)
    wait_steps(job)
    slurm.lose_node("n2")
    wait_steps(job, after=1)
    slurm.give_up("n2")
    job.wait("Slurm to take the node off the job", lambda: job.facts()["NodeList"] == "n[0-1]")
    newest = steps(folder)[-1]["generation"]
    assert nodes_of(notes(folder, "born"), newest) == {"n0": 1, "n1": 1}
    seen = len(steps(folder))
    job.wait("training to go on after that", lambda: len(steps(folder)) > seen + 20)
    (folder / "finish").touch()
    job.wait_said("the run finished")
    assert job.wait_state("COMPLETED", "FAILED", "COMPLETING") != "PENDING"
    assert job.facts()["Restarts"] == "0"


def test_three_nodes_that_host_the_store_do_without_the_first(slurm: Slurm, folder: Path) -> None:
    need_etcd()
    script = DEPLOY / "three-hosts.sbatch"
    job = slurm.submit(script, "--nodes=3", *SMALL, folder=folder, TMPDIR=str(folder))
    wait_steps(job)
    slurm.lose_node("n0")
    wait_steps(job, after=1)
    assert nodes_of(notes(folder, "born"), steps(folder)[-1]["generation"]) == {"n1": 1, "n2": 1}
    (folder / "finish").touch()
    job.wait("the agents and members of etcd to end", lambda: not job.processes())
    assert {record["generation"] for record in notes(folder, "done")} == {steps(folder)[-1]["generation"]}


def test_after_a_nodes_failure_slurm_requeues_a_plain_job_and_it_is_the_same_run(
    slurm: Slurm, folder: Path
) -> None:
    options = ("--nodes=2", "--requeue", "--open-mode=append", *SMALL)
    job = slurm.submit(DEPLOY / "plain.sbatch", *options, folder=folder)
    wait_steps(job)
    slurm.lose_node("n1")
    slurm.give_up("n1")
    job.wait_state("PENDING")
    job.start_soon()
    before = notes(folder, "born")[-1]["generation"]
    wait_steps(job, after=before)
    born = notes(folder, "born")
    assert {record["run_id"] for record in born} == {f"slurm-{job.id}"}
    assert nodes_of(born, born[-1]["generation"]) == {"n0": 1, "n2": 1}
    assert job.facts()["Restarts"] == "1"
