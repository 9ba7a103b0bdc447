"""Stock torchrun over our rendezvous: it starts, grows, recovers, shrinks and ends, and prints nothing about it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server import api

from elastic_agent.testing.processes import freeze, thaw
from elastic_agent.torchrun.handler import EXIT_BARRIER
from tests.etcd import EtcdCluster
from tests.waiting import wait_for

from .support import LEASE_S
from .torchruns import MARGIN_S, PATIENCE_S, Stage, places


@pytest.mark.system
@pytest.mark.prove
def test_two_nodes_with_unequal_workers_train_and_end(stage: Stage) -> None:
    """Real gloo workers: they find each other over the store of their generation."""
    a = stage.start("a", 2, "2", script_args=("gloo",))
    b = stage.start("b", 1, "2", script_args=("gloo",))
    workers = stage.workers(3)
    assert [worker.rank for worker in workers] == [0, 1, 2]
    assert {worker.total for worker in workers} == {7.0}
    by_node = {node: [worker.rank for worker in workers if worker.node == node] for node in "ab"}
    assert by_node in ({"a": [0, 1], "b": [2]}, {"a": [1, 2], "b": [0]}), "ranks of a node are neighbours"
    assert {worker.env["TORCHELASTIC_USE_AGENT_STORE"] for worker in workers} == {"True"}
    for worker in workers:
        worker.exit(0)
    assert (stage.end(a), stage.end(b)) == (0, 0), stage.story()
    assert a.said() + b.said() == ""


@pytest.mark.system
@pytest.mark.prove
def test_a_host_name_that_does_not_resolve_is_named_at_once(stage: Stage) -> None:
    stage.endpoint = "no-such-machine.invalid:29400"
    torchrun = stage.start("a", 1, "2")
    wait_for("the reason", lambda: "does not resolve" in torchrun.said())
    assert "the store at no-such-machine.invalid:29400 does not answer, still trying: " in torchrun.said()


@pytest.mark.system
@pytest.mark.prove
def test_one_of_two_nodes_in_etcd_continues_when_the_other_is_lost(stage: Stage, tmp_path: Path) -> None:
    with EtcdCluster(tmp_path) as etcd:
        stage.backend, stage.endpoint, stage.lease_s = "elastic-etcd", etcd.endpoints, LEASE_S
        a = stage.start("a", 2, "1:2")
        assert places(stage.workers(2)) == [("a", 0, 0, 0, 2), ("a", 1, 0, 1, 2)]
        b = stage.start("b", 1, "1:2", ELASTIC_AGENT_ETCD_PASSWORD="no worker's business")
        grown = stage.workers(3)
        assert places(grown) == [("a", 0, 0, 0, 3), ("a", 1, 0, 1, 3), ("b", 2, 1, 0, 3)]
        assert not [
            name for worker in grown for name in worker.env if "ETCD" in name or name == "GRPC_VERBOSITY"
        ]
        b.kill_node()
        left = stage.workers(2)
        assert places(left) == [("a", 0, 0, 0, 2), ("a", 1, 0, 1, 2)]
        for worker in left:
            worker.exit(0)
        assert stage.end(a) == 0, stage.story()
        (ended,) = etcd.keys("/elastic-agent/1/r/")
        assert ended.endswith("/ended"), "the rest of a finished run is removed"


@pytest.mark.system
def test_a_run_grows_and_continues_after_a_failure_and_without_a_node_that_left(stage: Stage) -> None:
    a = stage.start("a", 2, "1:2", "--max-restarts", "1")
    assert places(stage.workers(2)) == [("a", 0, 0, 0, 2), ("a", 1, 0, 1, 2)]

    b = stage.start("b", 1, "1:2")
    grown = stage.workers(3)
    both = [("a", 0, 0, 0, 3), ("a", 1, 0, 1, 3), ("b", 2, 1, 0, 3)]
    assert places(grown) == both, "a came first and stays first"
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in grown} == {"0"}, "growing costs no restart"

    grown[1].exit(1)
    again = stage.workers(3)
    assert places(again) == both
    assert [worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in again] == ["1", "1", "0"], (
        "a counts, b does not"
    )
    stores = {(worker.env["MASTER_ADDR"], worker.env["MASTER_PORT"]) for worker in (grown[0], again[0])}
    assert len(stores) == 2, "each world has a store of its own"

    os.kill(b.process.pid, signal.SIGTERM)
    alone = stage.workers(2)  # with a lease of a minute: b was heard to leave
    assert places(alone) == [("a", 0, 0, 0, 2), ("a", 1, 0, 1, 2)]
    assert stage.end(b) != 0
    for worker in alone:
        worker.exit(0)
    assert stage.end(a) == 0, stage.story()
    assert "Traceback" not in a.said()
    assert "elastic_agent" not in a.said()


@pytest.mark.system
@pytest.mark.prove
def test_a_run_recovers_from_a_frozen_and_a_lost_node(stage: Stage) -> None:
    stage.lease_s = LEASE_S
    a = stage.start("a", 2, "1:2")
    stage.workers(2)
    b = stage.start("b", 1, "1:2")
    both = [("a", 0, 0, 0, 3), ("a", 1, 0, 1, 3), ("b", 2, 1, 0, 3)]
    assert places(stage.workers(3)) == both

    freeze(b.process.pid)
    assert places(stage.workers(2)) == [("a", 0, 0, 0, 2), ("a", 1, 0, 1, 2)]
    thaw(b.process.pid)
    assert places(stage.workers(3)) == both

    killed_s = time.monotonic()
    b.kill_node()
    alone = stage.workers(2)
    assert places(alone) == [("a", 0, 0, 0, 2), ("a", 1, 0, 1, 2)]
    took_s = alone[0].came_s - killed_s
    assert LEASE_S * 0.6 < took_s < LEASE_S + MARGIN_S + 10.0, took_s
    for worker in alone:
        worker.exit(0)
    assert stage.end(a) == 0, stage.story()
    assert "this agent was paused for" in b.said()


@pytest.mark.system
@pytest.mark.prove
def test_another_torchrun_of_the_machine_hosts_the_store_of_a_frozen_one(stage: Stage) -> None:
    stage.lease_s = LEASE_S
    a = stage.start("a", 1, "1:2")
    stage.workers(1)
    b = stage.start("b", 1, "1:2")
    stage.workers(2)
    freeze(a.process.pid)
    assert places(stage.workers(1)) == [("b", 0, 0, 0, 1)]
    thaw(a.process.pid)
    after = stage.workers(2)
    assert {worker.node for worker in after} == {"a", "b"}
    for worker in after:
        worker.exit(0)
    assert (stage.end(a), stage.end(b)) == (0, 0), stage.story()


@pytest.mark.system
@pytest.mark.prove
def test_a_terminated_torchrun_leaves_at_once_and_so_does_one_that_gives_up(stage: Stage) -> None:
    a = stage.start("a", 1, "1:3", "--rdzv-conf", "lease_ttl=60,settle=0.3")
    stage.workers(1)
    b = stage.start("b", 1, "1:3", "--rdzv-conf", "lease_ttl=60,settle=0.3")
    stage.workers(2)

    os.kill(b.process.pid, signal.SIGTERM)
    (alone,) = stage.workers(1)  # with a lease of a minute: b was heard to leave
    assert places([alone]) == [("a", 0, 0, 0, 1)]
    assert stage.end(b) not in (0, -signal.SIGABRT), stage.story()
    assert "SignalException" in b.said()

    c = stage.start("c", 1, "1:3", "--rdzv-conf", "lease_ttl=60,settle=0.3")
    pair = stage.workers(2)
    assert [worker.node for worker in pair] == ["a", "c"]
    pair[1].exit(3)
    (alone,) = stage.workers(1)
    assert stage.end(c) == 1
    assert "exitcode  : 3" in c.said()
    alone.exit(0)
    assert stage.end(a) == 0, stage.story()


LAUNCHING = """
import asyncio, os, sys, threading
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def work(number):
    return number * (1 + int(os.environ["RANK"]))

