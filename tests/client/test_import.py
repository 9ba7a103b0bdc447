"""What importing the client costs and does: no heavy module, and stacks on request."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import pytest

from elastic_agent.client._cells import HeartbeatFile
from tests.client.support import AGENT_ENVIRONMENT, run_script, running
from tests.waiting import GUARD_S

# A real-time signal, as the agent uses one: it kills where it is not caught.
STACKS_SIGNAL = int(signal.SIGRTMIN) + 6

NEW_MODULES = """
import sys
before = set(sys.modules)
from elastic_agent import client
client.current()
client.heartbeat(1)
print(*sorted(set(sys.modules) - before))
"""


def test_the_client_loads_no_heavy_module_and_of_this_package_only_its_variables(tmp_path: Path) -> None:
    with closing(HeartbeatFile.create(tmp_path, 2)) as file:
        stacks = {"ELASTIC_AGENT_STACKS_SIGNAL": str(STACKS_SIGNAL)}
        under_agent = {**AGENT_ENVIRONMENT, **stacks, "ELASTIC_AGENT_HEARTBEAT": file.path}
        for variables in ({}, under_agent):
            loaded = set(run_script(NEW_MODULES, variables).stdout.split())
            own = {name for name in loaded if name.startswith("elastic_agent")}
            assert {name for name in own if not name.startswith("elastic_agent.client")} <= {
                *("elastic_agent", "elastic_agent.worker_variables"),
                *(("elastic_agent.exit_note",) if variables else ()),
            }
            heavy = {
                "asyncio",
                "logging",
                "multiprocessing",
                "socket",
                "subprocess",
                "threading",
                "torch",
                "typing",
            }
            assert loaded.isdisjoint(heavy)


STUCK_IN_TWO_THREADS = """
import os, threading
from elastic_agent import client

def waits_in_a_thread():
    os.read(os.pipe()[0], 1)

def waits_for_input():
    print("stuck")
    input()

threading.Thread(target=waits_in_a_thread, daemon=True).start()
waits_for_input()
print("went on")
"""


def test_the_agents_signal_dumps_all_stacks_and_training_continues() -> None:
    variables = {**AGENT_ENVIRONMENT, "ELASTIC_AGENT_STACKS_SIGNAL": str(STACKS_SIGNAL)}
    with running(STUCK_IN_TWO_THREADS, variables) as worker:
        assert worker.hear() == "stuck"
        worker.process.send_signal(STACKS_SIGNAL)
        assert worker.process.stderr is not None
        seen = ""
        while "waits_for_input" not in seen or "waits_in_a_thread" not in seen:
            line = worker.process.stderr.readline()
            assert line, f"ended without the stacks: {seen}"
            seen += line
        assert worker.ask() == "went on"
        assert worker.process.wait(timeout=GUARD_S) == 0


def test_stacks_go_to_descriptor_2_even_if_stderr_is_replaced() -> None:
    script = """
        import os, sys
        sys.stderr = None
        from elastic_agent import client
        os.kill(os.getpid(), int(os.environ["ELASTIC_AGENT_STACKS_SIGNAL"]))
    """
    done = run_script(script, {**AGENT_ENVIRONMENT, "ELASTIC_AGENT_STACKS_SIGNAL": str(STACKS_SIGNAL)})
    assert "most recent call first" in done.stderr


def test_without_an_agent_signals_are_left_alone() -> None:
    script = """
        from elastic_agent import client
        print("ready")
        input()
    """
    with running(script, {}) as worker:
        worker.hear()
        worker.process.send_signal(STACKS_SIGNAL)
        assert worker.process.wait(timeout=GUARD_S) == -STACKS_SIGNAL


@pytest.mark.parametrize("value", ["", "USR2", "0", "9", "4096", str(10**18)])
def test_a_signal_that_cannot_be_caught_is_reported_in_one_line(value: str) -> None:
    script = "from elastic_agent import client"
    done = run_script(script, {**AGENT_ENVIRONMENT, "ELASTIC_AGENT_STACKS_SIGNAL": value}, returncode=1)
    last = done.stderr.splitlines()[-1]
    assert f"MalformedEnvironmentError: ELASTIC_AGENT_STACKS_SIGNAL={value!r} in the environment" in last
    assert "expected the number of a signal that can be caught" in last
