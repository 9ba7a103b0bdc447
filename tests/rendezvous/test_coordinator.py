"""The coordinator of a store: what one run, a full disk or a pause of its own may not do to the runs it serves."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from elastic_agent.protocol.records import Phase, Plan
from elastic_agent.rendezvous import events
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.transport import CoordinatorRecords, c10d
from elastic_agent.transport.blocking_call import DiskThread
from elastic_agent.values import Endpoint
from tests.loop_thread import Blocking, in_loop
from tests.protocol.support import on_disk
from tests.transport.support import life_keys

from .support import PATIENCE_S, Participant, coordinated, hosted, participants, policy, run

Lines = list[MutableMapping[str, Any]]


@pytest.fixture
def logged() -> Iterator[Lines]:
    with capture_logs() as lines:
        yield lines


def warnings_with(words: str, logged: Lines) -> list[str]:
    """Return the warnings, or worse, that contain these words."""
    found = [str(line) for line in logged if line["log_level"] in ("warning", "error", "critical")]
    return [line for line in found if words in line]


# -- the disk ---------------------------------------------------------------------------------------


def test_an_unwritable_state_directory_is_logged_once_and_stops_no_run(
    endpoint: Endpoint, tmp_path: Path, logged: Lines
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "runs").write_text("where a folder should be")

    async def story() -> None:
        async with (
            coordinated(endpoint, RunHistoryStore(state)),
            participants("a", endpoint=endpoint, rules=policy(1, 1), folder=tmp_path) as (a,),
        ):
            first = await a.running("a")
            a.fail()
            second = await a.running("a", above=first.generation)
            a.fail()
            await a.running("a", above=second.generation)
        (complaint,) = warnings_with("cannot write the state directory", logged)
        assert "generations may repeat" in complaint, "it says what is not promised any more"

    run(story())


class HangingRunHistoryStore(RunHistoryStore):
    """A state directory on a file server that does not answer until told to."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(state_dir)
        self.answers = threading.Event()
        self.written = threading.Event()

    def _write(self, run_id: str, history: Plan) -> None:
        self.answers.wait()
        super()._write(run_id, history)
        self.written.set()


def test_a_hanging_state_directory_delays_no_generation_and_gets_the_newest_history_later(
    endpoint: Endpoint, tmp_path: Path, logged: Lines
) -> None:
    disk, written = HangingRunHistoryStore(tmp_path / "state"), Blocking(RunHistoryStore(tmp_path / "state"))

    async def story() -> None:
        async with (
            coordinated(endpoint, disk),
            participants("a", endpoint=endpoint, rules=policy(1, 1), folder=tmp_path) as (a,),
        ):
            first = await a.running("a")
            a.fail()
            second = await a.running("a", above=first.generation)
            assert not a.of(events.LeaseLost)
            disk.answers.set()
            while (known := written.load("run")) is None or known.generation < second.generation:
                assert await asyncio.to_thread(disk.written.wait, PATIENCE_S)
                disk.written.clear()
        (complaint,) = warnings_with("cannot write the state directory", logged)
        assert "the disk did not answer within 1 s" in complaint

    try:
        run(story())
    finally:
        disk.answers.set()


# -- several runs ------------------------------------------------------------------------------------


def test_an_error_with_one_run_does_not_affect_another(
    endpoint: Endpoint, tmp_path: Path, logged: Lines
) -> None:
    async def story() -> None:
        trouble = True

        async def open_records(inbox: c10d.C10dInbox, run_id: str) -> CoordinatorRecords | None:
            if run_id == "troubled" and trouble:
                raise OSError("too many open files")
            return await c10d.C10dInbox.records(inbox, run_id)

        async with coordinated(endpoint, RunHistoryStore(tmp_path / "state"), open_records) as coordinator:
            rules = policy(1, 1)
            async with (
                Participant("t", endpoint, rules, tmp_path / "t", "troubled") as troubled,
                Participant("s", endpoint, rules, tmp_path / "s", "sound") as sound,
            ):
                await troubled.hear(events.Registered)
                generation = (await sound.running("s")).generation
                sound.fail()
                await sound.running("s", above=generation)
                assert not troubled.of(events.PlanSeen)
                assert coordinator.busy_with == ["sound", "troubled"], "the store is still needed for it"
                assert warnings_with("too many open files", logged)
                trouble = False
                await troubled.running("t")
                assert not coordinator.failed

    run(story())


