"""How the agent asks workers for their progress, and notices a stall; the worker is a socket of this test."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import re
import socket
from collections.abc import Callable, Iterator, Set
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest

from elastic_agent.agent import events
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.agent.worker_group.stalls import TELL_AFTER_S, StallWatch
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.integrations.collectives import private_names
from tests import virtual_time
from tests.agent.support import asynchronous

CALLS = [{"serial": 6, "name": "all_reduce", "size_bytes": 400}]
WAITS = {"group": "0", "enqueued": 6, "started": -1, "completed": 5}


class Worker:
    """What a worker's thread would do."""

    sockets: ClassVar[list[socket.socket]] = []

    def __init__(
        self,
        collectives: Collectives,
        slot: int = 0,
        generation: int = 1,
        *,
        pid: int = 42,
        trains_alone: bool = False,
    ) -> None:
        self._hello = {"slot": slot, "generation": generation, "pid": pid}
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sockets.append(self.socket)
        self.socket.bind("")
        self.socket.connect(f"\0{collectives.address}")
        self.socket.setblocking(False)
        self.say(**{"trains_alone": True} if trains_alone else {})

    def say(self, **more: Any) -> None:
        self.socket.send(json.dumps({**self._hello, **more}).encode())

    async def question(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.socket, 64)

    async def answer(self, *groups: dict[str, Any], **more: Any) -> None:
        """Answer questions in detail until one is for details."""
        while await self.question() != b"details":
            self.say(groups=groups)
        self.say(groups=groups, details=True, **more)


@contextmanager
def listening(report_alone: Callable[[Set[int]], None] = lambda _: None) -> Iterator[Collectives]:
    collectives = Collectives(report_alone)
    collectives.open()
    try:
        yield collectives
    finally:
        collectives.close()
        while Worker.sockets:
            Worker.sockets.pop().close()


async def until(collectives: Collectives, slot: int, *, answered: bool) -> Any:
    """What is known of the worker; the answers of one moment are read in one turn of the loop or the next."""
    while slot not in collectives.workers or bool(collectives.workers[slot].groups) is not answered:
        await asyncio.sleep(0)
    return collectives.workers[slot]


@asynchronous
async def test_a_worker_that_introduces_itself_is_asked_and_its_answer_is_known() -> None:
    with listening() as collectives:
        worker = Worker(collectives)
        await until(collectives, 0, answered=False)
        collectives.ask(details=True)
        await worker.answer({**WAITS, "recent": CALLS, "timeout_s": 600.0}, line="train.py:8", stack="s")
        known = await until(collectives, 0, answered=True)
        assert (known.pid, known.line, known.stack, known.timeout_s) == (42, "train.py:8", "s", 600.0)
        (group,) = known.groups
        assert (group.enqueued, group.completed) == (6, 5)
        assert (group.last.name, group.last.size_bytes, group.last.line) == (
            "all_reduce",
            400,
            "train.py:8",
        )


@asynchronous
async def test_workers_that_train_alone_are_reported_until_one_of_them_introduces_itself() -> None:
    reported: list[set[int]] = []
    with listening(lambda slots: reported.append(set(slots))) as collectives:
        Worker(collectives, slot=0, trains_alone=True)
        Worker(collectives, slot=1, trains_alone=True)
        Worker(collectives, slot=2)
        Worker(collectives, slot=3, trains_alone=True)
        Worker(collectives, slot=4)
        await until(collectives, 4, answered=False)
        assert reported == [{0}, {0, 1}]
        assert sorted(collectives.workers) == [2, 4]
        collectives.begin(2)
        Worker(collectives, slot=3, generation=2, trains_alone=True)
        Worker(collectives, slot=4, generation=2)
        await until(collectives, 4, answered=False)
        assert reported[2:] == [{3}]


@asynchronous
async def test_workers_of_earlier_generations_are_forgotten_and_not_listened_to() -> None:
    with listening() as collectives:
        old = Worker(collectives, slot=0, generation=1)
        await until(collectives, 0, answered=False)
        collectives.begin(2)
        assert not collectives.workers
        old.say(groups=[WAITS])
        Worker(collectives, slot=1, generation=2)
        await until(collectives, 1, answered=False)
        assert sorted(collectives.workers) == [1]


