"""The store is served on a machine that does not train, as `elastic-agent serve` does it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from elastic_agent.testing.node import NodeProcess
from tests.names import unique

from .cluster import SHORT_LEASE_S, Cluster
from .conftest import MakeCluster
from .machines import SUBNET, Machines, built
from .rules import check_nothing_left, check_safety, see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]

HEAD = f"{SUBNET}.1"
LONG_LEASE = ("--lease-ttl", "30")


@pytest.fixture
def machines() -> Iterator[Machines]:
    with built("head", "a", "b") as found:
        yield found


def serve(cluster: Cluster, machines: Machines) -> NodeProcess:
    return cluster.serve("head", within=machines.within("head"))


def connections(cluster: Cluster) -> int:
    return len(cluster.journal("connected"))


def wait_for_steps_after(cluster: Cluster, generation: int, reconnected: int) -> None:
    """Until both nodes found the new store, and took three more steps in the same generation."""
    cluster.wait("both to be back", lambda: connections(cluster) >= reconnected)
    seen = max(one["step"] for one in cluster.steps())
    cluster.wait(
        "steps to go on",
        lambda: any(
            one["step"] >= seen + 3 and one["generation"] == generation for one in cluster.steps()[-8:]
        ),
    )


def test_workers_continue_while_the_server_is_killed_or_upgraded(
    machines: Machines, make_cluster: MakeCluster
) -> None:
    cluster = make_cluster("2", *LONG_LEASE, endpoint_host=HEAD)
    server = serve(cluster, machines)
    for node in ("a", "b"):
        machines.start(cluster, node)
    generation = cluster.wait_training("a", "b")
    workers = {one["pid"] for one in cluster.born()}
    cluster.wait_said("head", "run started")
    reconnected = connections(cluster)

    server.kill_agent()
    assert server.process.wait(10) == -signal.SIGKILL
    server = serve(cluster, machines)
    reconnected += 2
    wait_for_steps_after(cluster, generation, reconnected)
    cluster.wait_said("head", "run resumed", "continues without a restart")

    server.terminate()
    assert server.process.wait(10) == 0
    assert server.lines("SIGTERM received", f"still used by 1 run ({cluster.run_id})")
    serve(cluster, machines)
    wait_for_steps_after(cluster, generation, reconnected + 2)
    cluster.wait_said("head", "run resumed", "continues without a restart")

    assert {one["pid"] for one in cluster.born()} == workers, "no worker was touched"
    assert {*cluster.worlds()} == {generation}
    assert not cluster.journal("lease_lost")
    see_it_end(cluster, restarts=0)
    cluster.wait_said("head", "run finished")


def test_a_server_that_returns_after_the_lease_forms_the_next_generation(
    machines: Machines, make_cluster: MakeCluster
) -> None:
    cluster = make_cluster("2", endpoint_host=HEAD)
    server = serve(cluster, machines)
    for node in ("a", "b"):
        machines.start(cluster, node)
    first = cluster.wait_training("a", "b")
    workers = {one["pid"] for one in cluster.born()}
    server.kill_agent()
    for node in ("a", "b"):
        cluster.wait_event("lease_lost", node)
    assert cluster.wait_gone(workers, 2 * SHORT_LEASE_S) == []
    serve(cluster, machines)
    second = cluster.wait_training("a", "b", after=first)
    assert second == first + 1
    assert cluster.world(first) == cluster.world(second)
    see_it_end(cluster, restarts=0)


def test_runs_share_a_server_that_outlives_their_first_nodes(
    machines: Machines, make_cluster: MakeCluster
) -> None:
    one = make_cluster("1:2", endpoint_host=HEAD, run_id=unique("one"))
    other = make_cluster("1", endpoint_host=HEAD, port=one.port, run_id=unique("other"))
    third = make_cluster("1", endpoint_host=HEAD, port=one.port, run_id=unique("third"))
    server = serve(one, machines)
    a = machines.start(one, "a")
    machines.start(other, "b")
    first = one.wait_training("a")
    machines.start(one, "b")
    second = one.wait_training("a", "b", after=first)
    untouched = other.wait_training("b")

    a.kill_node()  # the one that came first
    one.wait_training("b", after=second)
    assert not one.agents["b"].lines("hosting the store")
    assert not any(line["replaced"] for line in one.journal("connected"))

    see_it_end(other, restarts=0)
    machines.start(third, "a")
    third.wait_training("a")
    see_it_end(third, restarts=0)
    assert {*other.worlds()} == {untouched}
    one.wait_said("head", "run finished", f'"{other.run_id}"')
    one.wait_said("head", "run finished", f'"{third.run_id}"')
    assert len(server.lines("run started")) == 3
    see_it_end(one, restarts=0, a=-signal.SIGKILL)
    server.terminate()
    assert server.process.wait(10) == 0
    assert server.lines("no run uses")
    for cluster in (one, other, third):
        check_safety(cluster)
        check_nothing_left(cluster)
