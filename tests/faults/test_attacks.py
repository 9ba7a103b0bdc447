"""Others who reach the ports of a run, and what they cannot do to one that has a secret."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from elastic_agent import linux
from elastic_agent.testing.processes import NodeProcess
from tests.other_users import (
    OTHER_UID,
    SPEAKS_TO_THE_STORE,
    as_ordinary_user,
    is_refused,
    needs_other_users,
)

from .cluster import Cluster
from .rules import see_it_end, undisturbed

pytestmark = [pytest.mark.system, pytest.mark.prove]


def store_port(agent: NodeProcess) -> int:
    """Of an agent without an endpoint."""
    return int(json.loads(agent.lines("hosting the store at")[0])["message"].rpartition(":")[2])


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
