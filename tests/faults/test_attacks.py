"""Others who reach the ports of a run, and what they cannot do to one that has a secret."""

from __future__ import annotations

import json
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from elastic_agent import linux
from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.node import NodeProcess
from elastic_agent.transport import Secret, WrongKeyError, c10d
from elastic_agent.values import Endpoint
from tests.loop_thread import in_loop
from tests.other_users import (
    OTHER_UID,
    SPEAKS_TO_THE_STORE,
    as_ordinary_user,
    is_refused,
    needs_other_users,
)

from .cluster import Cluster
from .conftest import MakeCluster
from .leaks import secret_file
from .rules import see_it_end
from .test_bad_input import undisturbed

pytestmark = [pytest.mark.system, pytest.mark.prove]

ATTEMPTS_S = 2.0


def store_port(agent: NodeProcess) -> int:
    """Of an agent without an endpoint."""
    return int(json.loads(agent.lines("hosting the store at")[0])["message"].rpartition(":")[2])


def test_without_the_secret_nobody_speaks_to_the_store_of_a_run(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster("2:4", "--secret-file", secret_file(tmp_path, "ours"))
    a = cluster.start_host("a")
    cluster.start("b")
    first = cluster.wait_training("a", "b")

    endpoint = Endpoint("127.0.0.1", cluster.port)
    attempts = timedelta(seconds=ATTEMPTS_S)
    with pytest.raises(RuntimeError):
        TCPStore(endpoint.host, endpoint.port, None, False, attempts, wait_for_workers=False)
    for secret in (None, Secret((b"the secret of mallory",))):
        with pytest.raises(WrongKeyError):
            in_loop(c10d.open_table(endpoint, ATTEMPTS_S, secret))
    undisturbed(cluster, first)
    assert len(a.lines("refused a connection to the store of this run", "from 127.0.0.1")) == 1, (
        cluster.story()
    )
    see_it_end(cluster, restarts=0)


def test_agents_with_another_secret_or_none_end_and_say_which_side_has_which(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster("1:4")
    ours, theirs = secret_file(tmp_path, "ours"), secret_file(tmp_path, "theirs")
    cluster.start_host("a", 1, "--secret-file", ours)
    first = cluster.wait_training("a")
    cluster.start("b", 1, "--secret-file", theirs)
    cluster.start("c", 1)
    refused = {"b": ExitCode.NO_STORE, "c": ExitCode.NO_STORE}
    assert cluster.wait_end("b", "c") == refused, cluster.story()
    assert len(cluster.agents["b"].lines("has another secret (key id", "than this agent (key id")) == 1
    assert len(cluster.agents["c"].lines("accepts only agents with its secret", "this agent has none")) == 1
    undisturbed(cluster, first)
    see_it_end(cluster, restarts=0, **refused)


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
