"""What the person at the terminal is told."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.agent.reporting.store_problem import StoreProblem
from elastic_agent.transport import Obstacle
from tests.processes import on_a_terminal

ROOT = Path(__file__).parents[2]

IMPORTS = """
import asyncio, sys
from msgspec.structs import replace
from elastic_agent.agent.events import AgentStarted, DrainRequested, Rejoining, WorkersFailed, WorkersSaved
from elastic_agent.agent.reporting.console import ConsoleReporter
from elastic_agent.logs import configure_logging
from elastic_agent.protocol import Waiting
from elastic_agent.protocol.records import (
    RECORD_VERSION, Address, Budget, Cause, Failure, FailureKind, Growth, Notice, Phase, Plan, Policy, Seat, World
)
from elastic_agent.rendezvous.events import (
    Connected, Disconnected, LeaseLost, PlanSeen, Registered, Renewed, Unusable
)
from elastic_agent.transport import Obstacle, how_to_reach
from elastic_agent.workers.guard.client import Spawned
from tests import virtual_time
"""

PROGRAM = """
async def nothing():
    raise AssertionError("nothing is waited for")

async def main():
    configure_logging("console", "info", sys.stderr)
    shown = "host0:0"
    narrator = ConsoleReporter(lambda: shown, nothing)
    tell = narrator.on_event

    def headline_at(step):
        narrator.newest_step = lambda: step
        shown = narrator.headline()
        narrator.newest_step = lambda: 0
        return shown

    tell(AgentStarted("me", 1, 2))
    print(narrator.headline())
    shown = "host0:29400"  # the port is known when the store is hosted
    tell(Disconnected("refused"))
    print(narrator.headline())
    tell(Connected("store", False))
    print(narrator.headline())
    world = World(3, (Seat("n1", "me", "10.0.0.1", 2, 0),), Address("10.0.0.1", 1234), "n1")
    sealed = Plan(RECORD_VERSION, 5, Phase.RUNNING, 3, "1 node, 2 workers", Policy(), world=world)
    tell(PlanSeen(sealed))
    print(narrator.headline(), headline_at(1200), sep="\\n")
    tell(PlanSeen(replace(sealed, version=6, budget=Budget(progress_s=60.0))))
    tell(PlanSeen(replace(sealed, version=6, reason="refused: node id n1 is held")))
    tell(PlanSeen(replace(sealed, version=7, generation=4, world=replace(world, generation=4))))
    tell(Disconnected("reset"))
    print(headline_at(1300))
    tell(PlanSeen(replace(sealed, version=8, phase=Phase.FORMING, generation=5, world=None)))
    print(narrator.headline())
    tell(AgentStarted("other", 1, 2))
    tell(PlanSeen(replace(sealed, version=9, generation=5, world=replace(world, generation=5))))
    print(narrator.headline())
    tell(PlanSeen(replace(sealed, version=10, phase=Phase.FINISHED, generation=5, reason="done")))
    print(narrator.headline())
    narrator.close()

asyncio.run(main())
"""


def ran(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORTS + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)


@pytest.fixture(scope="module")
def told() -> subprocess.CompletedProcess[str]:
    return ran(PROGRAM)


def test_a_world_is_logged_once_and_changes_to_it_as_updates(told: subprocess.CompletedProcess[str]) -> None:
    announced, news, following = [line for line in told.stderr.splitlines() if " generation " in line][:3]
    assert "generation 3: 1 node, 2 workers; ranks 0-1 here" in announced
    assert "generation 3 continues: refused: node id n1 is held" in news
    assert "generation 4: 1 node, 2 workers; ranks 0-1 here" in following


def test_the_headline_describes_the_status_in_one_line(told: subprocess.CompletedProcess[str]) -> None:
    assert told.stdout.splitlines() == [
        "connecting to host0:0",
        "waiting for the store at host0:29400: refused",
        "joining the run",
        "generation 3: 1 node, 2 workers",
        "generation 3: 1 node, 2 workers, step 1200",
        "generation 4: 1 node, 2 workers, step 1300; waiting for the store at host0:29400: reset",
        "forming generation 5",
        "on standby: generation 5 runs with 1 node (maximum 1)",
        "the run finished: done",
    ]


FAILING = """
words = "waiting for 1 more node (at least 2 required); joined: n1 (2 workers)"
status = Waiting(words, lacks_nodes=True, joined=("n1",))

async def read_status():
    asked.set()
    return status

