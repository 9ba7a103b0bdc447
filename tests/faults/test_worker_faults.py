"""Workers that are killed, or fail again and again: when the run goes on, and when it is given up."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode

from .conftest import MakeCluster, on_both
from .rules import charged, check_nothing_left, check_safety, see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]


@on_both
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


STEPS_AND_A_TYPO = """
from elastic_agent import client

for step in range(1, 6):
    client.heartbeat(step)
raise ValueError("a typo")
"""


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
