"""The log lines for the person at the terminal."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from elastic_agent.agent.events import (
    AgentStarted,
    DrainRequested,
    Event,
    Rejoining,
    WorkersFailed,
    WorkersSaved,
)
from elastic_agent.agent.reporting.console import ConsoleReporter
from elastic_agent.protocol import Failure, FailureKind, Growth, Phase, Plan, Policy, Seat, Waiting
from elastic_agent.protocol.records import RECORD_VERSION, Address, Budget, Cause, Notice, World
from elastic_agent.rendezvous.events import (
    Connected,
    Disconnected,
    LeaseLost,
    PlanSeen,
    Registered,
    Renewed,
)
from elastic_agent.transport import Obstacle, how_to_reach
from elastic_agent.workers.guard.client import Spawned
from tests import virtual_time

Step = Event | Plan | float
"""An event, the plan that is seen, or a pause."""

ME = AgentStarted("me", 1, 2)
SEATS = (
    Seat("n1", "me", "10.0.0.1", 2, 0),
    Seat("n2", "n2", "10.0.0.2", 1, 2),
    Seat("n3", "n3", "10.0.0.3", 1, 3),
)


def world(generation: int = 3, nodes: int = 1) -> World:
    return World(generation, SEATS[:nodes], Address("10.0.0.1", 1234), "n1")


def running(generation: int = 3, **changes: Any) -> Plan:
    plan = Plan(
        RECORD_VERSION, 5, Phase.RUNNING, generation, "1 node, 2 workers", Policy(), world(generation)
    )
    return replace(plan, **changes)


def forming(generation: int = 4, reason: str = "n2 is leaving", **changes: Any) -> Plan:
    before = replace(running(generation - 1), generation=generation, phase=Phase.FORMING, reason=reason)
    return replace(before, **changes)


def advice(obstacle: Obstacle, had_answered: bool, seats: Sequence[Seat]) -> str:
    nodes = ", ".join(seat.node_id for seat in seats) or "the host"
    return how_to_reach(obstacle, nodes, 29400, had_answered=had_answered)


def logged(
    *steps: Step, node_id: str = "n1", waiting: Waiting | Exception | None = None, are_warm: bool = False
) -> str:
    """Return what is logged, with levels and fields, while these things happen and for 5 s afterwards."""

    async def status() -> Waiting:
        if isinstance(waiting, Exception):
            raise waiting
        return waiting or Waiting()

    async def play() -> None:
        reporter = ConsoleReporter(lambda: "lab1:29400", status, advice, are_warm)
        reporter.node_id = node_id
        for step in (*steps, 5.0):
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                reporter.on_event(PlanSeen(step) if isinstance(step, Plan) else step)
        reporter.close()

    with structlog.testing.capture_logs() as lines:
        virtual_time.run(play())
    return "".join(
        f"{line.pop('log_level')} {line.pop('event')} "
        f"{' '.join(f'{name}={value}' for name, value in line.items())}\n"
        for line in lines
    )


def test_a_world_is_logged_once_and_changes_to_it_as_updates() -> None:
    log = logged(
        ME,
        running(),
        running(version=6, budget=Budget(progress_s=60.0)),
        running(version=6, reason="refused: node id n1 is held"),
        running(4, version=7),
    )
    announced, news, following = [line for line in log.splitlines() if " generation " in line]
    assert "generation 3: 1 node, 2 workers; ranks 0-1 here" in announced
    assert "generation 3 continues: refused: node id n1 is held" in news
    assert "generation 4: 1 node, 2 workers; ranks 0-1 here" in following


def test_the_headline_describes_the_status_in_one_line() -> None:
    async def play() -> list[str]:
        endpoint, lines = "host0:0", list[str]()
        reporter = ConsoleReporter(lambda: endpoint)
        for step, newest in (
            (ME, 0),
            (Disconnected("refused"), 0),
            (Connected("store", False), 0),
            (running(), 1200),
            (running(4, version=7), 0),
            (Disconnected("reset"), 1300),
            (forming(5, version=8, world=None), 0),
            (AgentStarted("other", 1, 2), 0),
            (running(5, version=9), 0),
            (running(5, version=10, phase=Phase.FINISHED, reason="done"), 0),
        ):
            reporter.on_event(PlanSeen(step) if isinstance(step, Plan) else step)
            reporter.newest_step = functools.partial(int, newest)
            lines.append(reporter.headline())
            endpoint = "host0:29400"  # the port is known when the store is hosted
        reporter.close()
        return lines

    assert virtual_time.run(play()) == [
        "connecting to host0:0",
        "waiting for the store at host0:29400: refused",
        "joining the run",
        "generation 3: 1 node, 2 workers, step 1200",
        "generation 4: 1 node, 2 workers",
        "generation 4: 1 node, 2 workers, step 1300; waiting for the store at host0:29400: reset",
        "forming generation 5",
        "forming generation 5",
        "on standby: generation 5 runs with 1 node (maximum 1)",
        "the run finished: done",
    ]


BOOM = Failure(
    FailureKind.WORKER,
    "worker n1/0 exited with code 1: boom",
    "traceback",
    slot=0,
    returncode=1,
    error="boom",
)
STALLED = "the workers made no progress for 21 s (--hang-timeout)"
HANG = Failure(FailureKind.HANG, STALLED, detail="worker n1/0 is one all_reduce behind")
FAILED = forming(reason=BOOM.summary, failure=BOOM)
MISSING = Waiting(
    "waiting for 1 more node (at least 2 required); joined: n1 (2 workers)",
    lacks_nodes=True,
    joined=("n1", "n3"),
)
OTHER = AgentStarted("other", 1, 2)


def outside(**changes: Any) -> list[Step]:
    """Return what a node sees that has no place in a world with room."""
    return [OTHER, running(**{"policy": Policy(max_nodes=3), **changes})]


SCENES: dict[str, tuple[list[Step], str, str]] = {
    "joins": (
        [ME, forming(1, "the run starts", world=None)],
        "common causes: an agent that has not started yet or ended with an error",
        "lost at",
    ),
    "others left": ([ME, running(), forming()], "waiting for 1 more node", "common causes|lost at"),
    "hangs": (  # the root cause names the worker that the others wait for
        [
            ME,
            running(),
            WorkersFailed(3, HANG),
            forming(reason=f"{STALLED}; restarting in 1 s", failure=HANG),
        ],
        rf"error {re.escape(STALLED)} (?s:.*)forming generation 4: {re.escape(STALLED)}; restarting",
        "one all_reduce behind",
    ),
    "fails": (
        [
            *(ME, running(), WorkersFailed(3, BOOM), replace(FAILED, policy=Policy(max_restarts=0))),
            replace(FAILED, version=7, phase=Phase.FAILED, reason="so the run failed"),
        ],
        "the run failed: so the run failed",
        "forming generation|boom|traceback",
    ),
    "continues": (  # the report on the root cause shows the error, once
        [ME, running(), WorkersFailed(3, BOOM), FAILED, running(4, version=7)],
        "worker n1/0 exited with code 1 (?s:.*)forming generation 4: workers failed(?s:.*)generation 4: 1 node",
        "on standby|boom|traceback",
    ),
    "is killed": (
        [ME, running(), forming(reason="worker n2/0 was killed by SIGKILL", failure=replace(BOOM, error=""))],
        "forming generation 4: worker n2/0 was killed by SIGKILL",
        "workers failed",
    ),
    "cannot be started": (
        [ME, running(), WorkersFailed(3, Failure(FailureKind.WORKER, "cannot start workers")), 90.0],
        "cannot start workers",
        "waiting for the workers",
    ),
    "leaves": (
        [ME, running(), DrainRequested(None, "SIGTERM"), forming()],
        "generation 3: 1 node",
        "forming",
    ),
    "victim": (
        [ME, running(), replace(FAILED, reason=f"{BOOM.summary}; n2 lost", world=world(3, 2), lost=("n2",))],
        "forming generation 4: workers failed, n2 lost $",
        "boom",
    ),
    "others were lost": (  # and n3 has come back
        [ME, running(), forming(reason="n2, n3 lost", world=world(3, 3), lost=("n2", "n3"))],
        r"waiting for n2 \(10\.0\.0\.2\), lost at \d\d:\d\d:\d\d: start the same command there again",
        r"n3 \(10\.0\.0\.3\)",
    ),
    "is left out": (
        [OTHER, running()],
        r"on standby: generation 3 .* \(maximum 1\)(?s:.*): n1 \(10\.0\.0\.1\); .*elastic-agent drain NODE",
        "waiting to join",
    ),
    "comes back": (
        outside(order=("n1", "n3")),
        r"waiting to join: generation 3 runs with 1 node \(maximum 3\)",
        "all its nodes",
    ),
    "was lost": (
        outside(losses={"n3": 4}),
        r"this node was lost 4 times in a row: it is admitted when the other nodes have trained for 60 s",
        "all its nodes",
    ),
    "starts late": (
        outside(losses={"n3": 2}, start_failures={"n3": 2}),
        r"this node did not start its workers in time 2 times in a row: it is admitted when the other nodes have",
        "was lost",
    ),
    "does not start": (
        outside(start_failures={"n3": 2}),
        "could not be started 2 times in a row",
        "all its nodes",
    ),
    "is new": (
        outside(policy=Policy(max_nodes=3, grow=Growth.NEVER)),
        r"a new node joins when the next generation forms \(--grow never\)",
        "all its nodes",
    ),
}
"""Events, a pattern of what is then logged, and a pattern of what is not."""


@pytest.mark.parametrize(("steps", "told", "absent"), SCENES.values(), ids=SCENES)
def test_of_generations_and_waits_is_logged_what_is_certain_and_helps(
    steps: list[Step], told: str, absent: str
) -> None:
    log = logged(*steps, node_id="n1" if ME in steps else "n3", waiting=MISSING)
    assert re.search(told, log, re.MULTILINE), log
    assert not re.search(absent, log), log


def test_an_error_in_the_background_is_logged_and_disturbs_nothing_else() -> None:
    log = logged(ME, forming(1, "the run starts", world=None), 3.0, running(), waiting=RuntimeError("a bug"))
    assert re.search(r"error internal error in the background.* exc_info=a bug\n", log), log
    assert "generation 3: 1 node, 2 workers" in log


FULL = Disconnected("etcd is full: compact it", Obstacle.EXPLAINED)
SILENT = Disconnected("no answer within 1.5 s")
REFUSING = Disconnected("connection refused", Obstacle.REFUSED)
DROPPED = Disconnected("no answer within 5 s", Obstacle.NO_ANSWER)
UNREACHABLE = Disconnected("the host is unreachable", Obstacle.UNREACHABLE)
NO_ROUTE = Disconnected("no route to the network", Obstacle.OWN_NETWORK)
ANSWERS = Connected("store", False)
JOINED: list[Step] = [ME, ANSWERS, Registered("me", 1.0)]
TRAINS: list[Step] = [*JOINED, running(1, world=world(1, 2))]
EXPIRED = "lost the lease of 5 s"
LOST: list[Step] = [LeaseLost(EXPIRED, True), Rejoining("x2", EXPIRED)]


def test_a_lease_that_runs_out_for_want_of_the_store_is_told_in_the_words_of_that() -> None:
    trains = logged(*TRAINS, DROPPED, 1.0, *LOST, 3.0)
    paused = r"training is paused: the store has not answered since \d\d:\d\d:\d\d, as told above"
    assert len(re.findall(paused, trains)) == 1
    for_a_while = logged(*TRAINS, DROPPED, 3.0, *LOST)
    assert for_a_while.count("if it is up, open the port") == 1
    waits = logged(*JOINED, DROPPED, 1.0, *LOST, 3.0)
    for log in (trains, for_a_while, waits):
        assert not re.search(r"lease\b(?<!--lease)|incarnation", log)
        assert "switch it on" in log
    assert "training" not in waits


@pytest.mark.parametrize(
    "steps",
    [[FULL, 1.0, *LOST], [LeaseLost(EXPIRED), LOST[1]], [DROPPED, LeaseLost(EXPIRED), LOST[1]]],
    ids=["the store is full", "it was revoked", "it was stopped"],
)
def test_a_lease_that_is_lost_otherwise_is_told_as_that(steps: list[Step]) -> None:
    log = logged(*TRAINS, *steps)
    assert f"this node lost its lease; stopping its workers immediately reason={EXPIRED}" in log
    assert "rejoining under a new incarnation" in log


REMEDIES = {
    "refused": "start the same command on the host; if it runs there",
    "dropped": "if the host is down, switch it on and start the same command there; if it is up, open the port there",
    "unreachable": "check that the endpoint is an address of one of the machines that is up and in this network",
    "network": "if the network of this machine is as it should be, check that the endpoint",
}


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([REFUSING], {"refused"}),
        ([DROPPED, 6.0, UNREACHABLE, 6.0, DROPPED, 6.0, UNREACHABLE], {"dropped", "unreachable"}),
        ([NO_ROUTE], {"network"}),
        ([FULL], set()),
        ([Disconnected("used by another program", Obstacle.EXPLAINED)], set()),
    ],
    ids=["not started", "down", "own network", "full", "another program"],
)
def test_what_is_in_the_way_of_the_store_decides_what_to_do_and_each_remedy_is_told_once(
    steps: list[Step], told: set[str]
) -> None:
    log = logged(*steps)
    assert "waiting for the store at lab1:29400: " in log
    assert {name: log.count(words) for name, words in REMEDIES.items()} == {
        name: int(name in told) for name in REMEDIES
    }


def test_a_store_that_had_answered_is_lost_since_a_time_and_comes_back_by_a_command() -> None:
    log = logged(*TRAINS, SILENT)
    assert "lost the connection to the store at lab1:29400" in log
    again = (
        r"the store has not answered since \d\d:\d\d:\d\d: if it has ended there, start .* on n1, n2 again"
    )
    assert re.search(again, log)
    without_network = logged(*TRAINS, SILENT, 1.0, NO_ROUTE)
    assert "waiting for the store at lab1:29400: no route to the network" in without_network
    assert "has not answered since" not in without_network


def test_a_store_that_answers_but_takes_no_records_is_lost_until_it_takes_one() -> None:
    log = logged(*JOINED, *(FULL, ANSWERS) * 50, FULL, 5.0, ANSWERS, Renewed(2.0))
    assert log.count("lost the connection") == log.count("answers again") == 1
    waits = "waiting for the store at lab1:29400: etcd is full: compact it"
    assert log.index(waits) < log.index("answers again")
    assert "has not answered" not in log


def test_a_connection_that_breaks_again_and_again_does_not_fill_the_log() -> None:
    flips: list[Step] = [SILENT, ANSWERS, Renewed(2.0)]
    for steps in (flips * 50, [*flips, 0.5] * 150):
        log = logged(*JOINED, *steps)
        assert "lost the connection" not in log
        assert "answers again" not in log
    lost = logged(*JOINED, *flips * 50, SILENT)
    assert lost.count("lost the connection") == 1, "a loss that lasts is reported"
    assert lost.index("lost the connection") < lost.index("start the same command on the host")


@pytest.mark.parametrize("are_warm", [True, False], ids=["warm", "cold"])
def test_while_workers_start_run_and_save_what_they_wait_for_is_logged(are_warm: bool) -> None:
    words = "b leaves; waiting for the workers of b to save and exit"
    notice = Notice(6, Cause.OPERATOR, 300.0, "b leaves", False)
    log = logged(
        *(ME, running(), 90.0, Spawned(3, {0: 4711}), 30.0),
        *(REFUSING, 90.0, ANSWERS, Renewed(2.0)),
        *(running(version=6, notice=notice), 90.0, WorkersSaved(3)),
        waiting=Waiting(words),
        are_warm=are_warm,
    )
    start = "waiting for the workers of this node to start"
    store = "waiting for the store at lab1:29400: connection refused"
    assert log.index(start) < log.index(store) < log.index(words)
    assert ("still imports torch" in log) == are_warm
