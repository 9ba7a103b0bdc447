"""What happens when nodes are frozen, killed, come, or are not let in."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.processes import freeze
from tests.cli.support import elastic_agent

from .cluster import EXPIRING_LEASE_S
from .conftest import MakeCluster, on_both_to_prove
from .leaks import check_no_leak, secret_file
from .rules import assert_order, charged, check_nothing_left, check_safety, see_it_end

pytestmark = pytest.mark.system


def test_a_frozen_node_is_fenced_before_the_others_go_on_and_can_return(make_cluster: MakeCluster) -> None:
    """Its guard kills its workers when its lease expires. No restart is charged."""
    cluster = make_cluster("1:2", alone=True, lease_s=EXPIRING_LEASE_S)
    cluster.start_host("a")
    b = cluster.start("b")
    first = cluster.wait_training("a", "b")

    worker = cluster.pid_of("b/0")
    freeze(b.pid)
    assert cluster.wait_gone([worker]) == []
    second = cluster.wait_training("a", after=first)
    b.thaw()
    assert "this agent was paused for" in cluster.wait_event("lease_lost", "b")["reason"]
    cluster.wait_training("a", "b", after=second)
    see_it_end(cluster, restarts=0)  # rule 2: no worker of b was left when those of a were started again


def test_another_agent_of_the_machine_takes_over_the_store_of_a_killed_host(
    make_cluster: MakeCluster,
) -> None:
    """The others go on without it, and it gets its seat back."""
    cluster = make_cluster("1:2", alone=True, lease_s=EXPIRING_LEASE_S)
    a = cluster.start_host("a")
    b = cluster.start("b")
    first = cluster.wait_training("a", "b")
    a.kill_node()
    second = cluster.wait_training("b", after=first)
    assert b.lines("hosting the store"), cluster.story()
    cluster.start("a")
    third = cluster.wait_training("a", "b", after=second)
    assert cluster.world(first) == cluster.world(third)
    see_it_end(cluster, restarts=0)


def test_a_run_whose_processes_were_all_killed_resumes_above_its_generation(
    make_cluster: MakeCluster,
) -> None:
    """With the same names, though none was given, the restarts that are left, and its history."""
    cluster = make_cluster("1", "--max-restarts", "1", alone=True, run_id=None, lease_s=EXPIRING_LEASE_S)

    def start() -> str:
        count = len(cluster.journal("agent_started"))
        cluster.start("some", 2, node_id=None)
        cluster.wait("its start", lambda: len(cluster.journal("agent_started")) > count or None)
        return str(cluster.journal("agent_started")[-1]["node"])

    node = start()
    first = cluster.wait_training(node)
    cluster.order(f"{node}/0", "exit")
    second = cluster.wait_training(node, after=first)
    records, cause = cluster.folder / "state" / "status", f"root cause: worker {node}/0"
    cluster.wait(
        "the record of it",
        lambda: any(cause in file.read_text() for file in records.glob("*/*.json")) or None,
    )
    cluster.agents["some"].kill_node()
    assert cluster.wait_end() == {"some": -signal.SIGKILL}
    assert start() == node
    third = cluster.wait_training(node, after=second)
    told = elastic_agent("why", str(cluster.born()[0]["run_id"])).stdout
    assert f"generation {first}: {cause}" in told, f"{told}\n{cluster.story()}"
    assert cluster.world(first) == cluster.world(third)
    assert len({worker["run_id"] for worker in cluster.born()}) == 1
    see_it_end(cluster, restarts=1)


@on_both_to_prove
def test_nodes_with_different_numbers_of_workers_join_and_leave_without_a_charge(
    make_cluster: MakeCluster,
) -> None:
    """The first world has enough nodes; ranks are contiguous; a node that gets SIGTERM leaves with 6."""
    cluster = make_cluster("2:3", alone=True)
    cluster.start_host("a", 2)
    cluster.wait_said("a", "waiting for 1 more node (at least 2 required)")
    b = cluster.start("b")
    first = cluster.wait_training("a", "b")
    assert cluster.world(first) == {"a": (2, 0), "b": (1, 2)}
    assert min(cluster.worlds()) == first, "a did not train alone before"

    cluster.start("c", 2)
    second = cluster.wait_training("a", "b", "c", after=first)
    assert cluster.world(second) == {"a": (2, 0), "b": (1, 2), "c": (2, 3)}

    b.signal(signal.SIGTERM)
    third = cluster.wait_training("a", "c", after=second)
    assert cluster.wait_end("b") == {"b": ExitCode.DRAINED}
    assert b.lines("this node has left the run", "SIGTERM", "start the same command here again"), (
        cluster.story()
    )
    assert cluster.world(third) == {"a": (2, 0), "c": (2, 2)}
    assert_order(cluster, ("workers_stopped", "b", second), ("born", "a", third))
    assert not cluster.journal("lease_lost"), "the others did not wait for its lease"
    see_it_end(cluster, restarts=0, b=ExitCode.DRAINED)


def test_a_run_without_enough_nodes_ends_after_the_join_timeout(make_cluster: MakeCluster) -> None:
    """Its agents exit with 3, and say who is missing."""
    cluster = make_cluster("2", "--join-timeout", "5", alone=True)
    a = cluster.start("a", 2)
    assert cluster.wait_end() == {"a": ExitCode.TOO_FEW_NODES}, cluster.story()
    assert a.lines("only 1 of at least 2 nodes joined within 5 s", "a (2 workers)", "1 more needed"), a.said()
    assert charged(cluster) == 0
    check_safety(cluster)
    check_nothing_left(cluster)


def test_a_server_coordinates_runs_and_outlives_their_agents(make_cluster: MakeCluster) -> None:
    """``elastic-agent serve``: no agent hosts the store, and it serves the next run."""
    one = make_cluster("1", alone=True)
    other = make_cluster("1", alone=True, port=one.port)
    server = one.serve("server")
    clusters = one, other
    for cluster in clusters:
        agent = cluster.start("a")
        cluster.wait_training("a")
        assert not agent.lines("hosting the store"), cluster.story()
        see_it_end(cluster, restarts=0)
        one.wait_said("server", "run finished", f'"{cluster.run_id}"')
    assert server.runs
    server.signal(signal.SIGTERM)
    assert server.process.wait() == ExitCode.FINISHED
    assert server.lines("SIGTERM received", "no run uses"), server.said()


def test_agents_without_the_secret_of_a_run_are_refused_and_others_let_in(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """One line says what to do, and the exit code is 4; the run is not disturbed."""
    cluster = make_cluster("1:4", alone=True)
    ours = "--secret-file", secret_file(tmp_path, "ours")
    a = cluster.start_host("a", 1, *ours)
    first = cluster.wait_training("a")
    without = cluster.start("without")
    other = cluster.start("other", 1, "--secret-file", secret_file(tmp_path, "theirs"))
    ends = cluster.wait_end("without", "other")
    assert set(ends.values()) == {ExitCode.NO_STORE}, cluster.story()
    assert len(without.lines("accepts only agents with its secret", "pass the same --secret-file")) == 1
    assert len(other.lines("has another secret", "give every agent the same --secret-file")) == 1
    told = len(a.lines("refused a connection to the store", "another secret")) + len(
        a.lines("refused a connection to the store", "has no secret")
    )
    assert told == 1, f"both are on this machine: {cluster.story()}"
    cluster.wait_steps(10)
    assert {step["generation"] for step in cluster.steps()} == {first}
    cluster.start("c", 1, *ours)
    cluster.wait_training("a", "c", after=first)
    see_it_end(cluster, restarts=0, without=ends["without"], other=ends["other"])


def test_no_worker_and_no_log_sees_the_secret_of_a_run(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Nor a module that is preloaded, nor another process of the agent."""
    cluster = make_cluster("1", "--preload", "looks_around")
    check_no_leak(cluster, tmp_path, "the-secret-of-this-run", "ELASTIC_AGENT_SECRET")
