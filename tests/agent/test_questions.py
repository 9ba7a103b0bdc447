"""Questions of users about the workers of other nodes, over a real store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from elastic_agent.agent.control.socket import Answer, Question
from elastic_agent.agent.reporting import questions as module
from elastic_agent.agent.reporting.questions import Questions
from elastic_agent.agent.supervisor import Supervisor
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.rendezvous.reports import Reports
from elastic_agent.transport import c10d
from elastic_agent.workers.output.folders import LogFolders, run_folder
from elastic_agent.workers.output.read_output import read_output
from tests.agent.support import asynchronous
from tests.transport.support import C10dScene
from tests.waiting import GUARD_S

LOGS = Question("logs", lines=5)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[C10dScene]:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(module, "NEXT_S", 0.02)
    monkeypatch.setattr(module, "ANSWER_S", GUARD_S)
    monkeypatch.setattr(module, "READ_S", GUARD_S)
    scene = C10dScene()
    yield scene
    scene.host.close()


@asynccontextmanager
async def node(
    scene: C10dScene, node_id: str, log_dir: Path, *, answers: bool = True
) -> AsyncIterator[Questions]:
    """Run what an agent has for questions; nodes a, b and c are in the world."""
    reports = Reports(lambda: c10d.dial_reports(scene.endpoint, "run", GUARD_S))
    await reports.read()
    seats = [SimpleNamespace(node_id=name) for name in ("a", "b", "c")]
    supervisor = SimpleNamespace(world=SimpleNamespace(seats=seats), progress=None, seat=None)
    asked = Questions(
        node_id, reports, cast(Supervisor, supervisor), Collectives(), str(run_folder(str(log_dir), "run"))
    )
    serving = asyncio.create_task(asked.serve()) if answers else None
    try:
        yield asked
    finally:
        asked.close()
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        reports.close()


def write(log_dir: Path, node_id: str, text: str, generation: int = 1) -> Path:
    """Write the output of the only worker of a node; returns its file."""
    path = LogFolders(str(log_dir), 20).make("run", generation, node_id) / "0" / "stdout.log"
    path.parent.mkdir()
    path.write_text(text)
    return path


async def answers_to(asked: Questions, question: Question, node_id: str | None = None) -> list[Answer]:
    async with aclosing(asked.ask(question, node_id)) as answers:
        return [answer async for answer in answers]


@asynchronous
async def test_a_node_answers_with_what_its_workers_have_written_and_nothing_stays_in_the_store(
    scene: C10dScene, tmp_path: Path
) -> None:
    for node_id in ("a", "b", "c"):
        write(tmp_path / node_id, node_id, f"of {node_id}\n")
    async with node(scene, "a", tmp_path / "a") as a, node(scene, "b", tmp_path / "b"):
        one = await answers_to(a, LOGS, "b")
        own = await answers_to(a, LOGS, "a")
        async with node(scene, "c", tmp_path / "c"):
            every = await answers_to(a, LOGS)
    assert [answer.output for answer in one] == [{"b/0": "of b\n"}, {}]
    assert [answer.output for answer in own] == [{"a/0": "of a\n"}, {}]
    assert [answer.done for answer in every] == [False, False, False, True]
    assert {name: text for answer in every for name, text in answer.output.items()} == {
        "a/0": "of a\n",
        "b/0": "of b\n",
        "c/0": "of c\n",
    }
    table = await c10d.open_table(scene.endpoint, GUARD_S)
    try:
        left = await table.read_folders("r/run/asked/", "r/run/told/")
        assert left == dict.fromkeys(("r/run/asked/b", "r/run/asked/c"), msgspec.msgpack.encode([]))
    finally:
        table.close()


@asynchronous
async def test_who_follows_gets_what_is_new_also_of_the_next_generation(
    scene: C10dScene, tmp_path: Path
) -> None:
    output = write(tmp_path / "b", "b", "".join(f"line {number}\n" for number in range(100)))
    async with node(scene, "a", tmp_path / "a") as a, node(scene, "b", tmp_path / "b"):
        following = a.ask(Question("logs", lines=1, follows=True), "b")
        async with aclosing(following):
            assert (await anext(following)).output == {"b/0": "line 99\n"}
            with output.open("a") as file:
                file.write("the last\n")
            write(tmp_path / "b", "b", "the first of the next\n", generation=2)
            seen = ""
            while "next" not in seen:
                seen += (await anext(following)).output.get("b/0", "")
            a.close()
            *_, where, last = [answer async for answer in following]
    assert seen == "the last\nthe first of the next\n"
    assert where.text == "this agent ends; what others wrote last is in the files on their machines"
    assert last.done, "it ends with the agent"


@asynchronous
async def test_who_follows_gets_the_last_output_of_the_own_node_at_the_end(
    scene: C10dScene, tmp_path: Path
) -> None:
    output = write(tmp_path, "a", "first\n")
    async with (
        node(scene, "a", tmp_path) as a,
        aclosing(a.ask(Question("logs", lines=1, follows=True), "a")) as following,
    ):
        told = [await anext(following)]
        with output.open("a") as file:
            file.write("RESULT, without the end of a line")
        a.close()
        told += [answer async for answer in following]
    assert (
        "".join(answer.output.get("a/0", "") for answer in told)
        == "first\nRESULT, without the end of a line\n"
    )
    assert [answer.done for answer in told][-2:] == [False, True]


@asynchronous
async def test_who_follows_a_silent_node_is_sent_something_each_time_and_its_output_when_it_is_back(
    scene: C10dScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "c", "hello\n")
    async with (
        node(scene, "a", tmp_path) as a,
        aclosing(a.ask(Question("logs", lines=1, follows=True), "c")) as following,
    ):
        monkeypatch.setattr(module, "ANSWER_S", module.GATHER_EVERY_S)
        told = [await anext(following) for _ in range(3)]
        assert [(answer.text[:7], answer.output, answer.done) for answer in told] == [
            ("node c:", {}, False),
            ("", {}, False),
            ("", {}, False),
        ]
        monkeypatch.setattr(module, "ANSWER_S", GUARD_S)
        async with node(scene, "c", tmp_path):
            while not (answer := await anext(following)).output:
                assert not answer.done
    assert answer.output == {"c/0": "hello\n"}


@asynchronous
async def test_readings_that_a_disk_holds_up_do_not_pile_up(
    scene: C10dScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a", "hello\n")
    readings, answers_again = list[int](), threading.Event()

    def hanging(*args: Any, **kwargs: Any) -> Any:
        readings.append(1)
        answers_again.wait()
        return read_output(*args, **kwargs)

    monkeypatch.setattr(module, "read_output", hanging)
    monkeypatch.setattr(module, "READ_S", 0.01)
    async with node(scene, "a", tmp_path, answers=False) as a:
        told = [await a.answer(LOGS) for _ in range(3 * module.MOST_READINGS)]
        assert len(readings) <= module.MOST_READINGS
        assert all(answer.text and not answer.output for answer in told), told
        answers_again.set()
        monkeypatch.setattr(module, "READ_S", GUARD_S)
        assert (await a.answer(LOGS)).output == {"a/0": "hello\n"}


@asynchronous
async def test_a_node_that_does_not_answer_is_named_once_and_delays_the_others_once(
    scene: C10dScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = write(tmp_path / "b", "b", "hello\n")
    async with node(scene, "a", tmp_path / "a") as a, node(scene, "b", tmp_path / "b"):
        following = a.ask(Question("logs", lines=1, follows=True), None)
        async with aclosing(following):
            monkeypatch.setattr(module, "ANSWER_S", 2.0)  # b has answered long before
            first = [await anext(following) for _ in range(3)]
            monkeypatch.setattr(module, "ANSWER_S", GUARD_S)  # nobody waits for c any more
            with output.open("a") as file:
                file.write("news\n")
            later: list[Answer] = []
            while not later or "news" not in later[-1].output.get("b/0", ""):
                later.append(await anext(following))
    told = [answer.text for answer in first if answer.text.startswith("node c: ")]
    assert told == [
        "node c: no answer within 2 s: the machine is lost or slow, or its agent has another version"
    ]
    assert not any(answer.text.startswith("node c: ") for answer in later)
