"""Other clients of etcd, and what they cannot do to a run that has a secret."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.etcd import EtcdCluster

from .cluster import SHORT_LEASE_S
from .conftest import MakeCluster
from .leaks import secret_file
from .rules import see_it_end
from .test_attacks import incarnation
from .test_bad_input import undisturbed

pytestmark = [pytest.mark.system, pytest.mark.prove]


@pytest.fixture
def members(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def etcd(members: EtcdCluster) -> str:
    return members.endpoints


def test_other_clients_of_etcd_can_neither_end_nor_join_nor_drain_a_run_with_a_secret(
    make_cluster: MakeCluster, members: EtcdCluster, tmp_path: Path
) -> None:
    cluster = make_cluster("2:4", "--secret-file", secret_file(tmp_path, "ours"))
    cluster.start("a")
    cluster.start("b")
    first = cluster.wait_training("a", "b")
    run = next(key for key in members.keys() if key.endswith("/plan")).removesuffix("/plan")  # noqa: SIM118

    def read(name: str) -> Any:
        value = members.ctl("get", "--print-value-only", f"{run}/{name}")
        return json.loads(value[value.index('{"') :])

    b = incarnation(cluster, "b")
    member = read(f"m/{b}")
    evil = member | {
        "node_id": "mallory",
        "incarnation": "evil",
        "preferred_rank": 0,
        "bootstrap": ["127.0.0.1", 4000],
    }
    members.ctl("put", f"{run}/m/evil", json.dumps(evil))
    members.ctl("put", f"{run}/l/evil", json.dumps({"incarnation": "evil", "ttl_s": SHORT_LEASE_S}))
    drained = member | {"stop_request": {"kind": "drain", "reason": "mallory says so"}}
    members.ctl("put", f"{run}/m/{b}", json.dumps(drained))
    plan = read("plan")
    plan |= {"version": plan["version"] + 1, "phase": "finished", "reason": "mallory says so"}
    members.ctl("put", f"{run}/plan", json.dumps(plan))
    undisturbed(cluster, first)
    for name in ("m/evil", f"m/{b}", "/plan"):
        words = "ignored an invalid record", name, "it is not authenticated"
        assert any(agent.lines(*words) for agent in cluster.agents.values()), cluster.story()

    cluster.start("c", 1, "--secret-file", secret_file(tmp_path, "theirs"))
    assert cluster.wait_end("c") == {"c": ExitCode.NO_STORE}, cluster.story()
    assert (
        len(cluster.agents["c"].lines("has another secret", "give every agent the same --secret-file")) == 1
    )
    see_it_end(cluster, restarts=0, c=ExitCode.NO_STORE)
