"""Finds what test connections, folders, versions and all-reduces of several machines mean."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from elastic_agent.agent.preflight import Finding
from elastic_agent.config.settings import Settings
from elastic_agent.config.value_types import NodeRange
from elastic_agent.diagnosis.differences import ARGUMENTS, POLICY_OPTIONS, VARIABLE, policy_facts
from elastic_agent.doctor import connections, interpreter
from elastic_agent.doctor.connections import (
    ANY,
    RANGED,
    Connection,
    EchoServer,
    Place,
    Problem,
    closed_ports,
    connect_to_all,
    connection_findings,
    targets,
)
from elastic_agent.doctor.folders import SharedFolders, path_findings
from elastic_agent.doctor.interpreter import reduce
from elastic_agent.doctor.probe import possible_backends
from elastic_agent.doctor.records import Arrived, Ended, Gathered, Local, Reduced, Surroundings
from elastic_agent.doctor.report import Report, as_json, as_text
from elastic_agent.doctor.together import SETTLE_S, doctor_settings, make_report, report_failed_join
from elastic_agent.exit_codes import ExitCode
from elastic_agent.protocol import Policy
from elastic_agent.values import PortRange
from tests.ports import free_port
from tests.transport.support import torchs_server
from tests.waiting import GUARD_S


@pytest.fixture(autouse=True)
def _machines_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no limit of time decide here."""
    monkeypatch.setattr(interpreter, "START_S", GUARD_S)
    monkeypatch.setitem(interpreter.REDUCE_S, "gloo", GUARD_S)
    for limit in ("CONNECT_S", "ANSWER_S"):
        monkeypatch.setattr(connections, limit, GUARD_S)


def arrived(
    name: str, *, least: int = 1, most: int = 2, findings: tuple[Finding, ...] = (), **facts: str
) -> Arrived:
    """Return a machine at 10.0.0.1 with these facts, and nothing else of interest."""
    local = Local(name, least, most, 0, True, {ARGUMENTS: "", **facts}, findings)
    return Arrived(local, Place("10.0.0.1", {ANY: 4000}), "eth0", "token")


def gathered(*machines: Arrived, reduced: Mapping[str, Reduced] | None = None) -> Gathered:
    """Return what these machines exchange if they find nothing together."""
    ranks = range(len(machines))
    return Gathered(
        len(machines),
        dict(enumerate(machines)),
        {rank: Surroundings((), ()) for rank in ranks},
        {rank: Ended((), dict(reduced or {})) for rank in ranks},
    )


def report(*machines: Arrived) -> Report:
    return make_report(gathered(*machines), 60.0)


# -- who takes part -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("least", "is_error", "code"),
    [(3, True, ExitCode.TOO_FEW_NODES), (2, False, ExitCode.FINISHED)],
    ids=["too few", "fewer than the most"],
)
def test_missing_machines_are_an_error_where_the_run_needs_them(
    least: int, is_error: bool, code: int
) -> None:
    found = report(arrived("a"), arrived("b", least=least, most=3))
    (missing,) = found.findings
    assert (missing.check, missing.is_error, found.exit_code) == ("missing-machines", is_error, code)
    assert missing.cause == "1 of 3 machines did not come within 60 s; here: a, b"


@pytest.mark.parametrize(("least", "code"), [(1, ExitCode.FINISHED), (2, ExitCode.TOO_FEW_NODES)])
def test_where_no_other_machine_comes_this_is_as_if_they_were_missing(least: int, code: int) -> None:
    found = report_failed_join(
        arrived("a", least=least, most=3).local, ExitCode.TOO_FEW_NODES, "too few", 60.0
    )
    (missing,) = found.findings
    assert (missing.check, missing.is_error, found.exit_code) == ("missing-machines", least > 1, code)
    assert missing.cause == "2 of 3 machines did not come within 60 s; here: a"


def test_a_machine_that_falls_silent_is_named() -> None:
    records = gathered(arrived("a"), arrived("b"))
    del records.tested[1]
    (silent,) = make_report(records, 60.0).findings
    assert (silent.check, silent.machine) == ("silent-machines", "b")


@pytest.mark.parametrize(
    ("nnodes", "wait_s", "least", "settle_s"),
    [
        (NodeRange(4, 4), 60.0, 1, 60.0),
        (NodeRange(1, 4), 60.0, 2, SETTLE_S),
        (NodeRange(3, 4), 5.0, 2, 5.0),
    ],
)
def test_a_run_that_may_be_smaller_does_not_wait_for_all_machines(
    nnodes: NodeRange, wait_s: float, least: int, settle_s: float, tmp_path: Path
) -> None:
    made = doctor_settings(Settings(nnodes=nnodes), wait_s, tmp_path)
    assert (made.nnodes, made.settle, made.join_timeout) == (NodeRange(least, 4), settle_s, wait_s)


