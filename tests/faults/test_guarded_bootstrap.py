"""The workers' bootstrap store on several machines: with a secret, only the run's own user on its machines connects."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent import linux
from tests.other_users import OTHER_UID, SPEAKS_TO_THE_STORE, as_ordinary_user, is_refused

from .cluster import Cluster
from .leaks import secret_file
from .machines import Machines, built
from .rules import see_it_end
from .test_bad_input import undisturbed

pytestmark = [pytest.mark.system, pytest.mark.prove]


@pytest.fixture
def machines() -> Iterator[Machines]:
    with built("a", "b", "other") as found:
        yield found


@pytest.fixture
def cluster(machines: Machines) -> Iterator[Cluster]:
    # Not below pytest's folders, which only root can search.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = "--secret-file", secret_file(folder, "run.secret")
        with Cluster(folder, "2", options, endpoint_host=machines.address("a")) as made:
            yield made


def test_only_the_runs_own_user_on_its_machines_reaches_the_bootstrap_store(
    cluster: Cluster, machines: Machines
) -> None:
    for node in ("a", "b"):
        machines.start(cluster, node, as_ordinary_user(cluster.folder))
    first = cluster.wait_training("a", "b")
    worker = linux.environment(cluster.pid_of("a/0"))
    store = worker["MASTER_ADDR"], int(worker["MASTER_PORT"])
    for machine, uid in (("a", OTHER_UID), ("b", OTHER_UID), ("other", 0), ("b", OTHER_UID)):
        assert is_refused(uid, *store, SPEAKS_TO_THE_STORE, machines.within(machine)), cluster.story()
    undisturbed(cluster, first)
    host = next(node for node in ("a", "b") if worker["MASTER_ADDR"] == machines.address(node))
    refused = f"refused a connection to the bootstrap store of the workers (port {worker['MASTER_PORT']})"
    for why in (
        f"{refused} by another user of this machine, user id {OTHER_UID}",
        f"{refused} from {machines.address('b')}: on that machine, no process of the agent's user owns it",
        f"{refused} from {machines.address('other')}: no agent of this run is connected from there",
    ):
        cluster.wait_said(host, why)
        assert len(cluster.agents[host].lines(why)) == 1, cluster.story()
    os.kill(cluster.pid_of("b/0"), signal.SIGKILL)
    cluster.wait_training("a", "b", after=first)
    see_it_end(cluster, restarts=1)
