"""Invalid input from the network or the user, and names that are taken: reported clearly, without effect on others."""

from __future__ import annotations

import subprocess

import pytest

from .conftest import MakeCluster, on_both
from .rules import check_one_error, see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]


def test_an_unreachable_endpoint_is_given_up_after_the_timeout(make_cluster: MakeCluster) -> None:
    # no network but a loopback: nothing is sent anywhere
    alone = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"')
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here (root is needed)")
    said = {
        "192.0.2.1": (
            "no route to the network",
            "check that the endpoint is an address of one of the machines",
        ),
        "no-such-machine.invalid": ("does not resolve on this machine",),
    }
    clusters = {host: make_cluster("2", "--rdzv-conf", "join_timeout=4", endpoint_host=host) for host in said}
    for cluster in clusters.values():
        cluster.start("a", within=alone)
    for host, words in said.items():
        cluster = clusters[host]
        cluster.wait_said("a", "waiting for the store", host, words[0])
        assert cluster.wait_end() == {"a": 4}, cluster.story()
        check_one_error(cluster, "4 s", *words)


def test_a_machine_without_a_loopback_network_is_told_at_once(make_cluster: MakeCluster) -> None:
    """As in a namespace that a sandbox has made: neither the store nor workers of one machine can be reached."""
    sandbox = ("unshare", "--net")
    if subprocess.run([*sandbox, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here (root is needed)")
    for nodes, endpoint in ("1", "127.0.0.1"), ("1:2", "localhost"):
        cluster = make_cluster(nodes, endpoint_host=endpoint)
        cluster.start("a", within=sandbox)
        assert cluster.wait_end() == {"a": 4}, cluster.story()
        check_one_error(
            cluster, "the loopback interface of this machine is down (as root: ip link set lo up)"
        )


@on_both
def test_a_second_agent_with_a_live_nodes_id_is_refused_without_effect_on_the_run(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("2:3")
    first = cluster.start_training("a", "b")

    here = cluster.start("same-machine", node_id="b")
    elsewhere = cluster.start("other-machine", node_id="b", state="state-of-another-machine")
    assert cluster.wait_end("same-machine", "other-machine") == {"same-machine": 5, "other-machine": 5}
    assert len(here.lines("node id b is in use by another agent on this machine")) == 1
    assert len(elsewhere.lines('"level": "error"')) == 1
    assert elsewhere.lines('"level": "error"', "node id b is held by a living agent")
    for refused in (here, elsewhere):
        assert "Traceback" not in refused.said()

    cluster.wait_steps(5)
    assert {step["generation"] for step in cluster.steps()} == {first}
    see_it_end(cluster, restarts=0, **{"same-machine": 5, "other-machine": 5})
