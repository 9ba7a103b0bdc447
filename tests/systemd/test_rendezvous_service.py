"""``elastic-rendezvous`` as a service of a real systemd, as little as it may do there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from elastic_agent.testing.processes import freeze

from .container import booted
from .jobs import RENDEZVOUS, SERVER

pytestmark = [pytest.mark.system, pytest.mark.prove]

WATCHDOG_S = 1.0


def test_a_hanging_server_is_restarted_and_an_idle_one_is_not(tmp_path: Path) -> None:
    unit = RENDEZVOUS.name
    with booted(tmp_path, "head") as (machine,):
        machine.install(RENDEZVOUS)
        machine.edit(unit, f"{SERVER}WatchdogSec={WATCHDOG_S}\n")
        machine.boot()
        machine.systemctl("enable", "--now", unit)
        assert "no runs" in machine.systemctl("status", unit)
        first = machine.main_process(unit)
        freeze(first)
        machine.wait("another one", lambda: machine.show(unit, "NRestarts")["NRestarts"] == "1")
        machine.wait_state(unit, "active")
        up_since_s = time.monotonic()
        machine.wait("two time-outs", lambda: time.monotonic() > up_since_s + 2 * WATCHDOG_S)
        shown = machine.show(unit, "NRestarts", "ActiveState", "User", "Result")
        assert shown == {
            "NRestarts": "1",
            "ActiveState": "active",
            "User": "elastic-rendezvous",
            "Result": "success",
        }
        said = [entry["MESSAGE"] for entry in machine.journal("--unit", unit)]
        assert any("Watchdog timeout" in line for line in said)
        assert any("in run_forever" in line for line in said), "it says where it hung"