def test_a_run_whose_records_are_deleted_continues_from_the_rest(endpoint: Endpoint, tmp_path: Path) -> None:
    """A client with access to the port deletes keys: this affects only this run."""

    async def story() -> None:
        with hosted(endpoint, tmp_path / "host"):
            rules = policy(1, 2)
            async with (
                Participant("x", endpoint, rules, tmp_path / "x", "one") as x,
                Participant("y", endpoint, rules, tmp_path / "y", "other") as y,
            ):
                plan = await x.running("x")
                untouched = await y.running("y")
                stranger = Blocking(in_loop(c10d.open_table(endpoint, PATIENCE_S)))
                stranger.delete([life_keys(stranger.records, "one").plan])
                stranger.close()
                x.fail()
                await x.running("x", above=plan.generation)
                assert y.node.plan == untouched
                y.fail()
                await y.running("y", above=untouched.generation)

    run(story())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_names_without_a_run_use_no_connections_and_delay_no_run(endpoint: Endpoint, tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinated(endpoint, RunHistoryStore(tmp_path / "state")):
            rules = policy(1, 1)
            async with Participant("a", endpoint, rules, tmp_path / "a") as a:
                generation = (await a.running("a")).generation
                before = open_files()
                stranger = await c10d.open_table(endpoint, PATIENCE_S)
                for name in (f"fake-{number}" for number in range(3000)):
                    await stranger.put(f"r/{name}/life", b"life")
                    await stranger.hint(name, "nobody")
                # its hint comes after all of these
                async with Participant("z", endpoint, rules, tmp_path / "z", "another") as z:
                    await z.running("z")
                    assert open_files() < before + 100
                    a.fail()
                    await a.running("a", above=generation)
                stranger.close()

    run(story())


# -- what is remembered -------------------------------------------------------------------------------


def history(generation: int, **changes: object) -> Plan:
    return on_disk(generation, **changes)


def test_a_saved_history_is_never_replaced_by_an_older_one(tmp_path: Path) -> None:
    history_store = Blocking(RunHistoryStore(tmp_path))
    assert history_store.load("run") is None
    for said in (history(3), history(7, outcome=Phase.FAILED), history(5), history(7)):
        history_store.save("run", said)
    assert history_store.load("run") == history(7, outcome=Phase.FAILED)
    history_store.save("run", history(8))
    assert history_store.load("run") == history(8)
    assert history_store.load("another") is None


@pytest.mark.parametrize("order", list(itertools.permutations((3, 4, 5))))
def test_what_was_saved_is_on_disk_whatever_else_waits_for_it(tmp_path: Path, order: tuple[int, ...]) -> None:
    """A coordinator saves what it publishes next, while its agent writes down a plan that it has just read."""
    disk, answers = DiskThread("disk"), threading.Event()
    disk.submit("another run", answers.wait)
    history_store = Blocking(RunHistoryStore(tmp_path, disk=disk))
    outcomes = [history_store.save_soon("run", history(generation)) for generation in order]
    answers.set()
    for generation, outcome in zip(order, outcomes, strict=True):
        outcome.result(PATIENCE_S)
        known = history_store.load("run")
        assert known is not None
        assert known.generation >= generation


def test_what_could_not_be_saved_is_saved_with_what_is_known_later(tmp_path: Path) -> None:
    history_store = Blocking(RunHistoryStore(tmp_path))
    (tmp_path / "runs").write_text("where a folder should be")
    with pytest.raises(OSError, match="runs"):
        history_store.save("run", history(5))
    (tmp_path / "runs").unlink()
    history_store.save("run", history(4))
    assert history_store.load("run") == history(5)


def test_a_history_saved_by_several_agents_at_once_is_the_highest(tmp_path: Path) -> None:
    def write(numbers: range) -> None:
        history_store = Blocking(RunHistoryStore(tmp_path))
        for number in numbers:
            history_store.save("run", history(number))

    threads = [threading.Thread(target=write, args=(range(start, 200, 4),)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = Blocking(RunHistoryStore(tmp_path)).load("run")
    assert known is not None
    assert known.generation == 199
    files = [path.name for path in (tmp_path / "runs" / "run.run").iterdir()]
    assert len(files) < 5, "older states are cleared away"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"generation": -1}', json.dumps([1]).encode()])
def test_an_unreadable_history_counts_as_none(tmp_path: Path, content: bytes) -> None:
    history_store = Blocking(RunHistoryStore(tmp_path))
    history_store.save("run", history(7))
    for path in (tmp_path / "runs" / "run.run").iterdir():
        path.write_bytes(content)
    assert history_store.load("run") is None
    history_store.save("run", history(8))
    assert history_store.load("run") == history(8)


def test_runs_with_unusual_names_have_separate_histories(tmp_path: Path) -> None:
    history_store = Blocking(RunHistoryStore(tmp_path / "state"))
    names = [".", "..", "a", "a.run", "a@b:1+2-3", "x" * 128]
    for number, name in enumerate(names, 1):
        history_store.save(name, history(number))
    assert [history_store.load(name) for name in names] == [
        history(number) for number in range(1, len(names) + 1)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["runs"]


def test_only_a_history_with_an_outcome_is_settled(tmp_path: Path) -> None:
    history_store = Blocking(RunHistoryStore(tmp_path))
    history_store.settle("run")
    assert history_store.load("run") is None
    history_store.save("run", history(4))
    history_store.settle("run")
    assert history_store.load("run") == history(4), "a run that is not over is to be continued"
    history_store.save("run", history(5, outcome=Phase.FINISHED))
    history_store.settle("run")
    assert history_store.load("run") == history(5, outcome=Phase.FINISHED, settled=True)
