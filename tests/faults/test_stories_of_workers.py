"""What happens when workers fail, hang or leave something behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.cli.support import elastic_agent

from .conftest import MakeCluster, on_both_to_prove
from .rules import assert_order, charged, check_nothing_left, check_safety, see_it_end

pytestmark = pytest.mark.system


@on_both_to_prove
def test_all_workers_restart_from_the_checkpoint_after_one_is_killed_or_raises(
    make_cluster: MakeCluster,
) -> None:
    """Two nodes train; each failure costs one restart, ranks and names stay, and training goes on where it was."""
    cluster = make_cluster("2")
    a, b = cluster.start("a"), cluster.start("b", 2)
    first = cluster.wait_training("a", "b")

    os.kill(cluster.pid_of("b/1"), signal.SIGKILL)
    second = cluster.wait_training("a", "b", after=first)
    assert_order(cluster, ("workers_stopped", "a", first), ("born", "b", second))
    assert_order(cluster, ("workers_stopped", "b", first), ("born", "a", second))

    cluster.order("a/0", "exception")
    third = cluster.wait_training("a", "b", after=second)
    for agent in (a, b):
        assert agent.lines("worker b/1", "SIGKILL"), cluster.story()

    def is_explained() -> bool | None:
        error = "root cause: worker a/0", "RuntimeError: boom of the test"
        return all(agent.lines(*error) for agent in (a, b)) or None

    cluster.wait("the root cause on both nodes", is_explained)
    assert cluster.world(first) == cluster.world(second) == cluster.world(third)
    assert [worker["restarts"] for worker in cluster.born()] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    see_it_end(cluster, restarts=2)


FULL_DISK = """
import errno, os, sys, time
from elastic_agent import client

place = client.current().placement
if place.restarts == 0 and place.rank == 1:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # HERE
open(f"{sys.argv[1]}/ready.{place.generation}.{place.rank}", "w").close()
while not os.path.exists(f"{sys.argv[1]}/finish"):
    time.sleep(0.01)
"""


def test_status_why_and_stacks_answer_while_the_run_goes_on(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """They show the run and its restart; the cause with worker, line and remedy; and where each worker is."""
    script = tmp_path / "full_disk.py"
    script.write_text(FULL_DISK)
    (line,) = (n for n, text in enumerate(FULL_DISK.splitlines(), 1) if text.endswith("# HERE"))
    cluster = make_cluster("1", "--redirects", "2", alone=True)
    run_id = str(cluster.run_id)
    agent = cluster.start("a", 2, script=script, arguments=(str(cluster.folder),))
    cluster.wait_event("state", "a", generation=2, state="running")
    ready = [cluster.folder / f"ready.2.{rank}" for rank in (0, 1)]
    cluster.wait("both workers", lambda: all(file.exists() for file in ready) or None)
    cluster.wait_said("a", "generation 1: root cause: ")

    shown = elastic_agent("status", run_id).stdout
    assert f"run {run_id} at " in shown
    assert "generation 2 running" in shown
    assert "restarts: 1 of 3 used" in shown

    told = elastic_agent("why", run_id, "--state-dir", str(cluster.folder / "state")).stdout
    assert "generation 1: root cause: worker a/1 (rank 1)" in told, told
    assert "OSError: [Errno 28] No space left on device" in told
    assert "remedy:" in told
    assert f'full_disk.py", line {line}, in <module>' in told

    def stacks() -> str | None:
        told = elastic_agent("stacks", run_id).stdout
        return told if told.count("full_disk.py") >= 2 else None

    asked = cluster.wait("the stacks of both workers", stacks)
    heads = [line for line in asked.splitlines() if line.startswith("worker")]
    assert [head.partition(",")[0] for head in heads] == ["worker a/0 (rank 0", "worker a/1 (rank 1"]
    cluster.let_finish()
    assert cluster.wait_end() == {"a": ExitCode.FINISHED}, cluster.story()
    assert max(cluster.worlds()) == 2, "nothing that was asked disturbed the run"
    assert not agent.lines("Traceback", "elastic_agent"), cluster.story()
    check_nothing_left(cluster)


@on_both_to_prove
def test_a_crash_loop_ends_the_run_on_all_nodes_when_the_restarts_are_used(make_cluster: MakeCluster) -> None:
    """Each agent exits with 1 and says why."""
    cluster = make_cluster("2", "--max-restarts", "1", alone=True)
    cluster.order("b/0", "always-exception")
    cluster.start("a")
    cluster.start("b")
    assert cluster.wait_end() == dict.fromkeys("ab", ExitCode.FAILED), cluster.story()
    assert charged(cluster) == 1
    assert sorted({worker["generation"] for worker in cluster.born()}) == [1, 2]
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


def test_no_process_outlives_its_generation_its_guard_or_its_agent(make_cluster: MakeCluster) -> None:
    """Not even a daemon that a worker left behind; a lost guard costs its workers, and is replaced."""
    cluster = make_cluster("1", alone=True)
    first = cluster.start_training("a")
    a = cluster.agents["a"]
    cluster.order("a/0", "daemon")
    daemon = cluster.wait_daemon()
    cluster.order("a/0", "exit")
    cluster.wait_event("workers_started", "a", generation=first + 1)
    assert daemon not in cluster.marked_processes(), cluster.story()

    second = cluster.wait_training("a", after=first)
    worker, guard = cluster.pid_of("a/0"), a.guard
    os.kill(guard, signal.SIGKILL)
    assert cluster.wait_gone([worker]) == []
    cluster.wait_training("a", after=second)
    assert a.guard != guard

    cluster.order("a/0", "daemon")
    cluster.wait("another daemon", lambda: len(cluster.notes("daemon")) == 2 or None)
    family = {pid for pid in cluster.marked_processes() if pid != a.pid}
    assert {a.guard, cluster.pid_of("a/0"), int(cluster.notes("daemon")[-1]["pid"])} <= family
    a.signal(signal.SIGKILL)
    assert cluster.wait_gone(family) == []
    check_nothing_left(cluster)


def test_a_hanging_worker_is_named_with_its_line_and_all_workers_restart(make_cluster: MakeCluster) -> None:
    """The log of its agent has the stacks of all workers."""
    cluster = make_cluster("2", "--hang-timeout", "5", "--max-restarts", "100", "--redirects", "2")
    a, b = cluster.start("a"), cluster.start("b")
    first = cluster.wait_training("a", "b")
    cluster.order("b/0", "hang")
    # A machine that stands still for so long hangs, too.
    for agent in (a, b):
        cluster.wait_said(agent.name, "worker b/0 (rank 1) is one all_reduce behind", "it is at train.py:")
    cluster.wait_training("a", "b", after=first)
    cluster.wait_said("b", "where the workers of generation 1 are:", "in all_reduce", "in obey")
    cluster.let_finish()
    assert cluster.wait_end() == dict.fromkeys("ab", ExitCode.FINISHED), cluster.story()
    assert charged(cluster) >= 1
    check_safety(cluster)
    check_nothing_left(cluster)
