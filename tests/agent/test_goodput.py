"""The warning of training that begins again."""

from __future__ import annotations

import asyncio

import pytest

from elastic_agent.agent import events
from elastic_agent.agent.reporting.goodput_recorder import GoodputRecorder
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.protocol import Grace
from elastic_agent.workers.guard.client import Spawned


@pytest.mark.parametrize(
    ("last", "first", "is_told"),
    [([310], 1, True), ([310, 12], 2, False), ([310, 40], 3, True), ([310, 40], 40, False)],
    ids=["lost", "another fold", "another fold, lost", "another fold, resumed"],
)
@pytest.mark.parametrize("counted", [0, 3], ids=["", "after optimizer steps"])
def test_steps_are_compared_with_the_last_of_the_training_that_was_interrupted(
    last: list[int], first: int, is_told: bool, counted: int, capsys: pytest.CaptureFixture[str]
) -> None:
    step = steps_made = 0

    async def play() -> None:
        nonlocal step, steps_made
        recorder = GoodputRecorder(lambda: Progress(1, {0: 2}, {0: step}, optimizer_steps={0: steps_made}))
        step = last[0]
        recorder.on_event(Spawned(1, {0: 2}))
        step = last[-1]
        recorder.on_event(events.WorkersStopping(1, "a worker failed", Grace.RESTART))
        recorder.on_event(events.WorkersCleared())
        step, steps_made = 0, counted
        recorder.on_event(Spawned(2, {0: 3}))
        step = first
        recorder.on_event(events.WorkersStopping(2, "the run stops", Grace.DRAIN))
        recorder.close()

    asyncio.run(play())
    told = "".join(capsys.readouterr())
    assert told.count("training began again") == is_told
    assert (f"at step {first}, although it had reached step {last[-1]}: unless" in told) is is_told


def test_workers_whose_steps_are_counted_only_at_their_end_have_trained_since_their_start() -> None:
    """When the first step was is not known then; a script may take no longer than a second."""
    steps_made = 0

    async def play() -> GoodputRecorder:
        nonlocal steps_made
        recorder = GoodputRecorder(lambda: Progress(1, {0: 2}, {0: 0}, optimizer_steps={0: steps_made}))
        recorder.on_event(Spawned(1, {0: 2}))
        steps_made = 1
        recorder.on_event(events.WorkersSucceeded(1))
        recorder.close()
        return recorder

    assert asyncio.run(play()).goodput.training_s > 0
