"""What scripts with one or several trainings compute when they crash and are started again.

Each result is that of plain Python, or of torchrun, with the same script and the same crashes. Where a training is
certainly the same as that of an earlier process, it is continued; where it may be another, it is not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.client.support import launched

HERE = Path(__file__).parent
PYTHON = Path(sys.executable)
FRAMEWORKS = ("lightning", "transformers")
TORCHRUN = [str(PYTHON.parent / "torchrun")]
AGENT = [str(PYTHON.parent / "elastic-agent"), "--restart-window", "0.001", "--hang-timeout", "1"]
"""The time-out is shorter than some pauses of the scripts, which send no heartbeats."""

PRELOADED = {"lightning": "lightning", "transformers": "transformers.trainer,accelerate"}
"""Importing the frameworks in each of the processes would take most of the time."""

REPEATED = [
    "pauses",
    "ended_training",
    "folds_done_when_training_ends",
    "explicit",
    "trials_with_another_lr",
    "folds_that_are_claimed",
    "handled_exception",
    "overwritten_by_another_run",
]
"""Scripts of both frameworks whose trainings, when they are begun again, begin as the script says.

What else tells two trainings apart is in test_signature.py."""
CONTINUED = {
    "one_training": {"one": (19, 18)},
    "one_training_without_a_seed": {"one": (19, 18)},
    "one_training_at_its_last_step": {"one": (10, 10)},
    "folds_that_are_skipped": {"fold-0": (13, 12), "fold-2": (24, 12), "fold-3": (12, 12)},
    "exception_that_ends_the_process": {"one": (19, 18)},
    "exception_with_which_the_script_exits": {"one": (19, 18)},
}
"""Scripts of both frameworks with a training that is certainly the same: its steps in all, and without the crash.

The first fold is the only training that the run has begun when it crashes; the third and the fourth are not.
"""
ONLY = {
    "lightning": ["fit_test_fit", "alternating", "folder_that_cannot_be_written", "late_difference"],
    "transformers": ["seeded_before_training", "explicit_at_the_last_step", "accelerated"],
}

CHECKED = {
    "lightning": [script for script in CONTINUED if script != "one_training_at_its_last_step"],
    "transformers": ["one_training", "folds_that_are_skipped"],
}
"""The scripts with trainings to be continued that `make test` runs; and those whose trainings are to be repeated:"""
CHECKED_REPEATED = {
    "lightning": [script for script in REPEATED if script != "pauses"],
    "transformers": ["ended_training", "explicit", "trials_with_another_lr", "overwritten_by_another_run"],
}
"""Both frameworks decide by the same code (`integrations/trainings.py`); one has representatives."""

ENDED = "a training of this run has ended in"
SEVERAL = "a process of this run has begun several trainings in"
ANOTHER = "in the training that was interrupted in"
OVERWRITTEN = "is not used: another training has overwritten it"

REMEDY = {"lightning": "trainer.fit(..., ckpt_path=...)", "transformers": "resume_from_checkpoint=..."}


def system_to_prove(test: Any) -> Any:
    return pytest.mark.system(pytest.mark.prove(test))


class Results:
    def __init__(self, folder: Path, output: str) -> None:
        self.folder, self.output = folder, output

    def of(self, script: str) -> dict[str, Any]:
        """Return of each training, the final weights."""
        found = {path.name: json.loads(path.read_text()) for path in (self.folder / script).glob("*.json")}
        assert "finished.json" in found, self.output
        return found

    def steps(self, script: str, rank: int = 0) -> list[Any]:
        """The name of the training, the step and its samples."""
        lines = (self.folder / script / f"steps-{rank}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def count(self, script: str, training: str) -> int:
        """Of the steps of a training."""
        return [step[0] for step in self.steps(script)].count(training)


def run(folder: Path, framework: str, mode: str, launcher: list[str], *scripts: str) -> Results:
    script = str(HERE / f"{framework}_trainings.py")
    done = subprocess.run(
        [*(launcher or [str(PYTHON)]), script, str(folder / "results"), mode, *scripts],
        cwd=folder,
        env={**launched({}), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Results(folder / "results", done.stdout + done.stderr)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_training_is_continued_if_it_is_certainly_the_same_and_no_other(
    framework: str, tmp_path: Path
) -> None:
    """In processes that are forked after the import of the framework, with what an agent's workers have."""
    continued, repeated = CHECKED[framework], CHECKED_REPEATED[framework]
    done = run(tmp_path, framework, "plain,worker", [], *continued, *repeated)
    plain, worker = (Results(done.folder / mode, done.output) for mode in ("plain", "worker"))
    for script in repeated:
        assert worker.of(script) == plain.of(script), script
        assert worker.steps(script) == plain.steps(script), script
    for script in continued:
        assert worker.of(script) == plain.of(script), script
        for training, (steps, _) in CONTINUED[script].items():
            assert worker.count(script, training) == steps, training
    told = [line for line in done.output.splitlines() if "training starts as the script says, not" in line]
    assert all(REMEDY[framework] in line for line in told), told
    counts = tuple(sum(why in line for line in told) for why in (ENDED, SEVERAL, ANOTHER))
    assert counts == {"lightning": (3, 2, 2), "transformers": (1, 2, 1)}[framework], told
    assert done.output.count(OVERWRITTEN) == 2, "both checkpoints of the training that was interrupted"


