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


def test_what_keeps_a_run_from_starting_is_logged_once(tmp_path: Path) -> None:
    lines = logged("waits", tmp_path, "--rdzv-endpoint", ENDPOINT, "--nnodes", "2").splitlines()
    words = f"the endpoint {ENDPOINT} means a different machine on every machine"
    assert sum(words in line for line in lines) == 1, lines
    assert "run elastic-agent doctor with the same options" in lines[-1]


@pytest.mark.parametrize(
    "options",
    [pytest.param([], marks=pytest.mark.prove), ["--rdzv-endpoint", ENDPOINT, "--nnodes", "2"]],
)
def test_a_run_that_starts_is_not_examined(tmp_path: Path, options: list[str]) -> None:
    assert logged("starts", tmp_path, *options) == ""


def test_a_node_that_trains_alone_is_told_that_its_endpoint_is_this_machine_for_everybody(
    tmp_path: Path,
) -> None:
    words = "means a different machine on every machine"
    for host in ("localhost", "127.0.1.1"):
        options = "--rdzv-endpoint", f"{host}:{free_port()}", "--nnodes", "1:2"
        lines = logged("alone", tmp_path, *options)
        assert lines.count(f"the endpoint {options[1]} {words}") == 1
        assert "run elastic-agent doctor with the same options" in lines
        assert logged("together", tmp_path, *options) == ""
        assert logged("another agent alone", tmp_path, *options) == ""
    assert logged("alone", tmp_path, "--rdzv-endpoint", "192.0.2.1:29400", "--nnodes", "1:2") == ""
    assert logged("alone", tmp_path, "--rdzv-endpoint", ENDPOINT, "--nnodes", "1") == ""


def test_a_run_that_is_stopped_before_it_starts_is_not_examined(tmp_path: Path) -> None:
    assert logged("is stopped", tmp_path, "--rdzv-endpoint", ENDPOINT, "--nnodes", "2") == ""


def test_a_script_that_sets_the_address_is_reported_at_every_start(tmp_path: Path) -> None:
    script = "import os\nos.environ['MASTER_ADDR'] = 'localhost'\n"
    lines = logged(
        "starts", tmp_path, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--nnodes", "2", source=script
    )
    assert "train.py:2 sets MASTER_ADDR=localhost, so every machine waits for itself. Remedy: remove" in lines
    assert logged("starts", tmp_path, "--nnodes", "1", source=script) == ""


def test_a_store_that_does_not_answer_is_left_to_the_line_that_waits_for_it(tmp_path: Path) -> None:
    lines = logged("unreachable", tmp_path, "--rdzv-endpoint", "192.0.2.1:29400", "--nnodes", "2")
    assert "Remedy" not in lines
    assert "run elastic-agent doctor with the same options" in lines


@pytest.mark.prove
def test_loopback_is_not_reported_when_another_program_has_the_port(tmp_path: Path) -> None:
    options = ("--rdzv-endpoint", ENDPOINT, "--nnodes", "2")
    lines = logged("unreachable", tmp_path, *options)
    assert "means a different machine" not in lines


def test_a_name_that_does_not_resolve_is_told_once_as_the_reason_why_the_store_does_not_answer(
    tmp_path: Path,
) -> None:
    options = ["--rdzv-endpoint", "nowhere.invalid:29400", "--nnodes", "2"]
    (line,) = logged("no name", tmp_path, *options).splitlines()
    assert "run elastic-agent doctor with the same options" in line
