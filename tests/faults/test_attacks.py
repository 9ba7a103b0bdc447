"""Others who reach the store's port, and what they cannot do to a run that has a secret."""

from __future__ import annotations

import json
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from elastic_agent import linux
from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.node import NodeProcess
from elastic_agent.transport import Secret
from tests.other_users import (
    OTHER_UID,
    SPEAKS_TO_THE_STORE,
    as_ordinary_user,
    is_refused,
    needs_other_users,
)

from .cluster import SHORT_LEASE_S, Cluster
from .conftest import MakeCluster
from .leaks import secret_file
from .rules import see_it_end
from .test_bad_input import undisturbed

pytestmark = [pytest.mark.system, pytest.mark.prove]

ROOT = "elastic-agent/1"
HEAD_BYTES = 31
"""What stands before an authenticated record: marker, key id, code and sequence number."""


def read(data: bytes) -> Any:
    return json.loads(data[HEAD_BYTES:] if data.startswith(b"EA2") else data)


class Attacker:
    """A client of the store that has no secret, or another one."""

    def __init__(self, port: int, run_id: str | None) -> None:
        self.run_id, self.run = run_id, f"{ROOT}/r/{run_id}"
        self.store: Any = TCPStore(
            "127.0.0.1", port, None, False, timedelta(seconds=10), wait_for_workers=False
        )
        self._seal = Secret((b"the secret of mallory",)).seal()

    def newest_plan(self) -> tuple[int, dict[str, Any]]:
        version = int(self.store.get(f"{self.run}/latest"))
        return version, read(self.store.get(f"{self.run}/plan/{version}"))

    def ends_the_run(self, *, sealed: bool) -> None:
        version, envelope = self.newest_plan()
        envelope["plan"] |= {"version": version + 1, "phase": "finished", "reason": "mallory says so"}
        key, data = f"{self.run}/plan/{version + 1}", json.dumps(envelope).encode()
        self.store.set(key, self._seal.close(key, data) if sealed else data)
        self.store.set(f"{self.run}/latest", str(version + 1))

    def joins_as_rank_0(self, like: str) -> None:
        member = read(self.store.get(f"{self.run}/m/{like}"))
        member |= {
            "node_id": "mallory",
            "incarnation": "evil",
            "preferred_rank": 0,
            "bootstrap": ["127.0.0.1", 4000],
        }
        self.store.set(f"{self.run}/m/evil", json.dumps(member))
        self.store.set(f"{self.run}/l/evil", json.dumps({"incarnation": "evil", "ttl_s": SHORT_LEASE_S}))
        self.enlists("evil")

    def moves(self, source: str, name: str) -> None:
        """Copies the records of a node to another name."""
        for kind in "ml":
            self.store.set(f"{self.run}/{kind}/{name}", self.store.get(f"{self.run}/{kind}/{source}"))
        self.enlists(name)

    def drains(self, incarnation: str) -> None:
        key = f"{self.run}/m/{incarnation}"
        member = read(self.store.get(key))
        member["stop_request"] = {"kind": "drain", "reason": "mallory says so"}
        self.store.set(key, json.dumps(member))
        self.store.queue_push(f"{ROOT}/inbox", f"{self.run_id} {incarnation}")

    def writes_back(self, incarnation: str, earlier: bytes) -> None:
        self.store.set(f"{self.run}/m/{incarnation}", earlier)
        self.store.queue_push(f"{ROOT}/inbox", f"{self.run_id} {incarnation}")

    def enlists(self, name: str) -> None:
        self.store.append(f"{self.run}/roster", f"\n{name}\n")
        self.store.queue_push(f"{ROOT}/inbox", f"{self.run_id} {name}")


def incarnation(cluster: Cluster, node: str) -> str:
    return str(cluster.journal("registered", node)[0]["incarnation"])


def store_port(agent: NodeProcess) -> int:
    """Of an agent without an endpoint."""
    return int(json.loads(agent.lines("hosting the store at")[0])["message"].rpartition(":")[2])


def test_without_the_secret_a_run_can_be_neither_ended_nor_joined_nor_redirected(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster("2:4", "--secret-file", secret_file(tmp_path, "ours"))
    a = cluster.start_host("a")
    attacker = Attacker(cluster.port, cluster.run_id)
    early = attacker.store.get(f"{attacker.run}/m/{cluster.wait_event('registered', 'a')['incarnation']}")
    cluster.start("b")
    first = cluster.wait_training("a", "b")

    attacker.joins_as_rank_0(incarnation(cluster, "b"))
    attacker.moves(incarnation(cluster, "b"), "copied")
    attacker.drains(incarnation(cluster, "b"))
    attacker.ends_the_run(sealed=False)
    undisturbed(cluster, first)
    attacker.writes_back(incarnation(cluster, "a"), early)
    attacker.ends_the_run(sealed=True)
    undisturbed(cluster, first)

    for name, why in (
        ("evil", "it is not authenticated"),
        ("copied", "copied from another key"),
        (incarnation(cluster, "b"), "it is not authenticated"),
        (incarnation(cluster, "a"), "older than the one before"),
    ):
        assert len(a.lines("ignored an invalid record", f"m/{name}: ", why)) == 1, cluster.story()
    assert a.lines("ignored an invalid record", "/plan/", "it is not authenticated"), cluster.story()
    assert a.lines("ignored an invalid record", "/plan/", "with another secret"), cluster.story()
    see_it_end(cluster, restarts=0)


def test_an_agent_with_a_secret_does_not_use_a_store_without_one(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster("1:4")
    cluster.start_host("a")
    first = cluster.wait_training("a")
    cluster.start("b", 1, "--secret-file", secret_file(tmp_path, "ours"))
    assert cluster.wait_end("b") == {"b": ExitCode.NO_STORE}, cluster.story()
    assert len(cluster.agents["b"].lines("was started without a secret", "this agent has one")) == 1
    undisturbed(cluster, first)
    see_it_end(cluster, restarts=0, b=ExitCode.NO_STORE)


def test_a_run_on_one_machine_is_closed_to_other_users_by_default(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1", port=0)
    a = cluster.start("a", 2)
    first = cluster.wait_training("a")
    attacker = Attacker(store_port(a), cluster.run_id)
    attacker.joins_as_rank_0(incarnation(cluster, "a"))
    attacker.drains(incarnation(cluster, "a"))
    attacker.ends_the_run(sealed=False)
    undisturbed(cluster, first)
    assert a.lines("ignored an invalid record", "m/evil: it is not authenticated"), cluster.story()
    see_it_end(cluster, restarts=0)


@needs_other_users
def test_other_users_of_the_machine_reach_neither_store_of_an_ordinary_users_run() -> None:
    # Not below pytest's folders, which only root can search.
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), "1", port=0) as cluster:
        a = cluster.start("a", 2, within=as_ordinary_user(cluster.folder))
        first = cluster.wait_training("a")
        workers_port = int(linux.environment(cluster.pid_of("a/0"))["MASTER_PORT"])
        for port in (workers_port, store_port(a), workers_port, store_port(a)):
            assert is_refused(OTHER_UID, "127.0.0.1", port, SPEAKS_TO_THE_STORE), cluster.story()
        undisturbed(cluster, first)
        for store in ("the bootstrap store of the workers", "the store of this run"):
            user = f"another user of this machine, user id {OTHER_UID}"
            assert len(a.lines(f"refused a connection to {store} ", user)) == 1, cluster.story()
        see_it_end(cluster, restarts=0)
