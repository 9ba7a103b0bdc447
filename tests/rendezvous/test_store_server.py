"""A store that serves run after run: what it keeps of them, in memory and on disk."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace
from torch.distributed import TCPStore

from elastic_agent.protocol.records import Address, Lease, Phase, Plan, Policy, State, World
from elastic_agent.rendezvous.run_history import KEPT_RUNS, RunHistoryStore
from elastic_agent.transport import begun_runs, c10d
from elastic_agent.transport.base import StoreLostError
from elastic_agent.transport.blocking_call import DiskThread
from elastic_agent.transport.c10d import host as c10d_host
from elastic_agent.values import Endpoint
from tests.loop_thread import Blocking, in_loop
from tests.ports import free_port
from tests.protocol.support import member, on_disk
from tests.waiting import wait_for

from .support import PATIENCE_S, coordinated, policy

RULES = policy(1, 1)
_numbers = itertools.count()


class Served:
    """A store and its coordinator in this process."""

    def __init__(self, state_dir: Path, keep_over_s: float) -> None:
        self.endpoint = Endpoint("127.0.0.1", free_port())
        self.ended: list[str] = []
        self._opened = AsyncExitStack()
        coordinating = coordinated(
            self.endpoint, RunHistoryStore(state_dir), on_plan=self._on_plan, keep_over_s=keep_over_s
        )
        self.coordinator = in_loop(self._opened.enter_async_context(coordinating))
        self._reader = in_loop(c10d.open_table(self.endpoint, PATIENCE_S))
        patience = timedelta(seconds=PATIENCE_S)
        self._counter = TCPStore(
            "127.0.0.1", self.endpoint.port, None, False, patience, wait_for_workers=False
        )

    def _on_plan(self, run_id: str, plan: Plan) -> None:
        if plan.is_terminal:
            self.ended.append(run_id)

    @property
    def keys(self) -> int:
        """Return how many keys the store has."""
        return int(self._counter.num_keys())

    @property
    def listed(self) -> list[str]:
        """The runs in the store."""
        return in_loop(begun_runs(self._reader))

    @property
    def looked_after(self) -> set[str]:
        """Runs that the coordinator has in mind."""
        return {*self.coordinator._runs}

    def close(self) -> None:
        Blocking(self._reader).close()
        in_loop(self._opened.aclose())


@contextmanager
def served(state_dir: Path, keep_over_s: float = 0.0) -> Iterator[Served]:
    store = Served(state_dir, keep_over_s)
    try:
        yield store
    finally:
        store.close()


class QuickNode:
    """A node of one slot without workers, on one connection."""

    def __init__(self, store: Served, run_id: str, rules: Policy = RULES) -> None:
        self.name = f"i{next(_numbers)}"
        self.records = Blocking(in_loop(c10d.dial(store.endpoint, run_id, PATIENCE_S)))
        self.member = member("n", self.name, generation=0, policy=rules, bootstrap=None)
        self.plan: Plan | None = None

    def register(self) -> None:
        assert (
            self.records.register(self.member, Lease(self.name, self.member.policy.lease_ttl_s)) is not None
        )

    def hear(self) -> Plan:
        """The next plan."""
        plan = self.records.next_plan(self.plan.version if self.plan is not None else 0, PATIENCE_S)
        assert plan is not None
        self.plan = plan
        return plan

    def say(self, state: State, generation: int) -> None:
        bootstrap = Address("127.0.0.1", 4000) if state is State.READY else None
        self.records.write(replace(self.member, state=state, generation=generation, bootstrap=bootstrap))

    def run(self) -> World:
        """From the first plan to the verdict; the world that it was."""
        self.register()
        world = self.train()
        assert self.hear().phase is Phase.FINISHED
        self.say(State.LEFT, world.generation)
        return world

    def train(self) -> World:
        """Until it has succeeded."""
        while (plan := self.hear()).phase is not Phase.RUNNING:
            assert plan.phase is Phase.FORMING
            self.say(State.READY, plan.generation)
        assert plan.world is not None
        self.say(State.RUNNING, plan.generation)
        self.say(State.SUCCEEDED, plan.generation)
        return plan.world


def removed(store: Served, run_id: str) -> None:
    """Wait until nothing is kept of the run."""
    wait_for(f"the removal of {run_id}", lambda: run_id not in store.looked_after)


def all_removed(store: Served) -> None:
    """Wait until nothing is kept of any run."""
    wait_for("the removal of all runs", lambda: not store.looked_after)


# -- in the store ------------------------------------------------------------------------------------


def test_many_runs_leave_nothing_in_the_store(tmp_path: Path) -> None:
    with served(tmp_path) as store:

        def job(number: int) -> None:
            fingerprint = f"job-{number}"
            run_id = in_loop(c10d.agree_run_id(store.endpoint, fingerprint, f"run-{number}", PATIENCE_S))
            node = QuickNode(store, run_id)
            node.run()
            if number % 2:  # the others were killed before they could
                in_loop(c10d.release_run_id(store.endpoint, fingerprint, run_id, PATIENCE_S))
            node.records.close()

        for number in range(c10d_host.KEPT_RUNS):
            job(number)
        all_removed(store)
        before = store.keys
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(job, range(c10d_host.KEPT_RUNS, 60)))
        all_removed(store)
        assert {*store.ended} == {f"run-{number}" for number in range(60)}, "every run had its verdict"
        wait_for("as few keys as before", lambda: store.keys == before)
        wait_for("an empty list of runs", lambda: store.listed == [])


def test_a_long_run_is_removed_with_all_its_generations(tmp_path: Path) -> None:
    with served(tmp_path) as store:
        QuickNode(store, "short").run()
        removed(store, "short")
        before = store.keys
        node = QuickNode(store, "long")
        node.register()
        for _ in range(30):
            while (plan := node.hear()).phase is not Phase.RUNNING:
                node.say(State.READY, plan.generation)
            node.say(State.RUNNING, plan.generation)
            node.say(State.READY, plan.generation + 1)  # it dropped out
        kept = store.keys - before
        node.train()
        assert node.hear().phase is Phase.FINISHED
        node.say(State.LEFT, 32)
        removed(store, "long")
        assert kept > 16
        wait_for("as few keys as before", lambda: store.keys == before)


def test_nodes_of_a_kept_run_read_only_its_outcome(tmp_path: Path) -> None:
    with served(tmp_path, keep_over_s=600.0) as store:
        QuickNode(store, "run").run()
        late = QuickNode(store, "run")
        late.register()
        plan = late.hear()
        assert (plan.phase, plan.generation) == (Phase.FINISHED, 1)


def test_a_run_is_kept_as_long_as_a_node_of_it_lives(tmp_path: Path) -> None:
    """It may be slow to stop its workers: the verdict is there for it, and its records too."""
    with served(tmp_path) as store:
        node = QuickNode(store, "run")
        node.register()
        node.train()
        assert node.hear().phase is Phase.FINISHED
        for _ in range(3):
            QuickNode(store, f"other-{next(_numbers)}").run()
        assert "run" in store.looked_after
        again = Blocking(in_loop(c10d.dial(store.endpoint, "run", PATIENCE_S)))
        assert again.store_id == node.records.store_id
        outcome = again.read_plan()
        assert outcome is not None
        assert outcome.phase is Phase.FINISHED
        node.say(State.LEFT, 1)
        removed(store, "run")


def test_a_node_that_missed_the_removal_detects_it_and_starts_a_new_run_above_it(tmp_path: Path) -> None:
    """Its plan versions are those of the earlier run: it would wait for ever for a higher one."""
    with served(tmp_path) as store:
        sleeper = QuickNode(store, "run")
        for generation in (1, 2):
            assert QuickNode(store, "run").run().generation == generation
            if generation == 1:
                assert sleeper.hear().phase is Phase.FINISHED
            removed(store, "run")
        with pytest.raises(StoreLostError, match="removed the records of the earlier run"):
            sleeper.register()
        before = sleeper.records.store_id
        sleeper.records, sleeper.plan = Blocking(in_loop(c10d.dial(store.endpoint, "run", PATIENCE_S))), None
        assert sleeper.records.store_id != before, "for the node it is another store"
        assert sleeper.run().generation == 3


def test_a_run_whose_nodes_are_all_lost_ends_and_is_removed(tmp_path: Path) -> None:
    with served(tmp_path) as store:
        node = QuickNode(store, "abandoned", policy(1, 1, lease_s=0.5, join_s=0.5))
        node.register()
        node.hear()
        node.records.close()
        removed(store, "abandoned")
        assert "abandoned" in store.ended


def test_a_job_whose_run_id_was_agreed_again_keeps_it(tmp_path: Path) -> None:
    with served(tmp_path) as store:
        first = in_loop(c10d.agree_run_id(store.endpoint, "job", "first", PATIENCE_S))
        QuickNode(store, first).run()
        in_loop(c10d.release_run_id(store.endpoint, "job", "first", PATIENCE_S))
        assert in_loop(c10d.agree_run_id(store.endpoint, "job", "second", PATIENCE_S)) == "second"
        removed(store, "first")
        assert in_loop(c10d.agree_run_id(store.endpoint, "job", "third", PATIENCE_S)) == "second"


# -- on disk -----------------------------------------------------------------------------------------


def test_the_disk_keeps_the_newest_runs_and_those_of_agents_that_go_on(tmp_path: Path) -> None:
    disk = DiskThread("disk")
    own = Blocking(RunHistoryStore(tmp_path, disk=disk))
    own.save("going-on", on_disk(3))
    (tmp_path / "nodes" / "elsewhere").mkdir(parents=True)
    for number, run_id in enumerate(["elsewhere", *(f"run-{number}" for number in range(KEPT_RUNS + 5))]):
        Blocking(RunHistoryStore(tmp_path, disk=disk)).save(run_id, on_disk(3))  # by an agent of its own
        os.utime(tmp_path / "runs" / f"{run_id}.run", (number, number))  # the clock is coarser than this loop
    os.utime(tmp_path / "runs" / "going-on.run", (0, 0))
    own.save("ended", on_disk(3, outcome=Phase.FINISHED))
    own.settle("ended")
    own.save("newest", on_disk(4))
    left = {path.name.removesuffix(".run") for path in (tmp_path / "runs").iterdir()}
    kept = {f"run-{number}" for number in range(6, KEPT_RUNS + 5)}
    assert left == {"going-on", "elsewhere", "ended", "newest", *kept}
    assert own.load("going-on") == on_disk(3)