async def main(scene):
    global asked, status
    asked = asyncio.Event()
    configure_logging("console", "info", sys.stderr)
    reporter = ConsoleReporter(lambda: "host0:29400", read_status)
    tell = reporter.on_event
    tell(AgentStarted("me", 1, 2))
    world = World(3, (Seat("n1", "me", "10.0.0.1", 2, 0),), Address("10.0.0.1", 1234), "n1")
    plan = Plan(RECORD_VERSION, 5, Phase.RUNNING, 3, "1 node, 2 workers", Policy(), world=world)
    boom = Failure(FailureKind.WORKER, "worker n1/0 exited with code 1: boom", tail="the traceback")
    after = replace(plan, version=6, phase=Phase.FORMING, generation=4, reason=boom.summary, failure=boom)
    if scene != "joins":
        tell(PlanSeen(plan))
    if scene == "fails":
        tell(WorkersFailed(3, boom))
        tell(PlanSeen(after))
        tell(PlanSeen(replace(after, version=7, phase=Phase.FAILED, reason="so the run failed")))
    elif scene == "continues":
        tell(WorkersFailed(3, boom))
        tell(PlanSeen(after))
        tell(PlanSeen(replace(plan, version=7, generation=4, world=replace(world, generation=4))))
        tell(WorkersFailed(4, boom))
        tell(WorkersFailed(5, replace(boom, tail="another traceback")))
    elif scene == "hangs":
        words = "the workers made no progress for 21 s (--hang-timeout)"
        waits = "worker n1/0 is one all_reduce behind"
        hang = replace(boom, kind=FailureKind.HANG, summary=words, detail=waits, tail="")
        tell(WorkersFailed(3, hang))
        tell(PlanSeen(replace(after, failure=hang, reason=f"{words}; restarting in 1 s")))
        await asked.wait()
    elif scene == "takes long":
        tell(PlanSeen(after))
        await asked.wait()
    elif scene == "leaves":
        tell(DrainRequested(None, "SIGTERM received"))
        tell(PlanSeen(replace(after, reason="n1 is leaving", failure=None)))
    elif scene == "others left":
        tell(PlanSeen(replace(after, reason="n2 is leaving", failure=None)))
        await asked.wait()
    elif scene == "others were lost":
        lost = [Seat(name, name, f"10.0.0.{name[1:]}", 1, 2) for name in ("n2", "n3")]
        last = replace(world, seats=(*world.seats, *lost))
        status = replace(status, joined=("n1", "n3"))
        tell(PlanSeen(replace(after, reason="n2, n3 lost", failure=None, world=last, lost=("n2", "n3"))))
        await asked.wait()
    elif scene == "victim":
        last = replace(world, seats=(*world.seats, Seat("n2", "n2", "10.0.0.2", 1, 2)))
        tell(PlanSeen(replace(after, reason=f"{boom.summary}; n2 lost", world=last, lost=("n2",))))
        tell(PlanSeen(replace(plan, version=7, generation=4, world=replace(world, generation=4))))
    elif scene == "broken connection":
        error = "RuntimeError: Connection closed by peer [10.0.0.2]:4711"
        broken = replace(boom, summary=f"worker n1/0 exited with code 1: {error}", error=error)
        tell(PlanSeen(replace(after, reason=broken.summary, failure=broken, failed_node="n1")))
        await asked.wait()
    elif scene == "is left out":
        tell(AgentStarted("other", 1, 2))
        tell(PlanSeen(plan))
        await asyncio.sleep(5.0)
    elif scene in ("comes back", "was lost", "does not start", "is new"):
        tell(AgentStarted("other", 1, 2))
        reporter.node_id = "n3"
        policy = replace(plan.policy, max_nodes=3)
        changes = {
            "comes back": {"order": ("n1", "n3")},
            "was lost": {"losses": {"n3": 4}},
            "does not start": {"start_failures": {"n3": 2}},
            "is new": {"policy": replace(policy, grow=Growth.NEVER)},
        }
        tell(PlanSeen(replace(plan, **{"policy": policy, **changes[scene]})))
        await asyncio.sleep(5.0)
    elif scene == "joins":
        tell(PlanSeen(replace(after, generation=1, reason="the run starts", failure=None, world=None)))
        await asked.wait()
    await asyncio.sleep(0)
    reporter.close()

for scene in sys.argv[1:]:
    virtual_time.run(main(scene))
    print("end of the scene", file=sys.stderr)
