"""Workers of two nodes that are kept: new ones start beside the running world, and the others go on meanwhile."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.survive.two_nodes import SLOTS, Run, running

pytestmark = pytest.mark.system


def test_the_other_node_trains_on_while_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    with running(tmp_path, "--lease-ttl", "30") as run:
        run.start("A")
        run.start("B")
        together = run.await_training(*SLOTS)
        run.kill("A.1")
        alone = run.await_training("B.0", "B.1", since=together)
        (tmp_path / "may_be_replaced").touch()
        run.await_training(*SLOTS, since=alone)
        run.end()
        assert [len(run.pids(slot)) for slot in SLOTS] == [1, 2, 1, 1]
        assert run.of("B.0", "size")[-3:] == [4, 2, 4]
        check_each_step_once(run)
        assert len({run.of(slot, "digest")[0] for slot in SLOTS}) == 1


def test_a_node_joins_without_a_restart_of_the_others(tmp_path: Path) -> None:
    with running(tmp_path, "--lease-ttl", "30", "--redirects", "1") as run:
        run.start("A")
        run.await_training("A.0", "A.1")
        run.start("B")
        run.await_training(*SLOTS)
        run.end()
        assert [len(run.pids(slot)) for slot in SLOTS] == [1, 1, 1, 1]
        check_each_step_once(run)
        assert len({run.of(slot, "digest")[0] for slot in SLOTS}) == 1
        # What a worker writes before it has a world is kept with what it writes in its first one.
        (first,) = tmp_path.glob("logs/run/000001/A/0/stdout.log")
        assert "A.0 begins" in first.read_text()
        assert "A.0 is in generation 1" in first.read_text()


@pytest.mark.prove
def test_all_ranks_have_the_same_state_after_a_hundred_faults(tmp_path: Path) -> None:
    drawn = random.Random(0)
    (tmp_path / "may_be_replaced").touch()
    with running(tmp_path, "--lease-ttl", "2", "--max-restarts", "1000") as run:
        run.start("A")
        run.start("B")
        generation = run.await_training(*SLOTS)
        for _ in range(100):
            if drawn.random() < 0.1:
                run.agents["B"].kill()
                run.agents["B"].wait()
                run.start("B")
            else:
                for slot in drawn.sample(SLOTS, drawn.choice((1, 1, 1, 2))):
                    run.kill(slot)
            generation = run.await_training(*SLOTS, since=generation)
        run.end()
        assert len({run.of(slot, "digest")[-1] for slot in SLOTS}) == 1
        for slot in SLOTS:
            last = run.pids(slot)[-1]
            files = [
                fact["open_files"] for fact in run.told(slot) if "open_files" in fact and fact["pid"] == last
            ]
            assert files[-1] <= files[0] + 10, files


def check_each_step_once(run: Run) -> None:
    """Check that no step is missing, and that no worker does one twice.

    A worker that leaves its world a step before another one receives that step with the state.
    """
    done = {slot: run.of(slot, "done") for slot in SLOTS}
    assert all(sorted({*steps}) == steps for steps in done.values()), done
    every = {step for steps in done.values() for step in steps}
    assert every == {*range(1, max(every) + 1)}, done
