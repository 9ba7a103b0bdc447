"""What happens when a node or a run is asked to stop: workers save and leave, and no step is lost."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from elastic_agent.exit_codes import ExitCode

from .cluster import COUNTING_SAMPLES, HANDLING_NOTICES, Cluster
from .conftest import MakeCluster, on_both_to_prove
from .rules import (
    check_all_told_and_left,
    check_every_step_once,
    check_nothing_left,
    check_saved_and_gone,
)

pytestmark = pytest.mark.system


def test_drain_returns_when_the_worker_of_the_node_has_saved_and_the_others_continue(
    make_cluster: MakeCluster,
) -> None:
    """The agent that hosts the store serves until the run is over, and exits with 6."""
    cluster = make_cluster("1:2", "--settle", "1000", alone=True)
    cluster.start_saving(a=2.0, b=0.0)
    done = cluster.command("drain", "z")
    assert done.returncode == ExitCode.USAGE
    assert f"run {cluster.run_id} has no node z; expected one of a, b" in done.stderr
    done = cluster.command("drain", "a")
    check_saved_and_gone(cluster, "a")
    assert (done.returncode, done.stderr) == (ExitCode.FINISHED, ""), cluster.story()
    stays, left = done.stdout.splitlines()[1:]
    run = f"run {cluster.run_id}"
    assert stays.startswith(f"{run}: the agent of a keeps running until the run ends, because it hosts the")
    assert left.startswith(f"{run}: a has left; the other nodes continue; to have it join again, start")
    cluster.wait_event("state", "b", generation=2, state="running")
    assert cluster.agents["a"].runs
    cluster.agents["b"].signal(signal.SIGTERM)
    assert cluster.wait_end() == {"a": ExitCode.DRAINED, "b": ExitCode.STOPPED}, cluster.story()
    check_nothing_left(cluster)


@on_both_to_prove
def test_stop_returns_when_the_workers_of_all_nodes_have_saved(make_cluster: MakeCluster) -> None:
    """All agents exit with 75."""
    cluster = make_cluster("2", alone=True)
    cluster.start_saving(a=0.0, b=2.0)
    done = cluster.command("stop")
    check_saved_and_gone(cluster, "a", "b")
    assert (done.returncode, done.stderr) == (ExitCode.FINISHED, ""), cluster.story()
    assert f"run {cluster.run_id} stopped" in done.stdout
    assert cluster.wait_end() == dict.fromkeys("ab", ExitCode.STOPPED)
    check_nothing_left(cluster)


def wait_heeding(cluster: Cluster, generation: int, *nodes: str) -> None:
    """Until the agents know that workers of this generation look at notices."""
    for node in nodes:
        cluster.wait_event("state", node, generation=generation, handles_notices=True)


@on_both_to_prove
def test_no_step_is_lost_or_repeated_when_a_node_leaves_and_when_the_run_stops_and_resumes(
    make_cluster: MakeCluster,
) -> None:
    """SIGTERM and SIGUSR1 become notices, at which all workers save at the same step; exit codes 6, 75 and 0."""
    cluster = make_cluster("1:2", "--settle", "1000", "--max-restarts", "0")
    cluster.start_host("a", script=HANDLING_NOTICES)
    cluster.start("b", script=HANDLING_NOTICES)
    first = cluster.wait_training("a", "b")
    wait_heeding(cluster, first, "a", "b")
    cluster.agents["b"].signal(signal.SIGTERM)
    second = cluster.wait_training("a", after=first)
    assert cluster.wait_end("b") == {"b": ExitCode.DRAINED}
    check_all_told_and_left(cluster, first, "drain")

    cluster.agents["a"].signal(signal.SIGUSR1)
    assert cluster.wait_end("a") == {"a": ExitCode.STOPPED}
    check_all_told_and_left(cluster, second, "preempted")

    cluster.options = ()  # it resumes without b
    cluster.start("a", script=HANDLING_NOTICES)
    cluster.wait_training("a", after=second)
    cluster.let_finish()
    assert cluster.wait_end("a") == {"a": ExitCode.FINISHED}, cluster.story()
    check_every_step_once(cluster)
    assert {worker["run_id"] for worker in cluster.born()} == {cluster.run_id}
    check_nothing_left(cluster)


def test_workers_that_do_not_leave_in_the_time_of_a_notice_get_sigterm(make_cluster: MakeCluster) -> None:
    """They may save then; the run is stopped, and its agents exit with 75."""
    cluster = make_cluster("1", "--notice-time", "1", alone=True)
    cluster.start_saving(a=0.0)
    cluster.agents["a"].signal(signal.SIGUSR1)
    assert cluster.wait_end() == {"a": ExitCode.STOPPED}, cluster.story()
    (told,), (saving,) = cluster.journal("notice", "a"), cluster.notes("saving")
    assert told["boottime_s"] < saving["boottime_s"]
    check_saved_and_gone(cluster, "a")


def test_each_sample_is_used_once_though_a_node_joins_in_the_middle_of_the_epoch(
    make_cluster: MakeCluster,
) -> None:
    """A plain DDP script with ElasticBatchSampler, on one worker and then on three."""
    samples = 3_007  # the last step has 7
    options = ("--samples", str(samples), "--global-batch", "12", "--epochs", "1")
    cluster = make_cluster("1:2")
    cluster.start_host("a", script=COUNTING_SAMPLES, arguments=options)
    first = cluster.wait_training("a")
    wait_heeding(cluster, first, "a")
    cluster.start("b", 2, script=COUNTING_SAMPLES, arguments=options)
    second = cluster.wait_training("a", "b", after=first)
    cluster.let_finish()
    assert cluster.wait_end() == dict.fromkeys("ab", ExitCode.FINISHED), cluster.story()
    used = Counter(sample for line in cluster.steps() for sample in line["samples"])
    assert used == dict.fromkeys(range(samples), 1), cluster.story()
    assert {step["generation"] for step in cluster.steps()} == {first, second}