"""


WAITS = r"the workers made no progress for 21 s \(--hang-timeout\)"
FAILED = "worker n1/0 exited with code 1: boom"


LOGGED = {
    "joins": ("common causes: an agent that has not started yet or ended with an error", "lost at"),
    "others left": ("waiting for 1 more node", "common causes|lost at"),
    # The root cause names the worker that the others wait for.
    "hangs": (
        f"error .* {WAITS}(?!:)(?s:.*)forming generation 4: {WAITS}; restarting",
        "one all_reduce behind",
    ),
    "fails": ("the run failed: so the run failed", "forming generation"),
    "continues": (f"forming generation 4: {FAILED}(?s:.*)generation 4: 1 node, 2 workers", "on standby"),
    "takes long": (f"forming generation 4: {FAILED}", "the run failed"),
    "leaves": ("generation 3: 1 node", "forming generation"),
    "victim": ("forming generation 4: workers failed, n2 lost$", "boom"),
    "broken connection": (
        "forming generation 4: n1 lost its connection to another worker; which one is not known yet$",
        "Connection closed",
    ),
    "others were lost": (  # and n3 has come back
        r"waiting for n2 \(10\.0\.0\.2\), lost at \d\d:\d\d:\d\d: start the same command there again",
        r"n3 \(10\.0\.0\.3\)",
    ),
    "is left out": (
        r"on standby: generation 3 .* \(maximum 1\)(?s:.*): n1 \(10\.0\.0\.1\); .*elastic-agent drain NODE",
        "waiting to join",
    ),
    "comes back": (r"waiting to join: generation 3 runs with 1 node \(maximum 3\)", "all its nodes"),
    "was lost": (
        r"this node was lost 4 times in a row: it is admitted when the other nodes have trained for 60 s",
        "all its nodes",
    ),
    "does not start": ("could not be started 2 times in a row", "all its nodes"),
    "is new": (r"a new node joins when the next generation forms \(--grow never\)", "all its nodes"),
}
"""By scene: what is logged, and what is not."""


@functools.cache
def logs_of_scenes() -> dict[str, str]:
    return dict(zip(LOGGED, ran(FAILING, *LOGGED).stderr.split("end of the scene\n"), strict=False))


@pytest.mark.parametrize("name", LOGGED)
def test_of_generations_and_waits_is_logged_what_is_certain_and_helps(name: str) -> None:
    log, (logged, absent) = logs_of_scenes()[name], LOGGED[name]
    assert re.search(logged, log, re.MULTILINE), log
    assert not re.search(absent, log), log


def test_the_output_of_failed_workers_is_left_to_the_root_cause() -> None:
    for name in ("fails", "continues"):
        log = logs_of_scenes()[name]
        assert log.count(FAILED) >= 1
        assert "traceback" not in log


LOSING = """
CONNECTED, FULL = Connected("store", False), Disconnected("etcd is full: compact it", Obstacle.EXPLAINED)
SILENT = Disconnected("no answer within 1.5 s")
REFUSED = Disconnected("connection refused", Obstacle.REFUSED)
DROPPED = Disconnected("no answer within 5 s", Obstacle.NO_ANSWER)
UNREACHABLE = Disconnected("the host is unreachable", Obstacle.UNREACHABLE)
ME = AgentStarted("x", 1, 1)
EXPIRED = "lost the lease of 5 s"
AGAIN = Rejoining("x2", EXPIRED)
NO_ROUTE = Disconnected("no route to the network", Obstacle.OWN_NETWORK)
SEATS = Seat("lab1", "x", "10.0.0.1", 1, 0), Seat("lab2", "y", "10.0.0.2", 1, 1)
PLAN = Plan(
    RECORD_VERSION, 5, Phase.RUNNING, 1, "", Policy(), world=World(1, SEATS, Address("10.0.0.1", 1234), "lab1")
)
SCENES = {
    "full from the start": [FULL],
    "another program": [Unusable("used by another program")],
    "own network": [NO_ROUTE],
    "not started": [REFUSED],
    "down": [DROPPED, 6.0, UNREACHABLE, 6.0, DROPPED, 6.0, UNREACHABLE],
    "full later": [CONNECTED, Registered("y", 1.0), *(FULL, CONNECTED) * 50, FULL, 5.0, CONNECTED, Renewed(2.0)],
    "flips": [CONNECTED, Registered("y", 1.0), *(SILENT, CONNECTED, Renewed(2.0)) * 50],
    "flips for long": [CONNECTED, Registered("y", 1.0), *(SILENT, CONNECTED, Renewed(2.0), 0.5) * 150],
    "flips and is lost": [CONNECTED, Registered("y", 1.0), *(SILENT, CONNECTED, Renewed(2.0)) * 50, SILENT],
    "lost": [CONNECTED, Registered("y", 1.0), PLAN, SILENT],
    "trains": [ME, CONNECTED, Registered("x", 1.0), PLAN, DROPPED, 1.0, LeaseLost(EXPIRED, True), AGAIN, 3.0],
    "trains for a while": [ME, CONNECTED, Registered("x", 1.0), PLAN, DROPPED, 3.0, LeaseLost(EXPIRED, True), AGAIN],
    "waits": [ME, CONNECTED, Registered("x", 1.0), DROPPED, 1.0, LeaseLost(EXPIRED, True), AGAIN, 3.0],
    "trains, full": [ME, CONNECTED, Registered("x", 1.0), PLAN, FULL, 1.0, LeaseLost(EXPIRED, True), AGAIN],
    "is revoked": [ME, CONNECTED, Registered("x", 1.0), PLAN, LeaseLost(EXPIRED), AGAIN],
    "was stopped": [ME, CONNECTED, Registered("x", 1.0), PLAN, DROPPED, LeaseLost(EXPIRED), AGAIN],
    "lost without a network": [CONNECTED, Registered("y", 1.0), PLAN, SILENT, 1.0, NO_ROUTE],
}

