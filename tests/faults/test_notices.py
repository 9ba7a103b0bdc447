"""Stopped in good order: workers are told, save at one step and leave, and no step is lost or done twice."""

from __future__ import annotations

import signal

import pytest

from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.processes import NodeProcess
from tests.processes import status_field

from .cluster import HANDLING_NOTICES, Cluster
from .conftest import MakeCluster
from .rules import check_all_told_and_left, check_every_step_once, check_nothing_left

pytestmark = [pytest.mark.system, pytest.mark.prove]


def train(cluster: Cluster, *nodes: str) -> int:
    """Start these nodes, the first as the store's host, one worker each; the generation in which all train."""
    cluster.start_host(nodes[0], script=HANDLING_NOTICES)
    for node in nodes[1:]:
        cluster.start(node, script=HANDLING_NOTICES)
    return cluster.wait_training(*nodes)


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
