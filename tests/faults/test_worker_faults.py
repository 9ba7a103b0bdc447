"""Workers that are killed, raise, hang, or leave something behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys

import pytest

from .cluster import MARGIN_S, Cluster
from .conftest import MakeCluster, on_both, on_both_in_turn
from .rules import charged, check_nothing_left, check_safety, see_it_end

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@on_both
def test_training_resumes_after_a_killed_worker_and_after_an_exception(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2")
    a, b = cluster.start("a"), cluster.start("b", 2)
    first = cluster.wait_training("a", "b")

    os.kill(cluster.pid_of("b/1"), signal.SIGKILL)
    second = cluster.wait_training("a", "b", after=first)
    assert a.lines("worker b/1", "SIGKILL")
    assert b.lines("worker b/1", "SIGKILL")

    cluster.order("a/0", "exception")
    third = cluster.wait_training("a", "b", after=second)
    for agent in (a, b):
        assert agent.lines("worker a/0", "exited with code 1", "RuntimeError: boom of the test"), (
            cluster.story()
        )

    assert cluster.world(first) == cluster.world(second) == cluster.world(third)
    assert [one["restarts"] for one in cluster.born()] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    see_it_end(cluster, restarts=2)


@on_both_in_turn
def test_a_crash_loop_exhausts_the_budget_and_ends_the_run_on_all_nodes(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2", "--max-restarts", "1")
    cluster.order("b/0", "always-exception")
    cluster.start("a")
    cluster.start("b")
    assert cluster.wait_end() == {"a": 1, "b": 1}, cluster.story()
    assert charged(cluster) == 1
    assert sorted({one["generation"] for one in cluster.born()}) == [1, 2]
    for agent in cluster.agents.values():
        assert agent.lines(
            '"level": "error"',
            "the run failed",
            "worker b/0 exited with code 1",
            "boom of the test",
            "the only restart is used",
        ), cluster.story()
    check_safety(cluster)
    check_nothing_left(cluster)


def test_a_hanging_worker_is_detected_and_all_workers_dump_their_stacks(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2", "--hang-timeout", "3", "--redirects", "2")
    a, b = cluster.start("a"), cluster.start("b")
    first = cluster.wait_training("a", "b")
    cluster.order("b/0", "hang")
    cluster.wait_training("a", "b", after=first)

    for agent in (a, b):
        assert agent.lines("worker b/0 (rank 1) is one all_reduce behind", "it is at train.py:")
    where = {"a": "all_reduce", "b": "obey"}
    for node, function in where.items():
        written = cluster.folder / "logs" / "job" / f"{first:06}" / node / "0" / "stderr.log"
        assert f"in {function}" in written.read_text()
    see_it_end(cluster, restarts=1)


def test_stacks_can_be_dumped_at_any_time_without_stopping_training(make_cluster: MakeCluster) -> None:
    run_id = f"job-{secrets.token_hex(4)}"
    cluster = make_cluster("2", "--redirects", "2", run_id=run_id)
    cluster.start("a")
    cluster.start("b")
    first = cluster.wait_training("a", "b")
    told = subprocess.run(
        [sys.executable, "-m", "elastic_agent", "stacks", run_id], capture_output=True, text=True, check=True
    )
    assert [line.split()[:2] for line in told.stdout.splitlines()] == [[run_id, "a/0"], [run_id, "b/0"]]
    for node in ("a", "b"):
        log = cluster.folder / "logs" / run_id / f"{first:06}" / node / "0" / "stderr.log"
        assert f"requested, see {log}" in told.stdout
        cluster.wait(f"the stacks of {node}", lambda: "in main" in log.read_text() or None)  # noqa: B023
    wait_more_steps(cluster)
    assert max(cluster.worlds()) == first
    see_it_end(cluster, restarts=0)


def wait_more_steps(cluster: Cluster) -> None:
    reached = cluster.steps()[-1]["step"]
    cluster.wait("more steps", lambda: cluster.steps()[-1]["step"] > reached + 5 or None)


def test_a_daemon_left_by_a_worker_is_gone_before_the_next_generation(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1")
    cluster.start("a")
    first = cluster.wait_training("a")
    cluster.order("a/0", "daemon")
    daemon = cluster.wait_daemon()
    cluster.order("a/0", "exit")
    started = cluster.wait_event("workers_started", "a", generation=first + 1)
    assert daemon not in cluster.marked_processes(), started
    cluster.wait_training("a", after=first)
    see_it_end(cluster, restarts=1)


def test_no_worker_process_outlives_a_killed_agent(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1")
    a = cluster.start("a")
    cluster.wait_training("a")
    cluster.order("a/0", "daemon")
    family = [a.guard, cluster.pid_of("a/0"), cluster.wait_daemon()]
    a.kill_agent()
    assert cluster.wait_gone(family, MARGIN_S) == []
    check_nothing_left(cluster)


def test_the_workers_of_a_killed_guard_are_killed_and_it_is_replaced(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2")
    a = cluster.start("a")
    cluster.start("b")
    first = cluster.wait_training("a", "b")
    worker, guard = cluster.pid_of("a/0"), a.guard
    os.kill(guard, signal.SIGKILL)
    assert cluster.wait_gone([worker]) == []
    cluster.wait_training("a", "b", after=first)
    assert a.guard != guard
    see_it_end(cluster, restarts=1)


@on_both_in_turn
def test_a_worker_and_another_node_lost_at_once_cost_no_restart(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1:3")
    cluster.start("a")
    cluster.start("b")
    c = cluster.start("c")
    first = cluster.wait_training("a", "b", "c")
    c.freeze_agent()  # it does not clear itself after the worker's end, however long the next line takes
    os.kill(cluster.pid_of("a/0"), signal.SIGKILL)
    c.kill_node()
    second = cluster.wait_training("a", "b", after=first)
    assert second == first + 1  # no world was tried before the lost node was cleared
    see_it_end(cluster, restarts=0, c=-signal.SIGKILL)