def advice(obstacle, had_answered, seats):
    nodes = ", ".join(seat.node_id for seat in seats) or "the host"
    return how_to_reach(obstacle, nodes, 29400, had_answered=had_answered)

async def main(scene):
    configure_logging("console", "info", sys.stderr)
    reporter = ConsoleReporter(lambda: "lab1:29400", lambda: None, advice)
    for step in SCENES[scene]:
        if isinstance(step, float):
            await asyncio.sleep(step)
        else:
            reporter.on_event(PlanSeen(step) if isinstance(step, Plan) else step)
    await asyncio.sleep(5.0)
    reporter.close()

for scene in SCENES:
    virtual_time.run(main(scene))
    print("end of", scene, file=sys.stderr)
"""


@functools.cache
def losses() -> dict[str, str]:
    """What is logged while the store cannot be used, by scene."""
    *logs, _ = re.split(r"end of (.*)\n", ran(LOSING).stderr)
    return dict(zip(logs[1::2], logs[::2], strict=True))


def test_a_lease_that_runs_out_for_want_of_the_store_is_told_in_the_words_of_that() -> None:
    trains = losses()["trains"]
    paused = r"training is paused: the store has not answered since \d\d:\d\d:\d\d, as told above"
    assert len(re.findall(paused, trains)) == 1
    assert losses()["trains for a while"].count("if it is up, open the port") == 1
    for name in ("trains", "trains for a while", "waits"):
        assert not re.search(r"lease\b(?<!--lease)|incarnation", losses()[name])
        assert "switch it on" in losses()[name]
    assert "training" not in losses()["waits"]
    for name in ("trains, full", "is revoked", "was stopped"):
        assert (
            'this node lost its lease; stopping its workers immediately reason="lost the lease'
            in losses()[name]
        )
        assert "rejoining under a new incarnation" in losses()[name]


def test_what_is_in_the_way_of_the_store_decides_what_to_do_and_each_remedy_is_told_once() -> None:
    refused = "start the same command on the host; if it runs there"
    dropped = (
        "if the host is down, switch it on and start the same command there; if it is up, open the port there"
    )
    unreachable = (
        "check that the endpoint is an address of one of the machines that is up and in this network"
    )
    remedies = {
        "not started": {refused},
        "down": {dropped, unreachable},
        "own network": {"if the network of this machine is as it should be, check that the endpoint"},
        "full from the start": set(),
        "another program": set(),
    }
    everything = set().union(*remedies.values())
    for name, expected in remedies.items():
        log = losses()[name]
        assert "waiting for the store at lab1:29400: " in log
        assert {words: log.count(words) for words in everything} == {
            words: int(words in expected) for words in everything
        }


def test_a_store_that_had_answered_is_lost_since_a_time_and_comes_back_by_a_command() -> None:
    log = losses()["lost"]
    assert "lost the connection to the store at lab1:29400" in log
    assert re.search(
        r"the store has not answered since \d\d:\d\d:\d\d: if it has ended there, start .* on lab1, lab2 again",
        log,
    )
    without_network = losses()["lost without a network"]
    assert "waiting for the store at lab1:29400: no route to the network" in without_network
    assert "has not answered since" not in without_network


def test_a_store_that_answers_but_takes_no_records_is_lost_until_it_takes_one() -> None:
    log = losses()["full later"]
    assert log.count("lost the connection") == log.count("answers again") == 1
    assert log.index("waiting for the store at lab1:29400: etcd is full: compact it") < log.index(
        "answers again"
    )
    assert "has not answered" not in log


def test_a_connection_that_breaks_again_and_again_does_not_fill_the_log() -> None:
    for name in ("flips", "flips for long"):
        assert "lost the connection" not in losses()[name]
        assert "answers again" not in losses()[name]
    lost = losses()["flips and is lost"]
    assert lost.count("lost the connection") == 1, "a loss that lasts is reported"
    assert lost.index("lost the connection") < lost.index("start the same command on the host")


DIALLING = """
OBSTACLES = {
    "connection refused": Obstacle.REFUSED,
    "no answer within 5 s": Obstacle.NO_ANSWER,
    "the host name gpunode01 does not resolve on this machine": Obstacle.UNKNOWN_NAME,
}