async def launch():
    config = LaunchConfig(1, 1, 2, run_id="job", rdzv_backend="elastic", rdzv_endpoint=sys.argv[1], start_method="fork")
    return elastic_launch(config, work)(21)

print(asyncio.run(launch()), [thread.name for thread in threading.enumerate()])
"""


@pytest.mark.system
@pytest.mark.prove
def test_a_program_with_an_event_loop_and_forked_workers_launches(stage: Stage) -> None:
    state = {"XDG_STATE_HOME": str(stage.folder / "state")}
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCHING, stage.endpoint],
        capture_output=True,
        env={**os.environ, **state},
        timeout=PATIENCE_S,
        check=True,
    )
    assert ended.stdout == b"{0: 21, 1: 42} ['MainThread']\n"
    assert ended.stderr == b""


FORKING = """
import os, signal, sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from elastic_agent.torchrun.plugin import elastic_handler
handler = elastic_handler()(RendezvousParameters("elastic", sys.argv[1], "job", 1, 1))
handler.next_rendezvous()
child = os.fork()
if child:
    print(handler._node._stores.pid, child, flush=True)
signal.pause()
"""


def test_the_stores_of_a_killed_torchrun_end_although_a_forked_process_lives(stage: Stage) -> None:
    """That process has inherited torchrun's end of the line to the stores, which so stays open."""
    command = [sys.executable, "-c", FORKING, stage.endpoint]
    state = {"XDG_STATE_HOME": str(stage.folder / "state")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **state}) as torchrun:
        assert torchrun.stdout is not None
        stores, child = map(int, torchrun.stdout.readline().split())
        handle = os.pidfd_open(stores)
        try:
            torchrun.kill()
            torchrun.wait()
            assert select.select([handle], [], [], PATIENCE_S)[0], "they serve without a coordinator"
        finally:
            os.close(handle)
            for process in (child, stores):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


@pytest.mark.system
@pytest.mark.prove
def test_repeating_a_command_starts_a_new_run_also_with_unusual_names(stage: Stage) -> None:
    for _ in range(2):
        a = stage.start("a", 1, "1", "--rdzv-id", "my job, no. 7 (ü)")
        (worker,) = stage.workers(1)
        assert worker.env["TORCHELASTIC_RUN_ID"] == "my job, no. 7 (ü)"
        worker.exit(0)
        assert stage.end(a) == 0, stage.story()
        assert a.said() == ""


def test_torchs_name_of_the_exit_barrier_is_unchanged() -> None:
    assert api._TERMINAL_STATE_SYNC_ID == EXIT_BARRIER, (
        "torch renamed the keys of its exit barrier: without them a torchrun whose workers are done counts as "
        "running until it ends"
    )
