"""Machines that meet: who takes part, and what their test connections and folders mean."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from elastic_agent.agent.doctor_request import doctor_request
from elastic_agent.config.settings import Settings
from elastic_agent.diagnosis.differences import POLICY_OPTIONS
from elastic_agent.doctor import interpreter, meeting, pairs
from elastic_agent.doctor.differences import difference_findings
from elastic_agent.doctor.examination import MeetingPoint
from elastic_agent.doctor.findings import Finding
from elastic_agent.doctor.interpreter import Interpreter
from elastic_agent.doctor.meeting import FOLDER, Meeting
from elastic_agent.doctor.pairs import EchoServer, Problem, connect_to_all, connection_findings, targets
from elastic_agent.doctor.paths import SharedFolders, path_findings
from elastic_agent.doctor.records import Attendance, Connection, MachineFacts
from elastic_agent.doctor.report import Report, as_json, as_text
from elastic_agent.doctor.request import Request
from elastic_agent.protocol import Policy
from elastic_agent.transport import Secret, c10d
from elastic_agent.values import Endpoint, PortRange
from tests.loop_thread import in_loop
from tests.ports import free_port
from tests.transport.support import torchs_server
from tests.waiting import GUARD_S


@pytest.fixture(autouse=True)
def _machines_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit of time decides here."""
    monkeypatch.setattr(meeting, "SETTLE_S", GUARD_S)
    monkeypatch.setattr(interpreter, "START_S", GUARD_S)
    monkeypatch.setitem(interpreter.REDUCE_S, "gloo", GUARD_S)
    for limit in ("CONNECT_S", "ANSWER_S"):
        monkeypatch.setattr(pairs, limit, GUARD_S)


def attendance(
    name: str, *, port: int = 1, least: int = 1, most: int = 2, address: str = "127.0.0.1"
) -> Attendance:
    return Attendance(name, least, most, address, port)


# -- who takes part -------------------------------------------------------------------------------


@dataclass
class Store:
    """A c10d store, as a run or another doctor hosts it."""

    host: c10d.C10dHost

    async def meeting(self, name: str, *, most: int = 2) -> Meeting:
        table = await c10d.open_table(Endpoint("127.0.0.1", self.host.port), GUARD_S, root=f"{FOLDER}/")
        return Meeting(table, attendance(name, most=most))

    @asynccontextmanager
    async def met(self, **most: int) -> AsyncIterator[list[Meeting]]:
        """Machines of these names, each of which expects so many, when they have met."""
        members = [await self.meeting(name, most=number) for name, number in most.items()]
        await asyncio.gather(*(member.join(GUARD_S, silent) for member in members))
        yield members
        for member in members:
            member.close()


@pytest.fixture
def store() -> Iterator[Store]:
    host = in_loop(c10d.find_or_host(Endpoint("127.0.0.1", free_port()), GUARD_S))
    assert host is not None
    yield Store(host)
    host.close()


def silent(line: str) -> None:
    """For those who wait."""


def test_all_machines_know_the_same_members_and_their_records(store: Store) -> None:
    async def meet() -> None:
        async with store.met(a=2, b=2) as both:
            assert both[0].members == both[1].members
            assert sorted(attendance.machine for attendance in both[0].attendances.values()) == ["a", "b"]
            records = await asyncio.gather(
                *(meeting.exchange("x", Connection(meeting.id), GUARD_S) for meeting in both)
            )
            assert records == 2 * [{member: Connection(member) for member in both[0].members}]

    asyncio.run(meet())


def test_machines_of_a_run_with_a_secret_meet_and_one_without_it_is_told() -> None:
    endpoint, secret = Endpoint("127.0.0.1", free_port()), Secret((b"a secret of this run",))

    def point(secret: Secret | None) -> MeetingPoint:
        return MeetingPoint(
            Request(machine="m", endpoint=endpoint, secret=secret, python=sys.executable, environ={})
        )

    async def meet() -> None:
        hosting, joining, without = point(secret), point(secret), point(None)
        links = [await hosting.reach(GUARD_S, silent), await joining.reach(GUARD_S, silent)]
        for link in links:
            assert not isinstance(link, Finding)
            link.close()
        finding = await without.reach(GUARD_S, silent)
        assert isinstance(finding, Finding)
        assert (finding.check, secret.ids[0] in finding.cause) == ("secret", True)
        hosting.close()

    asyncio.run(meet())


def test_a_store_that_another_version_created_is_reported_at_once() -> None:
    server = torchs_server()
    server.set("elastic-agent/1/id", "0123456789abcdef")
    endpoint = Endpoint("127.0.0.1", server.port)
    request = Request(machine="m", endpoint=endpoint, python=sys.executable, environ={})
    finding = asyncio.run(MeetingPoint(request).reach(GUARD_S, silent))
    assert isinstance(finding, Finding)
    assert finding.check == "other-version"
    assert finding.remedy.startswith("install the same version on all machines")


