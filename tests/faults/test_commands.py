"""``elastic-agent drain`` and ``stop`` return when the last worker process has exited, whatever else runs here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from elastic_agent.agent.control.socket import Command, agents_here, command
from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.processes import freeze, thaw
from tests.cli.support import COMMAND, elastic_agent
from tests.names import unique

from .conftest import MakeCluster

pytestmark = [pytest.mark.system, pytest.mark.prove]


# -- when they return ---------------------------------------------------------------------------


def test_drain_of_the_store_host_on_another_node_says_that_its_machine_must_stay(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("1:2")
    cluster.start_training("a", "b")
    b = next(agent for agent in agents_here() if agent.pid == cluster.agents["b"].pid)

    async def answers() -> list[str]:
        return [answer.text async for answer in command(b, Command("drain", "a"))]

    stays, left = asyncio.run(answers())[1:]
    assert "the machine of a hosts the store; keep it up until the run ends" in stays
    assert left.startswith(f"run {cluster.run_id}: a has left; the other nodes continue;")
    assert cluster.command("stop").returncode == ExitCode.FINISHED


def test_a_failure_on_another_node_does_not_complete_a_drain(make_cluster: MakeCluster) -> None:
    """Another generation begins while the leaver still saves."""
    cluster = make_cluster("1:2")
    cluster.start_saving(a=0.0, b=2.0)
    asked = subprocess.Popen(
        [*COMMAND, "drain", "b", "--run", str(cluster.run_id)],
        stdout=subprocess.PIPE,
    )
    cluster.wait("b to save", lambda: cluster.notes("saving") or None)
    os.kill(cluster.pid_of("a/0"), signal.SIGKILL)
    stdout, _ = asked.communicate(timeout=60)
    workers = {worker["pid"] for worker in cluster.born() if worker["node_id"] == "b"}
    assert not workers & {*cluster.marked_processes()}, cluster.story()
    assert b"b has left" in stdout


def test_drain_fails_if_the_agent_dies_before_confirming(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1")
    cluster.start_saving(a=30.0)
    asked = subprocess.Popen(
        [*COMMAND, "drain", "--run", str(cluster.run_id)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    cluster.wait("a to save", lambda: cluster.notes("saving") or None)
    cluster.agents["a"].signal(signal.SIGKILL)
    _, stderr = asked.communicate(timeout=60)
    assert asked.returncode == ExitCode.NOT_STOPPED
    assert "exited before it could confirm that the workers of this machine have exited" in stderr
    assert "has left" not in stderr


def test_stop_names_a_store_that_does_not_answer_and_takes_effect_when_it_does(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("2")
    cluster.start_training("a", "b")
    host = cluster.agents["a"]
    host.freeze_node()
    done = cluster.command("stop")
    assert done.returncode == ExitCode.NOT_STOPPED
    assert f"the store at 127.0.0.1:{cluster.port} does not answer: " in done.stderr
    assert f"Ctrl-C there, or kill {cluster.agents['b'].pid}" in done.stderr
    host.thaw()
    assert cluster.wait_end() == dict.fromkeys("ab", ExitCode.STOPPED)


# -- what else is on the machine ----------------------------------------------------------------


@contextlib.contextmanager
def listening(name: bytes, backlog: int = 8) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(b"\0" + name)
        sock.listen(backlog)
        yield sock


def test_an_unresponsive_agent_does_not_delay_others(make_cluster: MakeCluster) -> None:
    frozen, cluster = make_cluster("1"), make_cluster("1")
    frozen.start_saving(a=0.0)
    cluster.start_saving(a=0.0)
    freeze(frozen.agents["a"].pid)
    began_s = time.monotonic()
    with listening(f"elastic-agent/{os.geteuid()}/1-00".encode()):
        done = cluster.command("stop")
    assert done.returncode == ExitCode.FINISHED, done.stderr
    assert time.monotonic() - began_s < 20
    thaw(frozen.agents["a"].pid)


OTHER_USER = 61_002
FAKE = """
import contextlib, json, os, signal, socket, sys
signal.alarm(600)
uid, *answers = sys.argv[1:]
os.setuid(int(uid))
sock = socket.socket(socket.AF_UNIX)
sock.bind(f"\\0elastic-agent/{uid}/{os.getpid()}-ab")
sock.listen(8)
print("ready", flush=True)
while True:
    peer, _ = sock.accept()
    wanted = json.loads(peer.makefile().readline())
    with contextlib.suppress(OSError):
        peer.sendall(os.fsencode(answers[wanted["do"] != "describe"]) + b"\\n")
    peer.close()
"""
FAKED = unique("faked")
DESCRIBED = json.dumps({"run_id": FAKED, "node": "n1", "nodes": ["n1"]})
INVALID_ANSWERS = {"garbage": "\udcff[1, {", "a line without an end": "x" * 100_000}
"""Lines that are not of the protocol."""


@contextlib.contextmanager
def fake_agent(described: str, acted: str) -> Iterator[None]:
    """Another user's process that pretends to be an agent, with these answers."""
    if os.geteuid() != 0:
        pytest.skip("only root can start another user's process")
    command = [sys.executable, "-c", FAKE, str(OTHER_USER), described, acted]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            process.kill()


def test_another_users_process_cannot_impersonate_an_agent(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("1", run_id=FAKED)
    cluster.start_saving(a=0.0)
    with fake_agent(DESCRIBED, "{}"):
        done = elastic_agent("drain", "n1", "--run", FAKED)
        assert done.returncode == ExitCode.USAGE
        assert f"such agents on this machine ({OTHER_USER}, root); select one with --user" in done.stderr
        done = elastic_agent("drain", "n2", "--run", FAKED, "--user", "root")
        assert f"run {FAKED} has no node n2" in done.stderr
    with contextlib.ExitStack() as fakes:
        for answer in INVALID_ANSWERS.values():
            fakes.enter_context(fake_agent(answer, answer))
        done = elastic_agent("stop", "--run", FAKED)
    assert done.returncode == ExitCode.FINISHED, done.stderr
    assert f"run {FAKED} stopped" in done.stdout
    assert cluster.wait_end() == {"a": ExitCode.STOPPED}


def test_root_sees_the_agents_user_without_control_characters() -> None:
    with fake_agent(DESCRIBED, r'{"text": "\u001b[2Jn1 has left"}'):
        done = elastic_agent("drain", "n1", "--run", FAKED)
    assert done.returncode == ExitCode.FINISHED, "the agent of the user that was named first answered"
    assert done.stdout.startswith(f"connecting to the agent of user {OTHER_USER} (pid ")
    assert "\x1b" not in done.stdout
    assert "\\x1b[2Jn1 has left" in done.stdout


@pytest.mark.parametrize("answer", INVALID_ANSWERS.values(), ids=INVALID_ANSWERS)
def test_invalid_answers_confirm_nothing(answer: str) -> None:
    with fake_agent(DESCRIBED, answer):
        done = elastic_agent("drain", "n1", "--run", FAKED)
    assert done.returncode == ExitCode.USAGE
    assert "exited before it answered; check its log" in done.stderr


def test_the_agent_refuses_a_command_with_invalid_values(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1")
    cluster.start_saving(a=0.0)
    (agent,) = (agent for agent in agents_here() if agent.pid == cluster.agents["a"].pid)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"\0{agent.name}")
        sock.sendall(b'{"do":"drain","left_s":-5}\n')
        answer = sock.makefile().readline()
    assert '"failed":true' in answer
    assert "left_s" in answer
    assert not cluster.journal("drain")
