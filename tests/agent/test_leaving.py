"""An agent whose node leaves because of a signal or a notice: its messages and acts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import cast

import pytest
import structlog

from elastic_agent.agent import events
from elastic_agent.agent.events import Notified
from elastic_agent.agent.reporting.log_lines import log_event
from elastic_agent.agent.signals import SignalDesk
from elastic_agent.agent.supervisor import Supervisor
from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.config.settings import Settings
from elastic_agent.protocol import Cause, Notice

ALL_SAVE = "all workers have 60 s to save and exit, then the run ends"
SOME_SAVE = "workers that handle notices have 60 s to save and exit, then the run ends"


@pytest.mark.parametrize(
    ("workers", "line"),
    [
        (Notified(True, 1), ALL_SAVE),
        (Notified(True, 0), "no worker here handles notices or SIGTERM: they end without saving, then"),
        (Notified(True, 0, catching=1), "handles notices: they get SIGTERM, which 1 worker handles, then"),
        (Notified(True, 0, signal.SIGINT, 2), "no worker here handles notices: they get SIGINT, then"),
        (Notified(True), SOME_SAVE),
        (Notified(False), SOME_SAVE),
    ],
)
def test_a_notice_that_no_worker_hears_is_said(workers: Notified, line: str) -> None:
    assert line in logged_notice(workers, Cause.DRAIN)


def test_workers_may_still_ask_for_the_notice_of_a_preemption() -> None:
    words = "no worker here has asked for notices so far, or handles the notice"
    assert words in logged_notice(Notified(True, 0), Cause.PREEMPTED)
    assert ALL_SAVE in logged_notice(Notified(True, 1), Cause.PREEMPTED)


def logged_notice(workers: Notified, cause: Cause) -> str:
    with structlog.testing.capture_logs() as logs:
        log_event(events.NoticeGiven(3, Notice(1, cause, 60.0, "SIGUSR1 on a", ends=True), workers))
    (entry,) = logs
    return str(entry["event"])


class Leaves:
    """Stands for a supervisor."""

    def drain(self, reason: str) -> None:
        assert reason == "SIGTERM received"


@pytest.mark.parametrize("depending", [(), ("b", "c")])
def test_an_interrupted_agent_says_which_nodes_cannot_go_on_without_its_store(
    depending: tuple[str, ...],
) -> None:
    async def interrupt() -> None:
        desk = SignalDesk(
            Settings(signals_to_handle=("SIGTERM",), notice_signal="none"),
            None,
            StopSignals(),
            publish=lambda _: None,
            depending=lambda: depending,
        )
        desk.open()
        desk.attend(cast("Supervisor", Leaves()))
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
        await asyncio.Event().wait()

    with structlog.testing.capture_logs() as logs, pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupt())
    leaves, exits = (entry["event"] for entry in logs)
    assert ("its agent stays to serve the store to b, c; send a second signal" in leaves) == bool(depending)
    assert ("b, c cannot go on until the same command is started here again" in exits) == bool(depending)


CLOSING = """
import asyncio, os, signal
from elastic_agent.agent.signals import SignalDesk
from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.config.settings import Settings

class Loop(asyncio.SelectorEventLoop):
    def _close_self_pipe(self):
        super()._close_self_pipe()
        os.kill(os.getpid(), signal.SIGINT)

async def main():
    settings = Settings(signals_to_handle=("SIGINT",), notice_signal="none")
    desk = SignalDesk(settings, None, StopSignals(), publish=print)
    desk.open()
    desk.close()

with asyncio.Runner(loop_factory=Loop) as runner:
    runner.run(main())
"""


def test_a_signal_that_comes_while_the_loop_closes_is_not_written_to_a_closed_descriptor() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSING], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
