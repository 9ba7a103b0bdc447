"""Stopped in good order: workers are told, save at one step and leave, and no step is lost or done twice."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.processes import NodeProcess
from tests.processes import status_field

from .cluster import HANDLING_NOTICES, Cluster
from .conftest import MakeCluster, on_both
from .rules import check_all_told_and_left, check_nothing_left

pytestmark = [pytest.mark.system, pytest.mark.prove]


def train(cluster: Cluster, *nodes: str, after: int = 0, arguments: tuple[str, ...] = (), **how: Any) -> int:
    """Start these nodes, the first as the store's host, one worker each; the generation in which all train."""
    cluster.start_host(nodes[0], script=HANDLING_NOTICES, arguments=arguments, **how)
    for node in nodes[1:]:
        cluster.start(node, script=HANDLING_NOTICES, arguments=arguments, **how)
    return cluster.wait_training(*nodes, after=after)


def check_every_step_once(cluster: Cluster) -> None:
    """Rank 0 took every step exactly once, whichever generation it was in."""
    taken = [step["step"] for step in cluster.steps() if step["rank"] == 0]
    assert taken == list(range(1, len(taken) + 1)), cluster.story()


def check_restarts(cluster: Cluster, restarts: int = 0) -> None:
    assert {worker["restarts"] for worker in cluster.born()} == {restarts}


# -- the run ends -------------------------------------------------------------------------------


SLURM_STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}


def test_a_signal_to_all_processes_of_a_slurm_step_lets_workers_save(make_cluster: MakeCluster) -> None:
    """Warm workers and cold ones, and the processes beside them. The controller cannot be asked here."""
    cluster = make_cluster("2", "--requeue", "never")
    step = {**SLURM_STEP, "SLURM_CONF": "/dev/null"}
    cluster.start_host("a", 2, script=HANDLING_NOTICES, **step)
    cluster.start("b", 1, "--worker-start", "cold", script=HANDLING_NOTICES, **{**step, "SLURM_PROCID": "1"})
    first = cluster.wait_training("a", "b")
    cluster.wait_event("spawner_ready", "a")
    for name in "ab":
        cluster.signal_all(name, signal.SIGUSR1)
    assert cluster.wait_end() == dict.fromkeys("ab", ExitCode.STOPPED), cluster.story()
    check_all_told_and_left(cluster, first, "walltime")
    check_every_step_once(cluster)
    assert not cluster.journal("spawner_died") + cluster.journal("guard_lost")
    check_nothing_left(cluster)


def test_workers_that_exit_on_the_signal_do_not_finish_the_run(
    make_cluster: MakeCluster,
) -> None:
    """The script knows nothing of notices; the signal reaches it, as in a systemd scope."""
    arguments = ("--blind", "--handles", "SIGUSR1")
    cluster = make_cluster("2")
    first = train(cluster, "a", "b", arguments=arguments)
    for name in "ab":
        cluster.signal_all(name, signal.SIGUSR1)
    assert cluster.wait_end() == dict.fromkeys("ab", ExitCode.STOPPED), cluster.story()
    check_all_told_and_left(cluster, first, "SIGUSR1")
    train(cluster, "a", "b", after=first, arguments=arguments)
    cluster.let_finish()
    assert set(cluster.wait_end().values()) == {ExitCode.FINISHED}
    check_every_step_once(cluster)
    check_restarts(cluster)


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
def test_workers_killed_by_the_signal_are_not_restarted_or_charged(
    make_cluster: MakeCluster, signum: signal.Signals
) -> None:
    """With no restart allowed, one that was charged would fail the run."""
    cluster = make_cluster("2", "--max-restarts", "0")
    first = train(cluster, "a", "b")
    for name in "ab":
        cluster.signal_all(name, signum)
    ends = set(cluster.wait_end().values())
    may_leave = (
        {ExitCode.DRAINED} if signum == signal.SIGTERM else set()
    )  # but for the last node, which ends the run
    assert ends - may_leave == {ExitCode.STOPPED}, cluster.story()
    assert max(cluster.worlds()) == first
    assert not cluster.journal("spawner_died") + cluster.journal("guard_lost")


def test_training_that_completes_during_a_stop_is_finished(make_cluster: MakeCluster) -> None:
    """Workers of a Slurm step ignore the signal, so their success is one: requeued, they would only do it again."""
    cluster = make_cluster("1", "--requeue", "never")
    cluster.start_host(
        "a", 2, script=HANDLING_NOTICES, arguments=("--blind",), SLURM_CONF="/dev/null", **SLURM_STEP
    )
    cluster.wait_training("a")
    cluster.signal_all("a", signal.SIGUSR1)
    cluster.wait_event("notice", "a")
    cluster.let_finish()
    assert cluster.wait_end() == {"a": ExitCode.FINISHED}, cluster.story()


def hears(agent: NodeProcess, signum: signal.Signals) -> bool:
    """Return whether the signal has a handler there."""
    return bool(int(status_field(agent.pid, "SigCgt"), 16) >> (signum - 1) & 1)


def test_a_notice_signal_to_a_starting_agent_is_kept(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1:3")
    first = train(cluster, "a", "b")
    late = cluster.start("c", script=HANDLING_NOTICES)
    cluster.wait("c to hear signals", lambda: hears(late, signal.SIGUSR1) or None)
    assert not cluster.journal(node="c"), "it still imports torch"
    late.signal(signal.SIGUSR1)
    assert cluster.wait_end() == dict.fromkeys("abc", ExitCode.STOPPED)
    check_all_told_and_left(cluster, first, "preempted")


# -- a node leaves, or comes --------------------------------------------------------------------


@on_both
def test_a_drained_node_that_returns_is_let_in_with_a_notice(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1:2")
    first = train(cluster, "a", "b")
    said = cluster.command("drain", "b", "--deadline", "40")
    assert (said.returncode, said.stderr) == (0, "")
    assert f"run {cluster.run_id}: draining b; workers that handle notices have 40 s to save" in said.stdout
    assert all(30 < left["left_s"] <= 40 for left in cluster.notes("left") if left["generation"] == first)
    assert f"run {cluster.run_id}: b has left; the other nodes continue" in said.stdout
    assert cluster.wait_end("b") == {"b": ExitCode.DRAINED}
    second = cluster.wait_training("a", after=first)
    check_all_told_and_left(cluster, first, "drain")

    cluster.wait("workers to be seen to heed", lambda: heeded(cluster, second))
    cluster.start("b", script=HANDLING_NOTICES)
    cluster.wait_training("a", "b", after=second)
    check_all_told_and_left(cluster, second, "grow")
    cluster.agents["b"].signal(signal.SIGUSR1)
    cluster.wait_end()
    check_every_step_once(cluster)
    check_restarts(cluster)


def heeded(cluster: Cluster, generation: int) -> bool:
    """Return whether an agent said that workers of this generation look at notices (its second word that they run)."""
    said = [line for line in cluster.journal("state") if line["generation"] == generation]
    return any(line.get("handles_notices") for line in said)