def test_a_machine_with_a_smaller_number_of_nodes_waits_for_what_the_others_expect(store: Store) -> None:
    async def meet() -> None:
        async with store.met(a=2, b=3, c=3) as three:
            assert [len(meeting.members) for meeting in three] == [3, 3, 3]

    asyncio.run(meet())


def test_a_machine_that_comes_too_late_is_examined_in_the_next_round(store: Store) -> None:
    async def meet() -> None:
        async with store.met(a=2, b=2) as early, store.met(c=2, d=2) as late:
            assert not {*late[0].members} & {*early[0].members}

    asyncio.run(meet())


def test_it_is_shown_for_how_many_machines_the_others_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "EARLY_S", -1.0)

    async def meet() -> str:
        alone = await store.meeting("a", most=3)
        shown: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        joining = asyncio.ensure_future(alone.join(GUARD_S, shown.set_result))
        line = await shown
        joining.cancel()
        alone.close()
        return line

    assert asyncio.run(meet()) == ("waiting for 2 of 3 machines; here: a. Run the same command on the others")


# -- connections ----------------------------------------------------------------------------------


def test_connections_between_machines_work_in_both_directions_and_on_the_port_range() -> None:
    low = free_port()

    async def connect() -> list[Connection]:
        server = EchoServer()
        await server.start(PortRange(low, low))
        machine = Attendance("b", 1, 2, "127.0.0.1", server.port, server.ranged_port)
        try:
            return await connect_to_all({"it": machine})
        finally:
            server.close()

    made = asyncio.run(connect())
    assert [(one.problem, one.is_ranged) for one in made] == [("", False), ("", True)]


def test_a_program_that_is_no_doctor_is_recognised() -> None:
    async def connect() -> tuple[Connection, Connection]:
        other = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        machines = {"it": attendance("b", port=int(other.sockets[0].getsockname()[1]))}
        (silent_one,) = await connect_to_all(machines)
        other.close()
        (refused,) = await connect_to_all(machines)
        return silent_one, refused

    silent_one, refused = asyncio.run(connect())
    assert (silent_one.problem, refused.problem) == (Problem.NO_ANSWER, Problem.REJECTED)


def test_in_large_runs_every_machine_has_a_few_connections() -> None:
    members = [f"{number:02}" for number in range(40)]
    found = {member: targets(member, members) for member in members}
    assert all(8 <= len(each) <= 9 for each in found.values())
    assert all(after in found[before] for before, after in pairwise(members))


THREE = {one: attendance(one, address=f"10.0.0.{number}") for number, one in enumerate("abc", 1)}


BLOCKED = (
    "TCP from any other machine to b (10.0.0.2) on an ephemeral port is not answered: a firewall drops the"
)


def made(**problems: tuple[Problem, str]) -> dict[str, list[Connection]]:
    """All connections between three machines; of those such as "ab", what was the problem."""
    return {
        one: [Connection(other, *problems.get(one + other, ())) for other in "abc" if other != one]
        for one in "abc"
    }


@pytest.mark.parametrize(
    ("problems", "machine", "cause"),
    [
        (dict.fromkeys(("ab", "cb"), (Problem.DROPPED,)), "b", BLOCKED),
        (
            {"ac": (Problem.REJECTED,)},
            *("a", "TCP from a to c (10.0.0.3) on an ephemeral port is refused, although"),
        ),
    ],
    ids=["a firewall on one machine", "between two machines"],
)
def test_connections_that_fail_for_one_reason_are_one_finding(
    problems: dict[str, tuple[Problem, str]], machine: str, cause: str
) -> None:
    (finding,) = connection_findings(THREE, made(**problems))
    assert finding.machine == machine
    assert finding.cause.startswith(cause)


# -- all-reduces ----------------------------------------------------------------------------------


def reduced(other: str = "") -> list[str]:
    """Return the problems of two interpreters that take part; the second one runs this program if it is given."""

    async def run() -> list[str]:
        pair = Interpreter(sys.executable, os.environ), Interpreter(other or sys.executable, os.environ)
        try:
            first, second = await asyncio.gather(*(one.ask(None, hosts_store=True) for one in pair))
            assert (first.start_problem, second.start_problem) == ("", "")
            store = "127.0.0.1", first.store_port
            interface = {"GLOO_SOCKET_IFNAME": "lo"}
            ended = await asyncio.gather(
                *(one.reduce("gloo", (rank, 2), store, interface) for rank, one in enumerate(pair))
            )
            return [one.problem for one in ended]
        finally:
            await asyncio.gather(*(one.close() for one in pair))

    return asyncio.run(run())


def test_the_interpreters_of_the_script_perform_an_all_reduce() -> None:
    assert reduced() == ["", ""]


