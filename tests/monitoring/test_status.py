"""The status of a run: its nodes, its notice and its age."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from elastic_agent.diagnosis.records import (
    Collective,
    GroupProgress,
    NodeReport,
    WorkerReport,
    WorkerState,
)
from elastic_agent.monitoring.run_log import RunLog
from elastic_agent.monitoring.status import (
    GenerationStatus,
    NodeStatus,
    RunStatus,
    of_ended_agent,
    run_status,
)
from elastic_agent.monitoring.status_text import status_text
from elastic_agent.printable import duration
from elastic_agent.protocol import (
    RECORD_VERSION,
    Address,
    Cause,
    Lease,
    Member,
    Notice,
    Phase,
    Plan,
    Policy,
    Seat,
    State,
    Waiting,
    World,
)
from elastic_agent.web.page import run_page

WORLD = World(
    3, (Seat("a", "ia", "10.0.0.1", 1, 0), Seat("b", "ib", "10.0.0.2", 1, 1)), Address("10.0.0.1", 4711), "a"
)
PLAN = Plan(RECORD_VERSION, 7, Phase.RUNNING, 3, "2 nodes, 2 workers", Policy(), world=WORLD)


def member(name: str, state: State) -> Member:
    return Member(RECORD_VERSION, name, f"i{name}", "10.0.0.9", 1, state, 3, Policy())


def gone_node(name: str, role: str, departed_s: float, note: str) -> NodeStatus:
    return NodeStatus(name, role, address="10.0.0.9", workers=1, note=note, departed_s=departed_s)


def shown(plan: Plan, *members: Member, leases: Sequence[Lease] = ()) -> RunStatus:
    records = {"members": {member.incarnation: member for member in members}}
    return status_of(plan, **records, leases={lease.incarnation: lease for lease in leases}, since_s=990.0)


def status_of(plan: Plan | None, **known: Any) -> RunStatus:
    own = {name: known.pop(name) for name in ("since_s", "generations", "problem") if name in known}
    return run_status(RunStatus("r", "host0:29400", 1000.0, **own), plan, **known)


def report(node: str, step: int, written_s: float, waits: float | None = None) -> NodeReport:
    rank = "ab".index(node)
    worker = WorkerReport(0, rank, WorkerState.RUNNING, step=step, waits=waits)
    return NodeReport(node, f"i{node}", 3, written_s, workers=(worker,))


def rows(status: RunStatus) -> dict[str, str]:
    """The state of each node, as the table shows it."""
    lines = status_text(status).split("\n\n")[1].splitlines()
    column = lines[0].index("STATE"), lines[0].index("STEP")
    return {line.split()[0]: line[slice(*column)].strip() for line in lines[1:]}


def test_while_too_few_nodes_have_joined_a_new_run_the_common_causes_are_named() -> None:
    missing = Waiting("waiting for 1 more node (at least 2 required); joined: a (1 worker)", lacks_nodes=True)
    first = replace(PLAN, phase=Phase.FORMING, generation=1, world=None, reason="new run")
    for plan, waiting, is_named in (
        (first, missing, True),
        (None, missing, True),
        (first, Waiting("waiting up to 3 s for more nodes"), False),
        (replace(first, generation=4, world=WORLD), missing, False),  # the network works: a node was lost
        (PLAN, None, False),
    ):
        status = status_of(plan, waiting=waiting)
        assert ("common causes: an agent that has not started yet" in status_text(status)) is is_named


def test_a_status_that_is_not_the_present_one_claims_nothing_of_the_present() -> None:
    reports = [report("a", 60, 1000.0, 0.0), report("b", 60, 1000.0, 0.9)]
    begun = GenerationStatus(3, 990.0, nodes=("a", "b"), workers=2)
    members = {"ia": member("a", State.RUNNING), "ib": member("b", State.RUNNING)}

    def text(plan: Plan, problem: str) -> tuple[RunStatus, str]:
        status = status_of(
            plan,
            members=members,
            reports=reports,
            generations=[begun],
            since_s=990.0,
            problem=problem,
        )
        return status, status_text(status)

    assert "slower than the others" in text(PLAN, "")[1]
    status, lost = text(PLAN, "no answer within 2 s")
    assert status.phase == "unknown"
    assert lost.startswith(
        "run r at host0:29400: state unknown; generation 3 ran with 2 nodes, 2 workers when the run was last heard of\n"
    )
    assert "the store at host0:29400 cannot be read (no answer within 2 s)" in lost
    assert rows(status) == {"a": "unknown", "b": "unknown"}
    assert "running" not in lost
    assert "slower than the others" not in lost
    page = run_page(status, (), shows_all=True).decode()
    assert '<span class="phase unknown">unknown</span>' in page
    assert 'class="dot up"' not in page
    assert '<i class="now"' not in page
    silent = replace(status, silent_since_s=900.0, remedy="start the same command on host0 again")
    assert re.match(
        r"run r at host0:29400: the store at host0:29400 has not answered since [-\d]+ [:\d]+ "
        r"\(no answer within 2 s\)\n"
        "start the same command on host0 again\n"
        "known from before: generation 3 ran with 2 nodes, 2 workers\n",
        status_text(silent),
    )
    assert "0: training is paused on this machine: the" in status_text(replace(silent, is_paused=True))
    forming = text(replace(PLAN, phase=Phase.FORMING, generation=4, world=None), "no answer")[1]
    assert "state unknown; generation 4 was forming when the run was last heard of" in forming
    leaving = replace(PLAN, phase=Phase.FORMING, generation=4, reason="b leaves (SIGINT)", leaving=("ib",))
    assert rows(text(leaving, "")[0])["b"] == "leaving (running)"
    assert rows(text(leaving, "no answer")[0])["b"] == "leaving (unknown)"
    unread = status_of(leaving, problem="no answer")
    assert rows(of_ended_agent(unread)) == {"a": "in the last world", "b": "left 0 s ago: b leaves (SIGINT)"}
    drained = replace(of_ended_agent(unread), node_id="b", left="elastic-agent drain by root")
    where = r"\(elastic-agent drain by root\); for its status, run this command on another node, such as a\n"
    assert re.search(rf"node b of this machine left it at [-\d]+ [:\d]+ {where}", status_text(drained))
    unknown = replace(silent, generation=0, generations=(), nodes=())
    assert "known from before" not in status_text(unknown)
    over, finished = text(replace(PLAN, phase=Phase.FINISHED), "no answer")
    assert (over.phase, "finished 10 s ago" in finished) == ("finished", True)


def test_a_step_has_the_age_of_its_report() -> None:
    reports = [report("a", 60, 1000.0), report("b", 41, 996.5)]
    status = status_of(PLAN, reports=reports)
    a, b = [line for line in status_text(status).splitlines() if line.startswith(("a ", "b "))]
    assert "  60  " in a
    assert "  41 (3.5 s ago)  " in b


LEAVING = replace(PLAN, phase=Phase.FORMING, generation=4, reason="b is leaving", leaving=("ib",))
ENDED = replace(PLAN, phase=Phase.FAILED, reason="b failed")
LOST = "lost (running): did not renew its lease within 5 s"


@pytest.mark.parametrize(
    ("plan", "members", "silent", "expected"),
    [
        (LEAVING, {"a": State.RUNNING, "b": State.LEAVING}, "", ("in the last world (running)", "leaving")),
        (LEAVING, {"a": State.READY, "b": State.LEFT}, "", ("joining (ready)", "left")),
        (LEAVING, {"a": State.READY}, "", ("joining (ready)", "left")),
        (LEAVING, {"a": State.RUNNING, "b": State.LEFT}, "ab", (LOST, "left")),
        (ENDED, {"a": State.LEFT}, "ab", ("ended", "ended")),
        (ENDED, {"a": State.LEFT, "b": State.RUNNING}, "b", ("ended", LOST)),
    ],
    ids=[
        "leaves",
        "has left",
        "has no record",
        "others are lost",
        "the run ended",
        "was lost before the end",
    ],
)
def test_the_table_tells_who_has_left_or_was_lost_and_who_takes_part(
    plan: Plan, members: dict[str, State], silent: str, expected: tuple[str, str]
) -> None:
    leases = [Lease(f"i{name}", 5.0).revoke("did not renew its lease within 5 s") for name in silent]
    status = shown(plan, *(member(name, state) for name, state in members.items()), leases=leases)
    assert rows(status) == dict(zip("ab", expected, strict=True))
    if expected == ("ended", "ended"):
        assert [(node.role, node.state, node.note) for node in status.nodes] == [("ended", "", "")] * 2


def test_a_node_that_is_gone_keeps_its_row_until_it_comes_back() -> None:
    gone = [
        gone_node("b", "lost", 930.0, "did not renew its lease"),
        gone_node("c", "left", 995.0, "c is leaving"),
    ]
    alone = World(3, (Seat("a", "ia", "10.0.0.1", 1, 0),), Address("10.0.0.1", 4711), "a")
    plan = replace(PLAN, world=alone)

    def status(*members: Member) -> RunStatus:
        return status_of(
            plan,
            members={member.incarnation: member for member in members},
            leases={member.incarnation: Lease(member.incarnation, 5.0) for member in members},
            departures=gone,
        )

    a, b = member("a", State.RUNNING), member("b", State.READY)
    assert rows(status(a)) == {
        "a": "running",
        "b": "lost 1 min 10 s ago: did not renew its lease",
        "c": "left 5 s ago: c is leaving",
    }
    assert rows(status(a, b))["b"] == "standing by (ready)", "it has come back"
    assert "running, 1 node, 1 worker" in status_text(status(a))


def test_a_generation_whose_end_was_not_recorded_neither_runs_nor_lasted_any_time() -> None:
    log = RunLog("a")
    log.recall([GenerationStatus(2, 900.0, nodes=("a", "b"), workers=2)])
    log.see(PLAN, 990.0, "ia")
    status = status_of(PLAN, generations=log.generations)
    earlier, present = status_text(status).split("generations:\n")[1].splitlines()[1:3]
    assert re.match(r"2  \S+ \S+  -        2 nodes, 2 workers  not recorded \(", earlier)
    assert re.match(r"3  \S+ \S+  running  2 nodes, 2 workers  -$", present)
    page = run_page(status, (), shows_all=True).decode()
    assert [mark for mark in ("past", "now") for _ in range(page.count(f'<i class="{mark}"'))] == [
        "past",
        "now",
    ]
    assert "width:0.0%" in page


def test_the_generation_of_a_run_that_has_ended_is_the_last_one_that_ran() -> None:
    past = GenerationStatus(3, 900.0, 980.0, ("a", "b"), 2, "b failed")

    def generation(phase: Phase, *known: GenerationStatus) -> int:
        plan = replace(PLAN, phase=phase, generation=4)
        return status_of(plan, generations=known).generation

    assert generation(Phase.FAILED, past) == 3
    assert generation(Phase.FORMING, past) == 4
    assert generation(Phase.FAILED) == 4, "a server that was started later knows no other"


def stalled(node: str, rank: int, called: int, written_s: float, stalled_s: float | None) -> NodeReport:
    last = Collective(called, "all_reduce", 1000, "train.py:88")
    groups = (GroupProgress("0", called, -1, called - (called > 6), last, recent=(last,)),)
    worker = WorkerReport(
        0, rank, WorkerState.RUNNING, progress=groups, stack="train.py:88 in main", waits=0.9 - 0.8 * rank
    )
    return NodeReport(node, f"i{node}", 3, written_s, workers=(worker,), stalled_s=stalled_s)


def test_while_workers_wait_for_each_other_the_status_names_the_one_that_is_the_cause() -> None:
    def status(*reports: NodeReport) -> RunStatus:
        return status_of(PLAN, reports=reports)

    hanging = status(stalled("a", 0, 7, 990.0, 8.0), stalled("b", 1, 6, 980.0, 8.0))
    assert (
        "no worker has made progress for 18 s: worker b/0 (rank 1) is one all_reduce behind: 1 kB, sequence "
        "number 7, called by rank 0 at train.py:88\n"
    ) in status_text(hanging)
    assert hanging.standstill is not None
    assert hanging.stragglers == (), "a worker that hangs is not said to be slow"
    assert "    train.py:88 in main" in hanging.standstill.stacks
    training = status(stalled("a", 0, 7, 990.0, 8.0), stalled("b", 1, 6, 980.0, None))
    assert training.standstill is None
    assert len(training.stragglers) == 1


@pytest.mark.parametrize("phase", [Phase.FINISHED, Phase.FAILED, Phase.STOPPED])
def test_a_run_that_has_ended_has_no_notice_and_its_nodes_have_ended(phase: Phase) -> None:
    notice = Notice(1, Cause.OPERATOR, 60.0, "elastic-agent stop by root")
    assert shown(replace(PLAN, notice=notice), member("a", State.RUNNING)).notice
    status = shown(replace(PLAN, phase=phase, notice=notice), member("a", State.READY))
    assert status.notice == ""
    assert rows(status) == {"a": "ended", "b": "ended"}
    resumes = "to resume the run, start it again with the same command and --rdzv-id r, on every node"
    assert (resumes in status_text(status)) == (phase is Phase.STOPPED)


def test_the_age_of_a_saved_status_is_that_of_now_only_if_the_run_had_ended() -> None:
    node = NodeStatus("a", "ended", seen_s=1050.0)
    past = GenerationStatus(1, 900.0, 990.0, ("a",), 1, "done")
    ended = RunStatus(
        "r", "host0:29400", 1000.0, "finished", 1, 990.0, "done", nodes=(node,), generations=(past,)
    )
    text = status_text(ended, 4650.0)
    assert text.startswith("run r at host0:29400: finished 1 h 1 min ago: done\n")
    assert "1 h ago" in text
    running = replace(ended, phase="running")
    assert "generation 1 running for 10 s," in status_text(running, 4650.0)


def test_the_age_of_a_departure_in_a_saved_status_is_that_of_now() -> None:
    gone = replace(gone_node("b", "left", 990.0, "b is leaving"), seen_s=980.0)
    saved = RunStatus("r", "host0:29400", 1000.0, "unknown", 1, nodes=(gone,), left="drained", node_id="b")
    (row,) = [line for line in status_text(saved, 4650.0).splitlines() if line.startswith("b ")]
    assert "left 1 h 1 min ago: b is leaving" in row
    assert row.endswith("20 s ago"), "what it reported then"


def test_durations_have_no_more_digits_than_they_are_worth() -> None:
    assert [duration(length_s) for length_s in (0.0013, 0.0123, 0.5, 2.864, 12.34, 59.9, 3661.0)] == [
        "0 s", "0.01 s", "0.5 s", "2.86 s", "12.3 s", "59.9 s", "1 h 1 min"
    ]  # fmt: skip


def test_a_time_that_no_calendar_has_is_shown_as_unknown() -> None:
    past = GenerationStatus(1, 1e300, 1e300, ("n0",), 1, "finished")
    assert "?" in status_text(RunStatus("mnist", "host0:29400", 100.0, phase="finished", generations=(past,)))


@pytest.mark.parametrize("departed", [False, True], ids=["here", "departed"])
@pytest.mark.parametrize(
    ("phase", "state", "leaving", "here", "departed_row"),
    [
        (Phase.FORMING, State.READY, (), "joining (ready)", "joining (ready)"),
        (Phase.RUNNING, State.READY, (), "standing by (ready)", "standing by (ready)"),
        (Phase.FINISHED, State.READY, (), "ended", "ended"),
        (Phase.FORMING, State.RUNNING, (), "in the last world (running)", None),
        (Phase.RUNNING, State.RUNNING, (), "in the last world (running)", None),
        (Phase.FORMING, State.RUNNING, ("ic",), "leaving (running)", None),
        (Phase.RUNNING, State.FAILED, (), "in the last world (failed)", None),
        (Phase.RUNNING, State.LEAVING, (), "leaving", None),
        (Phase.FINISHED, State.RUNNING, (), "ended", None),
        (Phase.FORMING, State.LEFT, (), None, None),
        (Phase.RUNNING, State.LEFT, (), None, None),
    ],
)
def test_only_a_node_that_is_ready_joins(
    phase: Phase,
    state: State,
    leaving: tuple[str, ...],
    here: str | None,
    departed_row: str | None,
    departed: bool,
) -> None:
    """The record of a node outside the world; one that has left may not have been able to say so in it."""
    drained = [gone_node("c", "left", 995.0, "c is drained")]
    status = status_of(
        replace(PLAN, phase=phase, leaving=leaving),
        members={"ic": member("c", state)},
        leases={"ic": Lease("ic", 5.0)},
        departures=drained if departed else (),
    )
    gone = "left 5 s ago: c is drained" if departed else None
    assert rows(status).get("c") == ((departed_row or gone) if departed else here)
