"""The workers' bootstrap store on several machines: with a secret, only the run's own user on its machines connects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent import linux

from .conftest import MakeCluster
from .machines import Machines, built
from .rules import see_it_end
from .test_attacks import secret_file
from .test_bad_input import undisturbed

pytestmark = [pytest.mark.faults, pytest.mark.netns, pytest.mark.timeout(300)]

SPEAKS_TO_THE_STORE = """
import encodings.idna, os, socket, struct, sys  # all that cannot be read later
os.setuid(int(sys.argv[1]))
with socket.create_connection((sys.argv[2], int(sys.argv[3])), 30) as sock:
    sock.sendall(struct.pack("=BIBI", 0, 0x3C85F7CE, 13, 1))  # as a client of torch's store
    try:
        print(sock.recv(4))
    except ConnectionResetError:  # closed before what was sent was read
        print(b"")
"""


@pytest.fixture
def etcd() -> None:
    """These are about the c10d store; in etcd, the bootstrap store is the same."""


@pytest.fixture
def machines() -> Iterator[Machines]:
    with built("a", "b", "other") as found:
        yield found


def test_only_the_runs_own_user_on_its_machines_reaches_the_bootstrap_store(
    machines: Machines, make_cluster: MakeCluster, tmp_path: Path
) -> None:
    secret = secret_file(tmp_path, "run.secret")
    cluster = make_cluster("2", "--secret-file", secret, endpoint_host=machines.address("a"))
    for node in ("a", "b"):
        machines.start(cluster, node)
    first = cluster.wait_training("a", "b")
    worker = linux.environment(cluster.pid_of("a/0"))
    for machine, uid in (("a", 61004), ("b", 61004), ("other", 0), ("b", 61004)):
        command = [
            sys.executable,
            "-c",
            SPEAKS_TO_THE_STORE,
            str(uid),
            worker["MASTER_ADDR"],
            worker["MASTER_PORT"],
        ]
        done = subprocess.run(
            [*machines.within(machine), *command], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout == "b''\n", done.stdout + done.stderr
    undisturbed(cluster, first)
    host = next(node for node in ("a", "b") if worker["MASTER_ADDR"] == machines.address(node))
    store = f"refused a connection to the bootstrap store of the workers (port {worker['MASTER_PORT']})"
    for why in (
        f"{store} by another user of this machine, user id 61004",
        f"{store} from {machines.address('b')}: on that machine, no process of the agent's user owns it",
        f"{store} from {machines.address('other')}: no agent of this run is connected from there",
    ):
        cluster.wait_said(host, why)
        assert len(cluster.agents[host].lines(why)) == 1, cluster.story()
    os.kill(cluster.pid_of("b/0"), signal.SIGKILL)
    cluster.wait_training("a", "b", after=first)
    see_it_end(cluster, restarts=1)
