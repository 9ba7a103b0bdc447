"""Checks the remedies for a store that is not reached: by what keeps a node from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.rendezvous.backends import BackendOptions, open_backend
from elastic_agent.transport import Obstacle, how_to_reach
from elastic_agent.values import Endpoint, EtcdAccess
from tests.etcd import need_etcd

FIRST = {
    Obstacle.REFUSED: "start the same command on 10.0.0.7; if it runs there, compare its port with 29400, "
    "then check its address and its firewall",
    Obstacle.NO_ANSWER: "if 10.0.0.7 is down, switch it on and start the same command there; if it is up, open the "
    "port there: firewall-cmd --add-port=29400/tcp, or ufw allow 29400/tcp",
    Obstacle.UNREACHABLE: "check that the endpoint is an address of one of the machines that is up",
    Obstacle.CLOSED: "stop what `ss -ltnp` on 10.0.0.7 shows for port 29400, or use another port",
    Obstacle.SILENT: "stop what `ss -ltnp` on 10.0.0.7 shows for port 29400, or use another port",
    Obstacle.OWN_NETWORK: "if the network of this machine is as it should be, check that the endpoint",
}
LATER = {
    Obstacle.REFUSED: "start the same command on lab1 again",
    Obstacle.NO_ANSWER: "if lab1 is down, switch it on and start the same command there; if it is up, open the port",
    Obstacle.UNREACHABLE: "connect lab1 to the network again, or switch it on and start the same command",
    Obstacle.SILENT: "continue what hosts it on lab1 (kill -CONT PID), or stop that and start the same command",
}
UNREACHABLE_HOST = """
import subprocess
from elastic_agent.transport import UnreachableError, connect
subprocess.run("ip link set lo up && ip route add unreachable 10.0.0.7", shell=True, check=True)
try:
    connect("10.0.0.7", 29400, 5.0)
except UnreachableError as error:
    print(error.obstacle.name)
"""


def advice(folder: Path, obstacle: Obstacle, *, of_etcd: bool = False) -> str:
    endpoint, access = Endpoint("10.0.0.7", 29400), EtcdAccess() if of_etcd else None
    backend = open_backend(BackendOptions(endpoint, folder, 5.0, 1.0), access)
    return backend.how_to_reach(obstacle, False, ())


@pytest.mark.parametrize("obstacle", Obstacle, ids=lambda obstacle: obstacle.name)
def test_a_store_that_never_answered_has_one_remedy_for_each_obstacle(
    tmp_path: Path, obstacle: Obstacle
) -> None:
    text = advice(tmp_path, obstacle)
    assert {words for words in FIRST.values() if text.startswith(words)} == {
        *filter(None, [FIRST.get(obstacle)])
    }
    is_said_by_the_error = obstacle in (Obstacle.UNKNOWN_NAME, Obstacle.EXPLAINED)
    assert (text == "") is is_said_by_the_error


@pytest.mark.parametrize("obstacle", LATER, ids=lambda obstacle: obstacle.name)
def test_a_store_that_had_answered_is_at_the_right_endpoint(obstacle: Obstacle) -> None:
    text = how_to_reach(obstacle, "lab1", 29400, had_answered=True)
    assert text.startswith(LATER[obstacle])
    assert "check that the endpoint" not in text
    assert "another" not in text


def test_etcd_is_to_be_started_where_it_is_refused(tmp_path: Path) -> None:
    assert advice(tmp_path, Obstacle.REFUSED, of_etcd=True).startswith("start etcd on 10.0.0.7;")


@pytest.mark.parametrize("had_answered", [False, True])
def test_data_are_to_be_removed_only_of_members_that_had_answered(tmp_path: Path, had_answered: bool) -> None:
    need_etcd()
    others = Endpoint("10.0.0.8", 29400), Endpoint("10.0.0.9", 29400)
    endpoint = Endpoint("10.0.0.7", 29400, others)
    backend = open_backend(BackendOptions(endpoint, tmp_path, 5.0, 1.0), None)
    text = backend.how_to_reach(Obstacle.REFUSED, had_answered, ())
    assert text.startswith("a majority of these machines must be up: start the same command there")
    assert ("remove the folder members" in text) is had_answered


def test_a_machine_that_the_network_calls_unreachable_is_told_from_one_that_is_silent() -> None:
    alone = ("unshare", "--net")
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here (root is needed)")
    done = subprocess.run([*alone, sys.executable, "-c", UNREACHABLE_HOST], capture_output=True, text=True)
    assert done.stdout == "UNREACHABLE\n", done.stderr