def test_the_run_of_the_doctor_leaves_no_trace_and_requeues_no_job(tmp_path: Path) -> None:
    given = Settings(
        nnodes=NodeRange(2, 2),
        state_dir=tmp_path / "of-the-user",
        requeue="auto",
        log_level="info",
        node_id="n1",
    )
    made = doctor_settings(given, 60.0, tmp_path / "own")
    assert made.state_dir.parent == made.log_dir.parent == tmp_path / "own"
    assert (made.requeue, made.log_level, made.node_id) == ("never", "warning", "n1")


# -- connections ----------------------------------------------------------------------------------


def test_connections_between_machines_work_on_an_ephemeral_port_and_on_the_port_range() -> None:
    low = free_port()

    async def connect() -> list[Connection]:
        server = EchoServer()
        place = await server.listen("127.0.0.1", PortRange(low, low))
        try:
            return await connect_to_all({1: place})
        finally:
            server.close()

    made = asyncio.run(connect())
    assert [(test.problem, test.port) for test in made] == [(None, ANY), (None, RANGED)]


def test_a_program_that_is_no_doctor_is_recognised() -> None:
    async def connect() -> list[Connection]:
        other = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        places = {1: Place("127.0.0.1", {ANY: int(other.sockets[0].getsockname()[1])})}
        answered = await connect_to_all(places)
        other.close()
        return answered + await connect_to_all(places)

    problems = [test.problem for test in asyncio.run(connect())]
    assert problems == [Problem.NO_ANSWER, Problem.REJECTED]


def test_in_large_runs_every_machine_has_a_few_connections() -> None:
    found = [targets(rank, 40) for rank in range(40)]
    assert all(8 <= len(each) <= 9 for each in found)
    assert all(after in found[before] for before, after in pairwise(range(40)))


BLOCKED = (
    "TCP from any other machine to b (10.0.0.2) on an ephemeral port is not answered: a firewall drops the"
)


@pytest.mark.parametrize(
    ("problems", "machine", "cause"),
    [
        (dict.fromkeys(("ab", "cb"), Problem.DROPPED), "b", BLOCKED),
        (
            {"ac": Problem.REJECTED},
            *("a", "TCP from a to c (10.0.0.3) on an ephemeral port is refused, although"),
        ),
    ],
    ids=["a firewall on one machine", "between two machines"],
)
def test_connections_that_fail_for_one_reason_are_one_finding(
    problems: dict[str, Problem], machine: str, cause: str
) -> None:
    names, addresses = dict(enumerate("abc")), {rank: f"10.0.0.{rank + 1}" for rank in range(3)}
    made = {
        rank: [
            Connection(to, problem=problems.get(name + other)) for to, other in names.items() if to != rank
        ]
        for rank, name in names.items()
    }
    (finding,) = connection_findings(names, addresses, made)
    assert finding.machine == machine
    assert finding.cause.startswith(cause)


def test_a_port_at_which_etcd_is_just_starting_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    place = ("127.0.0.1", port)

    async def connect() -> tuple[str, ...]:
        testing = asyncio.create_task(closed_ports([place]))
        await asyncio.sleep(0)
        etcd = await asyncio.start_server(lambda _, writer: writer.close(), *place)
        closed = await testing
        etcd.close()
        return closed

    assert asyncio.run(connect()) == ()
    monkeypatch.setattr(connections, "CONNECT_S", 0.0)
    assert asyncio.run(closed_ports([place])) == (f"127.0.0.1:{port}",)


def test_a_port_of_etcd_is_reported_with_the_machine_that_cannot_reach_it() -> None:
    records = gathered(arrived("a"), arrived("b"))
    records.tested[1] = Surroundings((), (), ("10.0.0.1:29401",))
    (closed,) = make_report(records, 60.0).findings
    assert (closed.check, closed.machine) == ("etcd-port", "b")


# -- all-reduces ----------------------------------------------------------------------------------


def test_the_interpreters_of_the_script_perform_an_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    server = torchs_server()
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert asyncio.run(reduce(sys.executable, "gloo")).problem == ""


