"""Workers of two nodes that are kept: new ones start beside the running world, and the others go on meanwhile."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.faults.cluster import SHORT_LEASE_S
from tests.survive.kept import Kept

SLOTS = ("A/0", "A/1", "B/0", "B/1")

pytestmark = pytest.mark.system


def end(run: Kept) -> None:
    """Have the training end, and wait for it."""
    run.let_finish()
    assert {*run.wait_end().values()} == {ExitCode.FINISHED}, run.story()


def test_the_other_node_trains_on_while_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    with Kept(tmp_path) as run:
        run.begin("A")
        run.begin("B")
        together = run.wait_training("A", "B")
        run.kill("A/1")
        alone = run.wait_training("B", after=together)
        (tmp_path / "may_be_replaced").touch()
        run.wait_training("A", "B", after=alone)
        end(run)
        assert run.processes_of("A/1") == [2]
        assert run.kept("A/0", "B/0", "B/1")
        assert run.of("B/0", "world", "size")[-3:] == [4, 2, 4]
        check_each_step_once(run)
        assert len(run.digests()) == 1


def test_a_node_joins_without_a_restart_of_the_others(tmp_path: Path) -> None:
    with Kept(tmp_path, "--redirects", "1") as run:
        run.begin("A")
        alone = run.wait_training("A")
        run.begin("B")
        run.wait_training("A", "B", after=alone)
        end(run)
        assert run.processes_of(*SLOTS) == [1, 1, 1, 1]
        check_each_step_once(run)
        assert len(run.digests()) == 1
        # What a worker writes before it has a world is kept with what it writes in its first one.
        first = tmp_path / f"logs/{run.run_id}/000001/A/0/stdout.log"
        assert first.read_text() == "A/0 begins\nA/0 is in generation 1\n"


@pytest.mark.prove
def test_all_ranks_have_the_same_state_after_a_hundred_faults(tmp_path: Path) -> None:
    drawn = random.Random(0)
    (tmp_path / "may_be_replaced").touch()
    with Kept(tmp_path, "--max-restarts", "1000", lease_s=SHORT_LEASE_S) as run:
        run.begin("A")
        run.begin("B")
        generation = run.wait_training("A", "B")
        for _ in range(100):
            if drawn.random() < 0.1:
                run.agents["B"].process.kill()
                run.agents["B"].process.wait()
                run.begin("B")
            else:
                for slot in drawn.sample(SLOTS, drawn.choice((1, 1, 1, 2))):
                    run.kill(slot)
            generation = run.wait_training("A", "B", after=generation)
        end(run)
        assert len(run.digests()) == 1
        for slot in SLOTS:
            last = run.pid_of(slot)
            files = [note["open_files"] for note in run.notes("world") if note["pid"] == last]
            assert files[-1] <= files[0] + 10, files


def check_each_step_once(run: Kept) -> None:
    """Check that no step is missing, and that no worker does one twice.

    A worker that leaves its world a step before another one receives that step with the state.
    """
    done = {slot: run.of(slot, "step", "step") for slot in SLOTS}
    assert all(sorted({*steps}) == steps for steps in done.values()), done
    every = {step for steps in done.values() for step in steps}
    assert every == {*range(1, max(every) + 1)}, done
