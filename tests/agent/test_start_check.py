"""A run that does not start: the agent examines its machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.names import unique
from tests.ports import free_port

ENDPOINT = f"localhost:{free_port()}"
PROGRAM = """
import asyncio, os, sys
from elastic_agent.agent.control.socket import Answer, ControlSocket
from elastic_agent.agent.events import RunAgreed
from elastic_agent.agent.reporting.start_check import StartCheck
from elastic_agent.config.load import load_settings
from elastic_agent.logs import configure_logging
from elastic_agent.protocol import Address, Phase, Plan, Policy, Seat, World
from elastic_agent.protocol.records import RECORD_VERSION
from elastic_agent.rendezvous.events import PlanSeen

async def main(words, what, run_id):
    configure_logging("console", "info", sys.stderr)
    if what.startswith("another agent"):
        async def describe(command):
            yield Answer(run_id=run_id, node="n2")

        served = await ControlSocket.open(describe)
        os.getpid = lambda: 0  # so that this process's socket is another agent's
    problem = {"unreachable": "no answer", "no name": "the host name does not resolve"}.get(what, "")
    check = StartCheck(load_settings(words, {"HOME": "/root"}).settings, lambda: problem, patience_s=0.0)
    running = what in ("starts", "alone", "together", "another agent alone")
    phase = Phase.RUNNING if running else Phase.STOPPED if what == "is stopped" else Phase.FORMING
    seats = Seat("a", "ia", "127.0.0.1", 1, 0), Seat("b", "ib", "127.0.0.1", 1, 1)
    seats = {"alone": seats[:1], "another agent alone": seats[:1], "together": seats}.get(what)
    world = World(1, seats, Address("127.0.0.1", 1), "a") if seats else None
    plan = Plan(RECORD_VERSION, 1, phase, 1, "", Policy(), world=world)
    check.on_event(RunAgreed(run_id))
    if not problem:
        check.on_event(PlanSeen(plan))
    if examining := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(examining)

asyncio.run(main(sys.argv[3:], sys.argv[1], sys.argv[2]))
"""


def logged(what: str, tmp_path: Path, *options: str, source: str = "") -> str:
    script = tmp_path / "train.py"
    script.write_text(source)
    command = [sys.executable, "-c", PROGRAM, what, unique("job")]
    command += ["--state-dir", str(tmp_path), *options, str(script)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr


TWO = ("--nnodes", "2")
SEVERAL = ("--nnodes", "1:2")
HERE = ("--rdzv-endpoint", ENDPOINT)
LOOPBACK = ("--rdzv-endpoint", f"127.0.1.1:{free_port()}")
ELSEWHERE = ("--rdzv-endpoint", "192.0.2.1:29400")
MEANS_ITSELF = "the endpoint {} means a different machine on every machine"


@pytest.mark.parametrize(
    ("what", "options", "is_told"),
    [
        ("waits", (*HERE, *TWO), True),
        pytest.param("starts", (), False, marks=pytest.mark.prove),
        ("starts", (*HERE, *TWO), False),
        ("is stopped", (*HERE, *TWO), False),
        ("alone", (*HERE, *SEVERAL), True),
        ("alone", (*LOOPBACK, *SEVERAL), True),
        ("alone", (*ELSEWHERE, *SEVERAL), False),
        ("alone", (*HERE, "--nnodes", "1"), False),
        ("together", (*HERE, *SEVERAL), False),
        ("another agent alone", (*LOOPBACK, *SEVERAL), False),
    ],
)
def test_an_endpoint_that_is_this_machine_for_everybody_is_told_once_where_that_is_why_nobody_comes(
    tmp_path: Path, what: str, options: tuple[str, ...], is_told: bool
) -> None:
    lines = logged(what, tmp_path, *options)
    if is_told:
        assert lines.count(MEANS_ITSELF.format(options[1])) == 1
        assert "run elastic-agent doctor with the same options" in lines
    else:
        assert lines == ""


def test_a_script_that_sets_the_address_is_reported_at_every_start(tmp_path: Path) -> None:
    script = "import os\nos.environ['MASTER_ADDR'] = 'localhost'\n"
    lines = logged("starts", tmp_path, *HERE, *TWO, source=script)
    assert "train.py:2 sets MASTER_ADDR=localhost, so every machine waits for itself. Remedy: remove" in lines
    assert logged("starts", tmp_path, "--nnodes", "1", source=script) == ""


@pytest.mark.parametrize(
    ("what", "endpoint"),
    [("unreachable", ELSEWHERE[1]), ("unreachable", ENDPOINT), ("no name", "nowhere.invalid:29400")],
    ids=("elsewhere", "here", "no name"),
)
def test_of_a_store_that_does_not_answer_only_the_next_step_is_told(
    tmp_path: Path, what: str, endpoint: str
) -> None:
    """The line that waits for it says why."""
    (line,) = logged(what, tmp_path, "--rdzv-endpoint", endpoint, *TWO).splitlines()
    assert "run elastic-agent doctor with the same options" in line