def test_an_all_reduce_that_a_process_does_not_survive_names_what_it_said_last(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'Fatal: no memory' >&2\nexit 1\n")
    program.chmod(0o755)
    ended = asyncio.run(reduce(str(program), "gloo"))
    assert ended.problem == "'its process' failed with exit code 1: Fatal: no memory"
    records = gathered(arrived("a"), arrived("b"), reduced={"gloo": ended})
    found = make_report(records, 60.0)
    assert [(finding.check, finding.machine) for finding in found.findings] == [
        ("gloo-all-reduce", "a"),
        ("gloo-all-reduce", "b"),
    ]


def test_no_all_reduce_is_tried_where_it_would_only_wait() -> None:
    pair = [arrived("a"), arrived("b")]
    assert possible_backends(2, pair, []) == ["gloo"]
    blocked = Surroundings((Connection(1, problem=Problem.DROPPED),), ())
    assert possible_backends(2, pair, [blocked]) == []
    wrong = Finding(True, "gloo-interface", "cause", "remedy")
    assert possible_backends(2, [arrived("a"), arrived("b", findings=(wrong,))], []) == []
    assert possible_backends(3, pair, []) == []


# -- differences ----------------------------------------------------------------------------------


def test_the_machine_that_differs_is_named() -> None:
    found = report(
        *(arrived(name, torch=torch) for name, torch in (("a", "2.13.0"), ("b", "2.14.0"), ("c", "2.13.0")))
    )
    (finding,) = found.findings
    assert (finding.machine, finding.is_error) == ("b", True)
    assert "machines differ in torch: 2.14.0 on b; 2.13.0 on a, c; workers hang" in finding.cause
    assert json.loads(as_json(found))["differences"] == {
        "torch": {"a": "2.13.0", "b": "2.14.0", "c": "2.13.0"}
    }


def test_machines_that_differ_alike_are_named_in_one_line() -> None:
    machines = [*(arrived(name, lightning="2.5") for name in "abc"), arrived("d"), arrived("e")]
    text = as_text(report(*machines), "a")
    assert text.startswith("warning  d, e: machines differ in lightning: none on d, e; 2.5 on a, b, c; ")


def test_of_two_machines_that_differ_none_is_the_odd_one() -> None:
    (finding,) = report(arrived("a", **{f"{VARIABLE}NCCL_ALGO": "Ring"}), arrived("b")).findings
    assert finding.machine == ""
    assert "machines differ in NCCL_ALGO: not set on b; Ring on a; " in finding.cause


@pytest.mark.parametrize("field", sorted({*Policy.__struct_fields__} - {"min_nodes", "max_nodes", "job"}))
def test_options_of_which_the_run_uses_one_value_are_compared(field: str) -> None:
    """Agents compare the same ones when they start."""
    option, compared = POLICY_OPTIONS[field], policy_facts(Settings().policy())
    (finding,) = report(arrived("a", **compared), arrived("b", **{**compared, option: "another"})).findings
    assert finding.cause.startswith(f"machines differ in {option}: another on b; {compared[option]} on a; ")
    assert finding.remedy == "start all agents with the same command"


def test_long_values_are_shown_where_they_differ() -> None:
    shared = ":".join(f"/opt/libraries/{number}" for number in range(20))
    (finding,) = report(
        *(arrived(name, **{f"{VARIABLE}LD_LIBRARY_PATH": f"{shared}:/usr/{name}"}) for name in "ab")
    ).findings
    assert re.search(r": \.\.\.\S+:/usr/b on b; \.\.\.\S+:/usr/a on a", finding.cause), finding.cause


def test_differences_that_are_usual_are_not_reported() -> None:
    assert report(arrived("a", **{f"{VARIABLE}NCCL_SOCKET_IFNAME": "ib0"}), arrived("b")).findings == ()


# -- shared folders -------------------------------------------------------------------------------


def test_a_shared_folder_has_no_findings_and_nothing_stays_in_it(tmp_path: Path) -> None:
    both = [SharedFolders([tmp_path], "x", rank) for rank in range(2)]
    shared = {rank: folders.mark() for rank, folders in enumerate(both)}
    seen = {rank: folders.look(2) for rank, folders in enumerate(both)}
    assert seen[0] == seen[1] == ((0, 1),)
    for folders in both:
        folders.remove_marks()
    assert list(tmp_path.iterdir()) == []
    found = path_findings({0: "a", 1: "b"}, shared, seen)
    assert {finding.check for finding in found} <= {"disk-space"}


def test_a_folder_that_is_missing_or_another_one_is_reported(tmp_path: Path) -> None:
    places = [tmp_path / "x", tmp_path / "y", tmp_path / "missing"]
    for place in places[:2]:
        place.mkdir()
    each = [SharedFolders([place], "x", rank) for rank, place in enumerate(places)]
    shared = {rank: folders.mark() for rank, folders in enumerate(each)}
    seen = {rank: folders.look(3) for rank, folders in enumerate(each)}
    for folders in each:
        folders.remove_marks()
    found = path_findings({0: "a", 1: "b", 2: "c"}, shared, seen)
    checks = [(finding.check, finding.machine) for finding in found if finding.is_error]
    assert checks == [("path", "c"), ("path-not-shared", "b")]
