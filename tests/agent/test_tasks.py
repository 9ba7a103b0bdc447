"""An error in what the agent does in the background is logged, and disturbs nothing else."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from elastic_agent.agent.reporting import console
from elastic_agent.agent.signals import Meanings, SignalDesk
from elastic_agent.agent.slurm.job import SlurmJob
from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.protocol import Phase
from elastic_agent.rendezvous.events import PlanSeen
from tests.transport.support import plan
from tests.waiting import wait_for_async


def broken(*_: object) -> Any:
    raise RuntimeError("a bug")


def reads_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PATIENCE_S", 0.0)
    console.ConsoleReporter(lambda: "host0:1", broken).on_event(PlanSeen(plan(1, phase=Phase.FORMING)))


def asks_slurm_about_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlurmJob, "end", broken)
    meanings = Meanings(("SIGTERM",), "none", 60.0)
    desk = SignalDesk(meanings, SlurmJob("1", 0), StopSignals(), publish=lambda _: None)
    supervisor: Any = SimpleNamespace(node=SimpleNamespace(plan=None))
    desk.open()
    desk.attend(supervisor, "n1")
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("begin", [reads_the_status, asks_slurm_about_a_signal])
def test_an_error_in_the_background_is_logged(
    begin: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def until_logged(logs: list[structlog.typing.EventDict]) -> None:
        begin(monkeypatch)
        await wait_for_async("an error", lambda: any(line["log_level"] == "error" for line in logs))

    with structlog.testing.capture_logs() as logs:
        asyncio.run(until_logged(logs))
    (error,) = (line for line in logs if line["log_level"] == "error")
    assert "internal error in the background" in error["event"]
    assert str(error["exc_info"]) == "a bug"
