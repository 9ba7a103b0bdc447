"""For how long workers trained, and the warning of training that begins again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from elastic_agent.agent import events
from elastic_agent.agent.reporting.training import Training
from elastic_agent.agent.supervisor import Supervisor
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.monitoring.status import Goodput
from elastic_agent.monitoring.status_text import goodput_text
from elastic_agent.protocol import Grace
from elastic_agent.workers.guard.client import Spawned
from tests import virtual_time

START, STOP = Spawned(1, {0: 2}), events.WorkersStopping(1, "a worker failed", Grace.RESTART)
CLEARED, SUCCEEDED = events.WorkersCleared(), events.WorkersSucceeded(1)
Step = events.Event | float | tuple[int, int]


def told(*steps: Step) -> Goodput:
    """Return the goodput after these events, waits, and steps that workers report or that are counted."""

    async def play() -> Goodput:
        supervisor = SimpleNamespace(progress=None)
        training = Training(cast(Supervisor, supervisor))
        for step in steps:
            match step:
                case (reported, counted):
                    supervisor.progress = Progress(1, {0: 2}, {0: reported}, optimizer_steps={0: counted})
                case float():
                    await asyncio.sleep(step)
                case _:
                    training.on_event(step)
        training.close()
        found = training.goodput
        return Goodput(round(found.training_s), round(found.other_s))

    return virtual_time.run(play())


@pytest.mark.parametrize(
    ("steps", "training_s", "other_s"),
    [
        ([5.0, START, 25.0, STOP, CLEARED, 10.0, START, 20.0, STOP, 5.0], 45, 20),
        ([START, 20.0], 20, 0),
        ([START, 30.5, (1, 0), 70.0], 70, 31),
        ([START, 30.5, (1, 0), 70.0, STOP, (0, 0), START, 10.0, STOP], 70, 41),
        ([START, 30.5, (0, 1), 70.0], 70, 31),
        ([START, 0.5, (0, 1), SUCCEEDED], 0, 0),
        ([START, 10.0, SUCCEEDED, 5.0], 10, 5),
    ],
    ids=[
        "without steps from the start of workers on",
        "before it is known that they report steps",
        "from the first step on",
        "not in workers that ended before their first step",
        "from the first optimizer step on",
        "steps known only at the end",
        "without steps until the workers have ended",
    ],
)
def test_the_time_in_which_workers_train_is_told(steps: list[Step], training_s: int, other_s: int) -> None:
    assert told(*steps) == Goodput(training_s, other_s)


@pytest.mark.parametrize(
    ("last", "first", "is_told"),
    [([310], 1, True), ([310, 12], 2, False), ([310, 40], 3, True), ([310, 40], 40, False)],
    ids=["lost", "another fold", "another fold, lost", "another fold, resumed"],
)
@pytest.mark.parametrize("counted", [0, 3], ids=["", "after optimizer steps"])
def test_steps_are_compared_with_the_last_of_the_training_that_was_interrupted(
    last: list[int], first: int, is_told: bool, counted: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before: list[Step] = [(last[0], 0), START, (last[-1], 0), STOP, CLEARED]
    told(*before, (0, counted), START, (first, counted), STOP)
    shown = "".join(capsys.readouterr())
    assert shown.count("training began again") == is_told
    assert (f"at step {first}, although it had reached step {last[-1]}: unless" in shown) is is_told


def test_the_line_at_the_end_of_a_run() -> None:
    assert goodput_text(Goodput(7320, 540)) == "goodput 93 % over 2 h 11 min: training 2 h 2 min"
    assert goodput_text(Goodput(0, 3)) == "goodput 0 % over 3 s"
    assert goodput_text(Goodput(0, 0.04)) == "goodput 0 % over 0 s"