def test_an_all_reduce_that_a_process_does_not_survive_names_what_it_said_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(interpreter.REDUCE_S, "gloo", 1.0)
    program = tmp_path / "python"
    answer = '{"python": "3.11", "store_port": 1}'
    program.write_text(f"#!/bin/sh\necho '{answer}'\nread line\necho 'Fatal: no memory' >&2\nexit 1\n")
    program.chmod(0o755)
    first, second = reduced(str(program))
    assert first
    assert second == "its process did not answer: Fatal: no memory"


# -- differences ----------------------------------------------------------------------------------


def facts(machine: str, environment: dict[str, str] | None = None, **values: str) -> MachineFacts:
    return MachineFacts(machine, "10.0.0.1", facts=values, environment=environment or {})


def test_the_machine_that_differs_is_named() -> None:
    machines = [facts("a", torch="2.13.0"), facts("b", torch="2.14.0"), facts("c", torch="2.13.0")]
    (finding,) = difference_findings(machines)
    assert (finding.machine, finding.severity) == ("b", "error")
    assert "machines differ in torch: 2.14.0 on b; 2.13.0 on a, c; workers hang" in finding.cause
    assert json.loads(as_json(Report(tuple(machines))))["differences"] == {
        "torch": {"a": "2.13.0", "b": "2.14.0", "c": "2.13.0"}
    }


def test_machines_that_differ_alike_are_named_in_one_line() -> None:
    machines = [facts(name, lightning="2.5") for name in "abc"]
    machines += [facts("d"), facts("e")]
    text = as_text(Report(tuple(machines), tuple(difference_findings(machines))), "a")
    assert text.startswith("warning  d, e: machines differ in lightning: none on d, e; 2.5 on a, b, c; ")


def test_of_two_machines_that_differ_none_is_the_odd_one() -> None:
    machines = [facts("a", {"NCCL_ALGO": "Ring"}), facts("b")]
    (finding,) = difference_findings(machines)
    assert finding.machine == ""
    assert "machines differ in NCCL_ALGO: none on b; Ring on a; " in finding.cause


@pytest.mark.parametrize("field", sorted({*Policy.__struct_fields__} - {"min_nodes", "max_nodes", "job"}))
def test_options_of_which_the_run_uses_one_value_are_compared(field: str) -> None:
    """Agents compare the same ones when they start."""
    option = POLICY_OPTIONS[field]
    compared = dict(doctor_request(Settings(), {}).compared)
    other = {**compared, option: "another"}
    machines = [
        MachineFacts(name, "10.0.0.1", facts=values) for name, values in (("a", compared), ("b", other))
    ]
    (finding,) = difference_findings(machines)
    assert finding.cause.startswith(f"machines differ in {option}: another on b; {compared[option]} on a; ")
    assert finding.remedy == "start all agents with the same command"


def test_long_values_are_shown_where_they_differ() -> None:
    shared = ":".join(f"/opt/libraries/{number}" for number in range(20))
    machines = [facts(name, {"LD_LIBRARY_PATH": f"{shared}:/usr/{name}"}) for name in "ab"]
    (finding,) = difference_findings(machines)
    assert re.search(r": \.\.\.\S+:/usr/b on b; \.\.\.\S+:/usr/a on a", finding.cause), finding.cause


def test_differences_that_are_usual_are_not_reported() -> None:
    machines = [facts("a", {"NCCL_SOCKET_IFNAME": "ib0"}, workers="8"), facts("b", workers="4")]
    assert [*difference_findings(machines)] == []
    assert json.loads(as_json(Report(tuple(machines))))["differences"].keys() == {
        "workers",
        "$NCCL_SOCKET_IFNAME",
    }


# -- shared folders -------------------------------------------------------------------------------


def test_a_shared_folder_has_no_findings_and_nothing_stays_in_it(tmp_path: Path) -> None:
    one, two = SharedFolders([tmp_path], "one"), SharedFolders([tmp_path], "two")
    shared = {"one": one.mark(), "two": two.mark()}
    seen = {"one": one.look(["one", "two"]), "two": two.look(["one", "two"])}
    assert seen["one"] == seen["two"] == (("one", "two"),)
    one.remove_marks()
    two.remove_marks()
    assert list(tmp_path.iterdir()) == []
    found = path_findings({"one": "a", "two": "b"}, shared, seen)
    assert {finding.check for finding in found} <= {"disk-space"}


def test_a_folder_that_is_missing_or_another_one_is_reported(tmp_path: Path) -> None:
    folders = [tmp_path / "x", tmp_path / "y", tmp_path / "missing"]
    for folder in folders[:2]:
        folder.mkdir()
    each = {str(number): SharedFolders([folder], str(number)) for number, folder in enumerate(folders)}
    shared = {one: folder.mark() for one, folder in each.items()}
    seen = {name: one.look(list(each)) for name, one in each.items()}
    for one in each.values():
        one.remove_marks()
    found = path_findings({"0": "a", "1": "b", "2": "c"}, shared, seen)
    checks = [(finding.check, finding.machine) for finding in found if finding.severity == "error"]
    assert checks == [("path", "c"), ("path-not-shared", "b")]
