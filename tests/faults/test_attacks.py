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

from .cluster import LEASE_S, Cluster
from .conftest import MakeCluster
from .leaks import check_no_leak
from .rules import see_it_end
from .test_bad_input import undisturbed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

ROOT, RUN = "elastic-agent/1", "elastic-agent/1/r/job"
HEAD_BYTES = 31
"""What stands before an authenticated record: marker, key id, code and sequence number."""


def read(data: bytes) -> Any:
    return json.loads(data[HEAD_BYTES:] if data.startswith(b"EA2") else data)


def secret_file(folder: Path, name: str) -> str:
    file = folder / name
    file.touch(mode=0o600)
    file.write_text(f"{name}: 0123456789abcdef")
    return str(file)


class Attacker:
    """A client of the store that has no secret, or another one."""

    def __init__(self, port: int) -> None:
        self.store: Any = TCPStore(
            "127.0.0.1", port, None, False, timedelta(seconds=10), wait_for_workers=False
        )
        self._seal = Secret((b"the secret of mallory",)).seal()

    def newest_plan(self) -> tuple[int, dict[str, Any]]:
        version = int(self.store.get(f"{RUN}/latest"))
        return version, read(self.store.get(f"{RUN}/plan/{version}"))

    def ends_the_run(self, *, sealed: bool) -> None:
        version, envelope = self.newest_plan()
        envelope["plan"] |= {"version": version + 1, "phase": "finished", "reason": "mallory says so"}
        key, data = f"{RUN}/plan/{version + 1}", json.dumps(envelope).encode()
        self.store.set(key, self._seal.close(key, data) if sealed else data)
        self.store.set(f"{RUN}/latest", str(version + 1))

    def joins_as_rank_0(self, like: str) -> None:
        member = read(self.store.get(f"{RUN}/m/{like}"))
        member |= {
            "node_id": "mallory",
            "incarnation": "evil",
            "preferred_rank": 0,
            "bootstrap": ["127.0.0.1", 4000],
        }
        self.store.set(f"{RUN}/m/evil", json.dumps(member))
        self.store.set(f"{RUN}/l/evil", json.dumps({"incarnation": "evil", "ttl_s": LEASE_S}))
        self.enlists("evil")

    def moves(self, source: str, name: str) -> None:
        """Copies the records of a node to another name."""
        for kind in "ml":
            self.store.set(f"{RUN}/{kind}/{name}", self.store.get(f"{RUN}/{kind}/{source}"))
        self.enlists(name)

    def drains(self, incarnation: str) -> None:
        key = f"{RUN}/m/{incarnation}"
        member = read(self.store.get(key))
        member["stop_request"] = {"kind": "drain", "reason": "mallory says so"}
        self.store.set(key, json.dumps(member))
        self.store.queue_push(f"{ROOT}/inbox", f"job {incarnation}")

    def writes_back(self, incarnation: str, earlier: bytes) -> None:
        self.store.set(f"{RUN}/m/{incarnation}", earlier)
        self.store.queue_push(f"{ROOT}/inbox", f"job {incarnation}")

    def enlists(self, name: str) -> None:
        self.store.append(f"{RUN}/roster", f"\n{name}\n")
        self.store.queue_push(f"{ROOT}/inbox", f"job {name}")


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
    attacker = Attacker(cluster.port)
    early = attacker.store.get(f"{RUN}/m/{cluster.wait_event('registered', 'a')['incarnation']}")
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


def test_agents_without_the_secret_are_turned_away_with_one_line(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster("1:4")
    ours = "--secret-file", secret_file(tmp_path, "ours")
    a = cluster.start_host("a", 1, *ours)
    first = cluster.wait_training("a")
    cluster.start("without")
    cluster.start("other", 1, "--secret-file", secret_file(tmp_path, "theirs"))
    ends = cluster.wait_end("without", "other")
    assert set(ends.values()) == {ExitCode.NO_STORE}, cluster.story()
    without, other = cluster.agents["without"], cluster.agents["other"]
    assert len(without.lines("accepts only agents with its secret", "pass the same --secret-file")) == 1
    assert len(other.lines("has another secret", "give every agent the same --secret-file")) == 1
    assert len(a.lines("refused an agent", "another secret")) == 1, cluster.story()
    undisturbed(cluster, first)
    cluster.start("c", 1, *ours)
    cluster.wait_training("a", "c", after=first)
    for agent in (a, cluster.agents["c"]):
        agent.terminate()
    cluster.wait_end("a", "c")


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
    attacker = Attacker(store_port(a))
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


def test_the_secret_does_not_leak(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster("1", "--preload", "looks_around")
    check_no_leak(cluster, tmp_path, "the-secret-of-this-run", "ELASTIC_AGENT_SECRET")
