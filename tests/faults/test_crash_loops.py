"""Workers that fail again and again: when the run goes on, how fast, and when it is given up."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode

from .cluster import Cluster
from .conftest import MakeCluster
from .rules import charged, check_nothing_left, check_safety, see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]

WINDOW_S = 1.0

STEPS_AND_A_TYPO = """
from elastic_agent import client

for step in range(1, 6):
    client.heartbeat(step)
raise ValueError("a typo")
"""


def kill_worker(cluster: Cluster) -> None:
    os.kill(cluster.pid_of("a/0"), signal.SIGKILL)


def wait_progress(cluster: Cluster, generation: int) -> None:
    """Until this generation trained for longer than a window."""

    def look() -> bool | None:
        times = [one["boottime_s"] for one in cluster.steps() if one["generation"] == generation]
        return max(times, default=0.0) - min(times, default=0.0) > 1.2 * WINDOW_S or None

    cluster.wait("progress", look)


def test_the_same_error_before_any_progress_ends_the_run_after_one_retry(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2")
    for worker in ("a/0", "b/0", "b/1"):
        cluster.order(worker, "typo")
    cluster.start("a")
    cluster.start("b", 2)
    assert cluster.wait_end() == {"a": ExitCode.FAILED, "b": ExitCode.FAILED}, cluster.story()
    assert sorted({one["generation"] for one in cluster.born()}) == [1, 2]
    assert charged(cluster) == 1
    for agent in cluster.agents.values():
        assert agent.lines(
            "the run failed: the same failure repeated without progress: worker",
            "exited with code 1: ValueError: a typo of the test",
            "; remove the cause, then start the run again",
        ), cluster.story()
    check_safety(cluster)
    check_nothing_left(cluster)


def test_the_same_error_at_the_same_step_ends_the_run_after_two_retries(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(STEPS_AND_A_TYPO)
    cluster = make_cluster("1", "--max-restarts", "9")
    a = cluster.start("a", script=script)
    assert cluster.wait_end() == {"a": ExitCode.FAILED}, cluster.story()
    assert a.lines("the run failed: the same failure repeated without progress: worker"), cluster.story()
    assert a.lines("forming generation 3"), cluster.story()
    assert charged(cluster) == 2, "the first time, five steps were progress"


def test_different_errors_use_the_budget_and_restarts_are_delayed(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1", "--max-restarts", "2")
    cluster.order("a/0", "typos")
    a = cluster.start("a")
    assert cluster.wait_end() == {"a": ExitCode.FAILED}, cluster.story()
    assert a.lines("the run failed", "typo d of the test; all 2 restarts are used"), cluster.story()
    assert a.lines("forming generation 3", "typo c of the test; restarting in 1 s"), cluster.story()
    born = [one["boottime_s"] for one in cluster.born()]
    failed = [one["exited_boottime_s"] for one in cluster.journal("worker_exited")]
    assert len(born) == 3, cluster.story()
    assert born[2] - failed[1] >= 1.0, cluster.story()


def test_failures_are_forgiven_while_training_makes_progress(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1", "--max-restarts", "1", "--restart-window", str(WINDOW_S))
    cluster.start("a")
    generation = cluster.wait_training("a")
    for _ in range(3):
        kill_worker(cluster)
        generation = cluster.wait_training("a", after=generation)
        wait_progress(cluster, generation)
    see_it_end(cluster, restarts=3)


def test_a_stopped_run_resumes_with_its_remaining_restarts(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1", "--max-restarts", "1", "--notice-time", "0.2")
    cluster.start("a")
    first = cluster.wait_training("a")
    kill_worker(cluster)
    second = cluster.wait_training("a", after=first)
    cluster.agents["a"].signal(signal.SIGUSR1)
    assert cluster.wait_end() == {"a": ExitCode.STOPPED}, cluster.story()
    a = cluster.start("a")
    cluster.wait_training("a", after=second)
    kill_worker(cluster)
    assert cluster.wait_end() == {"a": ExitCode.FAILED}, cluster.story()
    assert a.lines("the run failed", "the only restart is used"), cluster.story()