def stalls(folder: Path, limit_s: float | None, **group: Any) -> list[events.Stalled]:
    """What the watch tells first of a worker that stands still with a group like this, until it is over."""
    told: list[events.Stalled] = []

    async def scene() -> None:
        over = asyncio.Event()

        def report(event: events.Event) -> None:
            assert isinstance(event, events.Stalled)
            told.append(event)
            if event.is_over:
                over.set()

        with listening() as collectives, closing(HeartbeatFile.create(folder, 1)) as beats:
            worker = Worker(collectives)
            await until(collectives, 0, answered=False)
            watch = StallWatch(1, lambda: {0: os.getpid()}, beats, collectives, limit_s, report)
            watching = asyncio.create_task(watch.run())
            answering = asyncio.create_task(answer_always(worker, {**WAITS, **group}))
            await over.wait()
            watching.cancel()
            answering.cancel()

    virtual_time.run(scene())
    return told


async def answer_always(worker: Worker, group: dict[str, Any]) -> None:
    while True:
        await worker.answer(group)


def test_a_stall_is_told_before_the_time_out_and_when_it_is_over(tmp_path: Path) -> None:
    told = stalls(tmp_path, 40.0)
    assert [hang.is_over for hang in told] == [False, False, False, True]
    assert TELL_AFTER_S <= told[0].stalled_s < 40.0 <= told[-1].stalled_s
    assert {hang.limit for hang in told} == {"--hang-timeout 40"}
    assert len({hang.over_at_s for hang in told}) == 1, "it began once"


def recorded(serial: int, *, retired: bool) -> dict[str, Any]:
    """What torch's flight recorder has of a collective."""
    return {
        "record_id": serial,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": serial,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[1]],
        "input_dtypes": ["Float"],
        "retired": retired,
    }


@pytest.mark.parametrize(("last_are_retired", "completed"), [(True, 3), (False, 1)])
def test_collectives_that_complete_in_another_order_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, last_are_retired: bool, completed: int
) -> None:
    """gloo's threads complete collectives in any order, and torch keeps the number of the one that it hears of last.

    The worker would seem to hang in the last one for as long as it calls no other.
    """
    status = {"last_enqueued_collective": 3, "last_started_collective": -1, "last_completed_collective": 1}
    entries = [recorded(1, retired=True), recorded(2, retired=last_are_retired)]
    entries.append(recorded(3, retired=last_are_retired))
    dumps = {
        "_dump_fr_trace_json": json.dumps({"pg_status": {"0": status}}),
        "_dump_fr_trace": pickle.dumps({"entries": entries}),
    }
    for name, dump in dumps.items():
        monkeypatch.setattr(f"torch._C._distributed_c10d.{name}", lambda *_, dump=dump: dump)
    recorders = private_names.Recorders()
    (before,) = recorders.summary()
    (details,) = recorders.details()
    (after,) = recorders.summary()
    assert [answer["completed"] for answer in (before, details, after)] == [1, completed, completed]


def test_this_torch_has_the_private_names_that_workers_need() -> None:
    """A test that fails means: adapt elastic_agent/integrations/collectives/private_names.py."""
    from torch._C import _distributed_c10d as bindings
    from torch.distributed import distributed_c10d

    makes_groups = inspect.getsource(inspect.unwrap(distributed_c10d.init_process_group))
    assert f"{private_names.HOOK}(" in makes_groups, "workers do not notice that a group is made"
    steps = import_module("torch.optim.optimizer")
    assert hasattr(steps, "_global_optimizer_post_hooks"), "optimizer steps are not counted"
    asks_for_the_store = r"def \w+\([^)]*\bport\b[^)]*\)(?:(?!\ndef ).)*? _torchelastic_use_agent_store\(\)"
    connects = inspect.getsource(import_module("torch.distributed.rendezvous"))
    assert re.search(asks_for_the_store, connects, re.S), "its caller has no port"
    for name in ("_dump_fr_trace_json", "_dump_fr_trace"):
        assert hasattr(bindings, name), "collectives of gloo are not seen"
    for name in ("pg_names", "pg_group_ranks"):
        assert hasattr(distributed_c10d._world, name), "the ranks of groups are not known"