class Runs:
    def __init__(self, folder: Path, framework: str) -> None:
        self.framework = framework
        for name in ("agent", "plain", "whole"):
            (folder / name).mkdir()
        preload = ("--preload", PRELOADED[framework])
        launcher = [*AGENT, *preload, "--standalone", "--nproc-per-node", "1", "--max-restarts", "30"]
        self.agent = run(folder / "agent", framework, "launched", launcher)
        self.plain = run(folder / "plain", framework, "plain", [])
        self.whole = run(folder / "whole", framework, "whole", [], *CONTINUED)


@pytest.fixture(scope="module", params=FRAMEWORKS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), request.param)


@system_to_prove
def test_a_training_that_may_be_another_starts_as_the_script_says(runs: Runs) -> None:
    for script in [*REPEATED, *ONLY[runs.framework]]:
        agent, plain = runs.agent, runs.plain
        assert agent.of(script) == plain.of(script), script
        assert agent.steps(script) == plain.steps(script), script


@system_to_prove
def test_a_training_that_is_certainly_the_same_is_continued_as_if_uninterrupted(runs: Runs) -> None:
    for script, trainings in CONTINUED.items():
        agent, whole = runs.agent, runs.whole
        assert agent.of(script) == whole.of(script) == runs.plain.of(script), script
        for training, counts in trainings.items():
            found = agent.count(script, training), whole.count(script, training)
            assert found == counts, (script, training)
    if runs.framework == "transformers":
        script = "one_training_at_the_end_of_a_part_of_an_epoch"
        assert len(runs.agent.steps(script)) == 9, "plain transformers would take a tenth"


@system_to_prove
def test_one_line_per_process_names_the_code_that_continues_a_training(runs: Runs) -> None:
    agent = runs.agent
    told = [line for line in agent.output.splitlines() if "training starts as the script says, not" in line]
    lines = [line for line in told if line.startswith("elastic_agent: ")]
    assert all(REMEDY[runs.framework] in line for line in lines), lines
    ended, several, another = ([line for line in lines if why in line] for why in (ENDED, SEVERAL, ANOTHER))
    # After each crash in the later folds, and in the scripts in which a second training crashes.
    counts = {"lightning": (4, 4, 2), "transformers": (3, 2, 2)}[runs.framework]
    assert (len(ended), len(several), len(another)) == counts, lines
    assert len(lines) == sum(counts)
    assert agent.output.count(OVERWRITTEN) == 2
    if runs.framework == "lightning":
        differs = "optimizer.0.0.lr is 0.1 and was 0.01 in the training whose"
        told = [line for line in agent.output.splitlines() if line.startswith("elastic_agent: ")]
        assert sum(differs in line for line in told) == 1


@system_to_prove
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_workers_that_crash_compute_what_they_compute_under_torchrun(
    framework: str, tmp_path: Path
) -> None:
    """torchrun does not crash: after SIGTERM, Lightning's workers wait for their peers until it kills them."""
    scripts = ["folds_that_are_skipped", "one_training"]
    results = []
    for launcher, mode in ((TORCHRUN, "launched-whole"), (AGENT, "launched")):
        (folder := tmp_path / mode).mkdir()
        command = [*launcher, "--standalone", "--nproc-per-node", "2", "--max-restarts", "8"]
        results.append(run(folder, framework, mode, command, *scripts))
    torchrun, agent = results
    for script in scripts:
        assert agent.of(script) == torchrun.of(script)
    for rank in range(2):
        first, second = (
            [step for step in each.steps(scripts[0], rank) if step[0] == "fold-1"] for each in results
        )
        assert first == second
        assert len(first) == 12
        assert len(agent.steps("one_training", rank)) <= 20, "it was continued"