async def main(reasons):
    configure_logging("auto", "info", sys.stderr)
    reporter = ConsoleReporter(lambda: "gpunode01:29430", lambda: None, lambda *_: "")
    for reason in reasons:
        event = Disconnected(reason, OBSTACLES.get(reason.split(":")[-1].split("(")[0].strip(), Obstacle.OTHER))
        reporter.on_event(event)
        for _ in range(2):
            await asyncio.sleep(3.0)
            reporter.on_event(event)
    reporter.on_event(Connected("store", False))
    reporter.close()

virtual_time.run(main(sys.argv[1:]))
"""
NO_NAME = (
    "the host name gpunode01 does not resolve on this machine (Name or service not known); give an address"
)
REFUSED = "10.0.0.7: connection refused (nothing is listening there yet)"


JOINING = """
async def read_status():
    return Waiting(sys.argv[1])

async def main():
    configure_logging("console", "info", sys.stderr)
    reporter = ConsoleReporter(lambda: "host0:29400", read_status)
    reporter.on_event(PlanSeen(Plan(RECORD_VERSION, 1, Phase.FORMING, 1, "the run starts", Policy())))
    await asyncio.sleep(8.0)
    reporter.close()

virtual_time.run(main())
"""


@pytest.mark.parametrize("width", [2, 20])
def test_on_a_terminal_the_names_of_the_nodes_that_have_joined_are_not_cut(width: int) -> None:
    waits = f"waiting for 1 more node (at least 3 required); joined: {'a' * width}, {'b' * width}"
    shown = on_a_terminal(sys.executable, "-c", IMPORTS + JOINING, waits, cwd=ROOT)
    assert "\x1b[Kwaiting for 1 more node (at least 3 required); joined: a" in shown
    assert shown.count(f"{waits}\r\n") == (width == 20), (
        "as a line that stays, once, if the live one has no room"
    )


def dialling(*reasons: str) -> str:
    """Return what a terminal shows while the store does not answer, for these reasons."""
    return on_a_terminal(sys.executable, "-c", IMPORTS + DIALLING, *reasons, cwd=ROOT)


def test_on_a_terminal_a_lasting_problem_of_the_store_is_logged_once_in_full() -> None:
    output = dialling(NO_NAME, NO_NAME.replace("Name", "No name"), REFUSED, NO_NAME)
    assert output.count(" does not answer: ") == 1
    assert f"the store at gpunode01:29430 does not answer: {NO_NAME}\r\n" in output
    assert "\x1b[Kwaiting for the store at gpunode01:29430: the host name gpunode01 does" in output


def test_on_a_terminal_another_problem_of_the_store_is_logged_too() -> None:
    output = dialling(NO_NAME, "10.0.0.7: no answer within 5 s (a firewall drops packets)")
    assert output.count(" does not answer: ") == 2
    assert "gpunode01:29430 does not answer: 10.0.0.7: no answer within 5 s" in output


def test_a_store_that_has_not_started_yet_is_no_problem() -> None:
    assert "does not answer" not in dialling(REFUSED)


def test_a_problem_is_told_when_it_has_lasted_and_then_once() -> None:
    problem = StoreProblem()
    problem.seen(NO_NAME, Obstacle.OTHER, 100.0)
    assert problem.due(101.0) == ""
    problem.seen(NO_NAME, Obstacle.OTHER, 102.0)
    assert problem.due(102.0) == NO_NAME
    assert problem.due(200.0) == ""
    full = "etcd at host0:2379 is full"
    problem.seen(full, Obstacle.EXPLAINED, 200.0)
    assert problem.due(200.0) == full
    silent = "gpunode01:29430 accepts connections but did not answer within 5 s"
    problem.seen(silent, Obstacle.NO_ANSWER, 201.5)  # which has taken 5 s
    assert problem.due(201.5) == silent
    unknown = "the host name n0 does not resolve on this machine"
    problem.seen(unknown, Obstacle.UNKNOWN_NAME, 202.0)  # which does not pass by itself
    assert problem.due(202.0) == unknown
    problem.over()
    assert problem.due(300.0) == ""
    problem.seen(NO_NAME, Obstacle.OTHER, 300.0)
    assert problem.due(302.0) == NO_NAME


SHARED_TERMINAL = """
words = "b leaves; waiting for the workers of b to save"

