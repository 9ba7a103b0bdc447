"""``elastic-agent status`` and ``why`` of a real run: while it forms, while it runs, and when it has ended."""

from __future__ import annotations

import json
import re
import secrets
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic_agent.exit_codes import ExitCode
from elastic_agent.monitoring.status import RunStatus
from tests.agent.support import Started, elastic_agent, options_for, started
from tests.names import unique
from tests.ports import free_port
from tests.transport.support import torchs_server
from tests.waiting import wait_for

RUN_ID = f"shown-{secrets.token_hex(4)}"
"""elastic-agent status asks all agents of the machine, also those of tests that run at the same time."""

SCRIPT = """
import sys
from elastic_agent import client
client.heartbeat(step=17)
print("up", flush=True)
answer = sys.stdin.readline()
if "fail" in answer:
    raise ValueError("bad sample")
"""


class Agents:
    """Agents of one run, each of which runs one worker that waits for a line."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack = stack
        self.script, self.state_dir = folder / "train.py", folder / "state"
        self.script.write_text(SCRIPT)
        self.endpoint = f"127.0.0.1:{free_port()}"

    def start(self, node_id: str, *more: str, **variables: str) -> Started:
        given = f"--rdzv-endpoint {self.endpoint} --nnodes 2 --rdzv-id {RUN_ID} --node-id {node_id}"
        kept = f"--state-dir {self.state_dir} --log-format console --worker-start cold"
        options = [*given.split(), *kept.split(), *more]
        return self._stack.enter_context(started(*options, str(self.script), variables=variables))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Agents]:
    with ExitStack() as stack:
        yield Agents(tmp_path, stack)


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return str(answer.read().decode())


def status(*more: str) -> str:
    done = elastic_agent("status", RUN_ID, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def status_json(*more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(status("--json", *more))
    return found


def test_the_status_of_a_run_while_it_forms_while_it_runs_and_after_its_end(run: Agents) -> None:
    first = run.start("n1", "--status-port", "0")
    url = first.log_until("status page at ").partition("status page at ")[2].strip()
    first.log_until("waiting for 1 more node")
    assert '"phase":"forming"' in page(f"{url}api/status")
    forming = status()
    assert f"run {RUN_ID} at {run.endpoint}: forming generation 1 for" in forming
    assert "waiting for 1 more node (at least 2 required); joined: n1 (1 worker)" in forming
    assert re.search(r"^n1 +127.0.0.1 +1 worker +joining \(ready\)", forming, re.MULTILINE), forming

    second = run.start("n2", NCCL_DEBUG="WARN")
    assert first.line() == "up"
    assert second.line() == "up"
    for agent in (first, second):
        assert "WARN on n2; not set on n1" in agent.log_until("nodes differ in NCCL_DEBUG")
    wait_for(
        "what a worker of n1 takes of the machine", lambda: '"memory_bytes":' in page(f"{url}api/status")
    )
    assert '<td class="name">n1/0</td>' in page(url)
    running = status_json()
    assert (running["phase"], running["generation"], running["world_size"]) == ("running", 1, 2)
    shown = {node["node_id"]: (node["role"], node["state"], node["first_rank"]) for node in running["nodes"]}
    assert shown == {"n1": ("in the world", "running", 0), "n2": ("in the world", "running", 1)}
    assert 17 in [node.get("step") for node in running["nodes"]], "at least the node that was asked knows"
    assert '"phase":"running"' in page(f"{url}api/status")
    assert f'elastic_agent_world_size{{run="{RUN_ID}"}} 2.0' in page(f"{url}metrics")

    second.tell("fail")
    assert first.line() == "up"
    assert second.line() == "up"
    first.log_until("generation 1: root cause: worker n2/0 (rank 1)")  # when all nodes have reported
    again = status()
    assert "generation 2 running for" in again
    first_one = status_json()["generations"][0]
    assert "root cause: worker n2/0 (rank 1)" in first_one["cause"]
    assert "restarts: 1 of 3 used" in again
    assert re.search(
        r"^1 .* 2 nodes, 2 workers +worker n2/0 .*ValueError: bad sample.*$",
        again,
        re.MULTILINE,
    ), again

    for agent in (first, second):
        agent.tell("go on")
    assert [agent.process.wait() for agent in (first, second)] == [ExitCode.FINISHED] * 2
    ended = status("--state-dir", str(run.state_dir))
    assert re.search(rf"^run {RUN_ID} at \S+: finished .* ago: generation 2 succeeded on 2 nodes", ended), (
        ended
    )
    assert re.search(r"^n2 +127.0.0.1 +1 worker +ended ", ended, re.MULTILINE), ended
    assert "no agent of the run answers on this machine any more" in ended
    assert "bad sample" in ended
    assert re.search(r"goodput \d+ % over ", ended), ended


def test_nothing_is_said_to_run_where_the_agent_was_killed(run: Agents) -> None:
    agent = run.start("n1", "--nnodes", "1", "--max-restarts", "1")
    assert agent.line() == "up"
    agent.tell("fail")
    agent.log_until("generation 1: root cause: ")
    assert agent.line() == "up"
    saved = run.state_dir / "status" / RUN_ID / "n1.json"
    wait_for("the status to be saved", saved.exists)
    agent.process.kill()
    agent.process.wait()
    words = "status", RUN_ID, "--state-dir", str(run.state_dir)
    said = elastic_agent(*words).stdout
    assert "state unknown; generation" in said.splitlines()[0]
    again = "if it was killed, start the same command here again"
    age = rf"no agent of the run answers on this machine; this was known .* ago; {again}\n$"
    assert re.search(age, said)
    assert "running" not in said
    explained_before = elastic_agent("why", *words[1:]).stdout
    assert explained_before.startswith("generation 1: root cause: ")
    assert re.search(age, explained_before)
    assert json.loads(elastic_agent(*words, "--json").stdout)["phase"] == "unknown"


def test_an_outage_of_the_store_hides_and_costs_nothing_of_what_was_known_before(run: Agents) -> None:
    agent = start_alone(run)
    agent.tell("fail")
    agent.log_until("generation 1: root cause: ")
    assert agent.line() == "up"
    stop(agent)
    with socket.create_server(("127.0.0.1", int(run.endpoint.rpartition(":")[2]))) as silent:
        threading.Thread(target=answer_all, args=(silent, b""), daemon=True).start()
        agent = run.start("n1", "--nnodes", "1")
        wait_for("the outage to be noticed", lambda: "has not answered since" in asked("status"))
        said, explained_then = status().splitlines(), why().split("\n\n")
        agent.process.terminate()
        agent.process.wait()
        silent.shutdown(socket.SHUT_RDWR)
    outage = "training is paused on this machine: the store at"
    assert re.match(rf"run {RUN_ID} at \S+: {outage} \S+ has not answered since [-\d]+ [:\d]+ \(", said[0])
    remedy = "stop what `ss -ltnp` on 127.0.0.1 shows for port "
    assert said[1].startswith(remedy)
    assert said[2] == "known from before: generation 2 ran with 1 node, 1 worker"
    assert explained_then[0].startswith("generation 1: root cause: worker n1/0 ")
    assert explained_then[-1].startswith(outage)
    assert f"; {remedy}" in explained_then[-1]
    assert why("--state-dir", str(run.state_dir)).startswith("generation 1: root cause: worker n1/0 ")


def asked(command: str) -> str:
    return elastic_agent(command, RUN_ID).stdout


def why(*more: str) -> str:
    done = elastic_agent("why", RUN_ID, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def explained(text: str) -> list[str]:
    return [cause.partition(":")[0] for cause in text.split("\n\n")]


def start_alone(run: Agents, *more: str) -> Started:
    """Start the only agent of the run; returns when its worker works."""
    agent = run.start("n1", "--nnodes", "1", *more)
    assert agent.line() == "up"
    return agent


def stop(agent: Started) -> None:
    assert elastic_agent("stop", "--run", RUN_ID).returncode == 0
    assert agent.process.wait() == ExitCode.STOPPED


def test_the_history_of_a_run_goes_on_when_it_is_resumed_and_ends_with_the_run(run: Agents) -> None:
    agent = start_alone(run)
    agent.tell("fail")
    assert agent.line() == "up"
    agent.log_until("generation 1: root cause: ")
    stop(agent)

    agent = run.start("n1", "--nnodes", "1", "--status-port", "0")
    url = agent.log_until("status page at ").partition("status page at ")[2].strip()
    assert agent.line() == "up"
    wait_for("what was recorded", lambda: len(status_json()["generations"]) == 3)
    assert re.match(r"generation 1: root cause: worker n1/0 .*ValueError: bad sample", why())
    generations = status_json()["generations"]
    assert [(row["generation"], row.get("ended_s") is None) for row in generations] == [
        (1, False),
        (2, False),
        (3, True),
    ]
    assert 'id="generation-1"' in page(url)
    agent.tell("fail")
    assert agent.line() == "up"
    agent.log_until("generation 3: root cause: ")
    assert explained(why()) == ["generation 1", "generation 3"]
    agent.tell("go on")
    assert agent.process.wait() == ExitCode.FINISHED
    assert explained(why("--state-dir", str(run.state_dir))) == ["generation 1", "generation 3"]

    agent = start_alone(run)  # another run of this name
    assert why() == f"run {RUN_ID}: no generation has failed, as far as is known on this machine\n"
    assert [row["generation"] for row in status_json()["generations"]] == [5]
    agent.tell("go on")
    assert agent.process.wait() == ExitCode.FINISHED


def test_without_an_agent_and_a_saved_status_there_is_one_clear_line(tmp_path: Path) -> None:
    for command in ("status", "why"):
        done = elastic_agent(command, "never-there", "--state-dir", str(tmp_path))
        assert done.returncode == ExitCode.USAGE
        assert done.stderr.startswith(
            f"elastic-agent: {command}: no running agent of run never-there found on this machine for this user"
        )
        assert "run the command on a machine of the run" in done.stderr
        assert done.stderr.count("\n") == 1
        nobodys = elastic_agent(command, "--user", "4000000000", "--state-dir", str(tmp_path))
        assert f"and no saved status in {tmp_path} (" in nobodys.stderr


@pytest.mark.parametrize("is_set_by", ["option", "variable"])
def test_a_wrong_run_id_is_answered_with_those_that_there_are(tmp_path: Path, is_set_by: str) -> None:
    """In the state directory that an option or the environment names."""
    options = ("--state-dir", str(tmp_path)) if is_set_by == "option" else ()
    variables = {"ELASTIC_AGENT_STATE_DIR": str(tmp_path)} if is_set_by == "variable" else {}
    folder = tmp_path / "status" / "mnist"
    folder.mkdir(parents=True)
    (folder / "n1.json").write_bytes(msgspec.json.encode(RunStatus("mnist", "host0:29400", 1.0)))
    for command in ("status", "why"):
        assert elastic_agent(command, "mnist", *options, variables=variables).returncode == 0
        done = elastic_agent(command, "minst", *options, variables=variables)
        assert (
            f"and no saved status of that run in {tmp_path} (--state-dir); there are saved statuses of mnist; run the"
        ) in done.stderr


def test_stop_and_drain_of_a_run_that_has_ended_say_how_it_ended(tmp_path: Path) -> None:
    run_id = unique("ended")
    folder = tmp_path / "status" / run_id
    folder.mkdir(parents=True)
    status = RunStatus(run_id, "host0:29400", 1.0, phase="finished")
    (folder / "n1.json").write_bytes(msgspec.json.encode(status))
    for command in ("stop", "drain"):
        done = elastic_agent(command, "--run", run_id, variables={"ELASTIC_AGENT_STATE_DIR": str(tmp_path)})
        assert done.returncode == ExitCode.USAGE
        assert done.stderr.endswith(f"; run {run_id} has finished already\n"), done.stderr


def test_the_status_of_a_run_that_another_program_kept_from_forming_says_so(tmp_path: Path) -> None:
    script, run_id = tmp_path / "train.py", unique("blocked")
    script.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=answer_all, args=(other, b"SSH-2.0-other\r\n"), daemon=True).start()
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        where = ["--rdzv-endpoint", endpoint, "--rdzv-id", run_id, "--node-id", "lab1"]
        done = elastic_agent(*where, "--nnodes", "2", "--state-dir", str(tmp_path), str(script))
        other.shutdown(socket.SHUT_RDWR)
    assert done.returncode == ExitCode.NO_STORE, done.stderr
    reason = "is used by another program, which is not a store"
    assert f"{endpoint} {reason}" in done.stderr
    told = elastic_agent("status", run_id, "--state-dir", str(tmp_path)).stdout
    assert re.search(rf"not formed yet; node lab1 of this machine ended at .*: {endpoint} {reason}", told), (
        told
    )


def test_an_agent_ends_if_another_version_created_the_store(tmp_path: Path) -> None:
    """If another version coordinates the run, it ends in the same way: see tests/transport/test_bad_records.py."""
    server = torchs_server()
    server.set("elastic-agent/1/id", "0123456789abcdef")
    endpoint = f"127.0.0.1:{server.port}"
    where = ("--rdzv-endpoint", endpoint, "--rdzv-id", unique("run"), "--nnodes", "1:2")
    done = elastic_agent(*options_for(tmp_path, "", *where))
    assert done.returncode == ExitCode.NO_STORE, done.stderr
    assert f"the store at {endpoint} was created by another version of elastic-agent" in done.stderr


def answer_all(other: socket.socket, words: bytes) -> None:
    with suppress(OSError):
        while True:
            connection, _ = other.accept()
            connection.sendall(words)
            connection.close()


TRAINS = """
import select, sys, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
while not select.select([sys.stdin], [], [], 0.005)[0]:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_the_steps_of_a_script_that_reports_none_are_counted(start: str, run: Agents) -> None:
    run.script.write_text(TRAINS)
    agent = run.start("alone", "--nnodes", "1", "--worker-start", start)

    def counted() -> int | None:
        done = elastic_agent("status", RUN_ID, "--json", "--state-dir", str(run.state_dir))
        if done.returncode != 0:
            return None
        nodes = json.loads(done.stdout)["nodes"]
        assert all(node.get("step") is None for node in nodes)
        return max((node.get("optimizer_steps", 0) for node in nodes), default=None)

    first = wait_for("the first counted steps", counted)
    wait_for("more counted steps", lambda: (counted() or 0) > first)
    shown = elastic_agent("status", RUN_ID, "--state-dir", str(run.state_dir)).stdout
    assert re.search(r"alone .* running +\d+ optimizer steps", shown), shown
    assert agent.end("end\n")[0] == 0
