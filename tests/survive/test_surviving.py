"""Workers that outlive their world: they keep process and state, go on in the next one, and no step is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.faults.cluster import EXPIRING_LEASE_S, LEASE_S
from tests.survive.kept import Kept

STEPS = 12
STANDS_AT = 5
SLOTS = ("n/0", "n/1", "n/2")

pytestmark = pytest.mark.system


@contextmanager
def training(
    folder: Path, how: str = "one is killed", *options: str, lease_s: float = LEASE_S
) -> Iterator[Kept]:
    """Run an agent with three workers, of which the second one stands in a step until it is killed."""
    (folder / "may_be_replaced").touch()
    with Kept(folder, "--redirects", "0:1", *options, lease_s=lease_s) as run:
        run.begin("n", 3, STEPS, how)
        yield run


def kill_in_the_step(run: Kept, worker: str) -> None:
    """Kill a worker when the second one stands, and the others are in the same step."""
    run.wait("a worker that stands", lambda: run.notes("stands"))
    run.wait(
        "the others", lambda: all(STANDS_AT in run.of(other, "step", "step") for other in ("n/0", "n/2"))
    )
    run.kill(worker)


def end(run: Kept) -> str:
    """Wait for the end, and return the output."""
    assert run.wait_end() == {"n": ExitCode.FINISHED}, run.story()
    return run.agents["n"].said()


@pytest.mark.parametrize("how", ["one is killed", "a GPU that is kept"])
def test_workers_outlive_one_that_is_killed_and_no_step_is_lost(tmp_path: Path, how: str) -> None:
    with training(tmp_path, how) as run:
        kill_in_the_step(run, "n/1")
        end(run)
        assert run.processes_of("n/1") == [2]
        for worker in (kept := run.kept("n/0", "n/2")):
            assert run.of(worker, "step", "step") == [*range(1, STEPS + 1)], "each step once"
        worker = kept[0]
        assert run.of(worker, "world", "generation") == [1, 2]
        assert run.of(worker, "world", "step") == [0, STANDS_AT]
        assert run.of(worker, "world", "rank") == run.of(worker, "world", "variable")
        assert len(run.digests()) == 1
        # The output of each generation is in its own file.
        files = [tmp_path / f"logs/{run.run_id}/00000{number}/{worker}/stdout.log" for number in (1, 2)]
        assert [file.read_text() for file in files] == [
            f"{worker} begins\n{worker} is in generation 1\n",
            f"{worker} is in generation 2\n",
        ]


@pytest.mark.parametrize(
    "how",
    [
        "--survive restart",
        "another training",
        "a group before",
        "another group",
        "a gradient scaler",
        "no optimizer",
        "a GPU",
    ],
)
def test_workers_are_started_again_unless_they_are_to_be_kept_and_can_be(tmp_path: Path, how: str) -> None:
    options = how.split() if how.startswith("--") else []
    with training(tmp_path, how, *options) as run:
        kill_in_the_step(run, "n/1")
        output = end(run)
        assert run.processes_of(*SLOTS) == [2, 2, 2]
        assert ("--survive keep is for CPUs" in output) == (how == "a GPU")


def test_a_worker_with_an_error_of_its_own_is_started_again(tmp_path: Path) -> None:
    with training(tmp_path, "all raise") as run:
        assert "a mistake in the script" in end(run)
        assert run.notes("stands")
        assert run.processes_of("n/0", "n/2") == [2, 2]


def test_connections_that_break_while_no_worker_is_lost_end_workers_with_their_own_error(
    tmp_path: Path,
) -> None:
    with training(tmp_path, "connections break", lease_s=EXPIRING_LEASE_S) as run:
        output = end(run)
        assert "loss.backward()" in output
        assert "pair.cc" in output
        assert run.processes_of(*SLOTS) == [2, 2, 2]


def test_workers_that_do_not_park_are_started_again(tmp_path: Path) -> None:
    """One that stands in its script cannot leave it; it is killed, as it was before."""
    with training(tmp_path) as run:
        kill_in_the_step(run, "n/0")
        end(run)
        assert run.processes_of("n/0", "n/1") == [2, 2]


def test_nothing_is_left_of_parked_workers_when_the_agent_is_killed(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        kill_in_the_step(run, "n/1")
        run.wait("the next world", lambda: 2 in run.of("n/0", "world", "generation"))
        run.agents["n"].signal(signal.SIGKILL)
        assert run.wait_gone([run.pid_of("n/0"), run.pid_of("n/2")]) == []