async def read_status():
    return Waiting(words)

async def main():
    configure_logging("console", "info", sys.stderr)
    reporter = ConsoleReporter(lambda: "host0:29400", read_status, are_warm=sys.argv[1:] == ["warm"])
    tell = reporter.on_event
    tell(AgentStarted("me", 1, 1))
    world = World(3, (Seat("n1", "me", "10.0.0.1", 1, 0),), Address("10.0.0.1", 1234), "n1")
    plan = Plan(RECORD_VERSION, 5, Phase.RUNNING, 3, "1 node, 1 worker", Policy(), world=world)
    tell(PlanSeen(plan))
    await asyncio.sleep(90.0)
    tell(Spawned(3, {0: 4711}))
    print("STARTED", end="", flush=True)
    await asyncio.sleep(30.0)
    tell(Disconnected("10.0.0.1: connection refused", Obstacle.REFUSED))
    await asyncio.sleep(90.0)
    tell(Connected("store", False))
    tell(Renewed(2.0))
    tell(PlanSeen(replace(plan, version=6, notice=Notice(6, Cause.OPERATOR, 300.0, "b leaves", False))))
    await asyncio.sleep(90.0)
    print("SAVED", flush=True)
    tell(WorkersSaved(3))
    await asyncio.sleep(3.0)
    reporter.close()

virtual_time.run(main())
"""


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_while_workers_use_the_terminal_waits_are_lines_and_afterwards_one_line_that_is_rewritten(
    start: str,
) -> None:
    shown = on_a_terminal(sys.executable, "-c", IMPORTS + SHARED_TERMINAL, start, cwd=ROOT)
    starting, running = shown.split("STARTED")
    running, afterwards = running.split("SAVED\r\n")
    assert "\x1b[K" not in starting + running, (
        "a line that is rewritten would erase what workers have begun to write"
    )
    assert "waiting for the workers of this node to start" in starting
    assert ("still imports torch" in starting) == (start == "warm")
    assert "waiting for the store at host0:29400: 10.0.0.1: connection refused" in running
    assert "b leaves; waiting for the workers of b to save" in running
    assert "\x1b[Kb leaves; waiting for the workers of b to save (" in afterwards
    assert afterwards.endswith("\r\x1b[K"), "nothing of it stays"


FAILING_START = """
async def main():
    configure_logging("console", "info", sys.stderr)
    reporter = ConsoleReporter(lambda: "host0:29400")
    reporter.on_event(AgentStarted("me", 1, 1))
    world = World(3, (Seat("n1", "me", "10.0.0.1", 1, 0),), Address("10.0.0.1", 1234), "n1")
    plan = Plan(RECORD_VERSION, 5, Phase.RUNNING, 3, "1 node, 1 worker", Policy(), world=world)
    reporter.on_event(PlanSeen(plan))
    reporter.on_event(WorkersFailed(3, Failure(FailureKind.WORKER, "cannot start workers")))
    await asyncio.sleep(90.0)
    reporter.close()

virtual_time.run(main())
"""


def test_workers_that_cannot_be_started_are_not_waited_for() -> None:
    shown = on_a_terminal(sys.executable, "-c", IMPORTS + FAILING_START, cwd=ROOT)
    assert "cannot start workers" in shown
    assert "waiting for the workers" not in shown
