"""The command of ``--on-event``: which events it gets, from which machine, and what a bad one costs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic_agent.agent import events
from elastic_agent.agent.reporting.event_command import EventCommand
from elastic_agent.linux import all_processes, read_process
from elastic_agent.protocol import (
    RECORD_VERSION,
    Address,
    Outcome,
    Phase,
    Plan,
    Policy,
    Seat,
    World,
)
from elastic_agent.rendezvous.events import PlanSeen
from tests.waiting import wait_for

from .support import elastic_agent

SEATS = tuple(Seat(name, f"{name}-1", "127.0.0.1", 1, rank) for rank, name in enumerate(("a", "b", "c")))
RUNNING = Plan(
    RECORD_VERSION,
    1,
    Phase.RUNNING,
    1,
    "3 nodes",
    Policy(),
    world=World(1, SEATS, Address("127.0.0.1", 1), "a"),
)


def after(plan: Plan, **changes: Any) -> Plan:
    return msgspec.structs.replace(plan, version=plan.version + 1, **changes)


def lost(plan: Plan, *nodes: str) -> Plan:
    return after(plan, phase=Phase.FORMING, generation=2, lost=nodes, reason=f"lost {', '.join(nodes)}")


def ended(plan: Plan, phase: Phase, **changes: Any) -> Plan:
    return after(plan, phase=phase, reason=f"the run {phase}", **changes)


def in_group(group: int) -> list[int]:
    return [process.pid for process in all_processes() if process.group == group and not process.dead]


def left(plan: Plan, node: str) -> Plan:
    return after(plan, leaving=(f"{node}-1",))


NEXT = after(
    lost(RUNNING, "a", "b", "c"),
    phase=Phase.RUNNING,
    lost=(),
    world=World(2, SEATS, Address("127.0.0.1", 2), "a"),
)
STOPPED_LATER = ended(after(RUNNING, phase=Phase.FORMING, generation=2), Phase.STOPPED)


def tell(command: str, node: str, *happened: Plan | events.AgentEnded) -> None:
    """Have this command of a node be told that these things happen."""

    async def follow() -> None:
        told = EventCommand(command, "run-1", lambda: node)
        for event in happened:
            told.on_event(PlanSeen(event) if isinstance(event, Plan) else event)
        await told.close()

    asyncio.run(follow())


def told(folder: Path, node: str, *happened: Plan | events.AgentEnded) -> list[dict[str, Any]]:
    """Return what the command of this node gets when these things happen."""
    path = folder / f"{node}.jsonl"
    tell(f"cat >> {path}", node, *happened)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("happened", "expected"),
    [
        pytest.param([lost(RUNNING, "b")], {"a": [("node_lost", ["b"])]}, id="a machine is lost"),
        pytest.param([lost(RUNNING, "a")], {"b": [("node_lost", ["a"])]}, id="the first machine is lost"),
        pytest.param(
            [lost(RUNNING, "b"), lost(RUNNING, "b", "c")],
            {"a": [("node_lost", ["b"]), ("node_lost", ["c"])]},
            id="another one is lost while the world forms again",
        ),
        pytest.param(
            [lost(RUNNING, "a", "b"), ended(lost(RUNNING, "a", "b"), Phase.FAILED)],
            {"c": [("node_lost", ["a", "b"]), ("run_failed", [])]},
            id="too few are left",
        ),
        pytest.param(
            [lost(RUNNING, "a", "b", "c"), NEXT, ended(NEXT, Phase.FINISHED)],
            {"a": [("run_finished", [])]},
            id="all are lost, come back and finish",
        ),
        pytest.param(
            [left(RUNNING, "a"), after(left(RUNNING, "a"), phase=Phase.FORMING, leaving=()), STOPPED_LATER],
            {"b": [("run_stopped", [])]},
            id="the first machine has left, and the run is stopped before the next world",
        ),
        pytest.param(
            [ended(RUNNING, Phase.FAILED, failed_node="b")], {"a": [("run_failed", ["b"])]}, id="a failed run"
        ),
        pytest.param([ended(RUNNING, Phase.FINISHED)], {"a": [("run_finished", [])]}, id="a finished run"),
        pytest.param([ended(RUNNING, Phase.STOPPED)], {"a": [("run_stopped", [])]}, id="a stopped run"),
        pytest.param(
            [events.AgentEnded(Outcome.UNREACHABLE, "no store")],
            {node: [("node_ended", [node])] for node in "abc"},
            id="a machine whose store does not answer",
        ),
    ],
)
def test_one_machine_tells_of_what_happens_to_the_run(
    happened: list[Plan | events.AgentEnded], expected: dict[str, list[tuple[str, list[str]]]], tmp_path: Path
) -> None:
    records = {node: told(tmp_path, node, RUNNING, *happened) for node in "abc"}
    assert {
        node: [(record["event"], record["nodes"]) for record in lines]
        for node, lines in records.items()
        if lines
    } == expected
    for node, lines in records.items():
        assert all((record["run"], record["reported_by"]) == ("run-1", node) for record in lines)


def test_what_was_over_when_an_agent_came_is_not_told_again(tmp_path: Path) -> None:
    over = ended(RUNNING, Phase.FINISHED)
    assert told(tmp_path, "a", over, after(over)) == []


@pytest.mark.parametrize(
    ("command", "lines", "logged"),
    [
        pytest.param("cat >> told; echo no mail today >&2; exit 3", 1, "3: no mail today", id="fails"),
        pytest.param("cat >> told; nothing-of-this-name", 1, "code 127", id="is missing"),
        pytest.param("cat >> told", 1, "", id="succeeds"),
        pytest.param("true", 0, "", id="does not read its input"),
    ],
)
@pytest.mark.system
def test_a_run_tells_its_end_and_no_command_changes_it(
    command: str, lines: int, logged: str, tmp_path: Path
) -> None:
    script, record_file = tmp_path / "train.py", tmp_path / "told"
    script.write_text("print('trained')\n")
    done = elastic_agent("--on-event", f"cd {tmp_path}; {command}", str(script))
    assert (done.returncode, done.stdout.count("trained")) == (0, 1)
    records = record_file.read_text().splitlines() if record_file.exists() else []
    assert [json.loads(line)["event"] for line in records] == ["run_finished"] * lines
    assert ("the command of --on-event was not told of run_finished: " in done.stderr) is bool(logged)
    assert logged in done.stderr


@pytest.mark.parametrize(
    "rest",
    [pytest.param("exec sleep 1000", id="hangs"), pytest.param("sleep 1000 &", id="leaves a process behind")],
)
def test_a_command_is_ended_with_what_it_started_after_its_time(
    rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("elastic_agent.agent.reporting.event_command.LIMIT_S", 2.0)
    tell(f"echo $$ > {tmp_path}/pid; {rest}", "a", RUNNING, ended(RUNNING, Phase.FINISHED))
    assert "did not complete within 2 s" in "".join(capsys.readouterr())
    # A stalled machine may end it before it has begun.
    groups = [int(path.read_text() or 0) for path in tmp_path.glob("pid")]
    wait_for("the end of all that it started", lambda: not any(map(in_group, filter(None, groups))))


def test_what_a_command_leaves_running_when_it_succeeds_goes_on(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = f"sleep 1000 > /dev/null 2>&1 & echo $! > {pid_file}"
    tell(command, "a", RUNNING, ended(RUNNING, Phase.FINISHED))
    pid = int(pid_file.read_text())
    process = read_process(pid)
    os.kill(pid, signal.SIGKILL)
    assert process is not None
    assert not process.dead
