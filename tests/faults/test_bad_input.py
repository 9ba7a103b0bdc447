"""Invalid input from the network or the user: reported clearly, without effect on others."""

from __future__ import annotations

import json
import pickle
import random
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from elastic_agent.protocol.codec import MAX_RECORD_BYTES

from .cluster import SHORT_LEASE_S, Cluster
from .conftest import MakeCluster
from .rules import check_nothing_left, see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]


ROOT = "elastic-agent/2"


BEYOND_ALL = 2**53
HISTORY_BEYOND_ALL = {
    "generation": BEYOND_ALL,
    "world": {
        "generation": BEYOND_ALL,
        "seats": [["evil", "evil", "127.0.0.1", 1, 0, "default"]],
        "bootstrap": ["127.0.0.1", 4000],
        "bootstrap_node": "evil",
    },
}
"""The highest generation that a record may hold: no plan can go above it."""


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._path), "w"))


def undisturbed(cluster: Cluster, generation: int) -> None:
    """Training goes on in the same generation while every record is read at least once more."""
    now_s = cluster.steps()[-1]["boottime_s"]
    cluster.wait("training to go on", lambda: cluster.steps()[-1]["boottime_s"] > now_s + 1.5 * SHORT_LEASE_S)
    assert {one["generation"] for one in cluster.steps()} == {generation}


def test_bad_records_in_the_store_are_reported_once_and_ignored(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2:3")
    a = cluster.start_host("a")
    cluster.start("b")
    first = cluster.wait_training("a", "b")
    store: Any = TCPStore(
        "127.0.0.1", cluster.port, None, False, timedelta(seconds=10), wait_for_workers=False
    )
    run = f"{ROOT}/r/{cluster.run_id}"
    run += f"/{store.get(f'{run}/life').decode()}"
    real = json.loads(store.get(f"{run}/m/{cluster.journal('registered', 'b')[0]['incarnation']}"))
    lease = {"incarnation": "evil", "ttl_s": SHORT_LEASE_S}
    bad: dict[str, str | bytes] = {
        "malformed": '{"node_id": "evil"',
        "oversized": json.dumps({**real, "role": "x" * MAX_RECORD_BYTES}),
        "foreign": json.dumps({**real, "incarnation": "foreign", "version": 99}),
        "stranger": json.dumps({**real, "incarnation": "somebody-else"}),
        "greedy": json.dumps({**real, "incarnation": "greedy", "slots": 10**9}),
        "prophet": json.dumps({**real, "incarnation": "prophet", "history": HISTORY_BEYOND_ALL}),
        "pickled": pickle.dumps(Bomb(cluster.folder / "exploded")),
    }
    for name, record in bad.items():
        store.set(f"{run}/m/{name}", record)
        store.set(f"{run}/l/{name}", json.dumps({**lease, "incarnation": name}))
        store.queue_push(f"{ROOT}/inbox", f"{cluster.run_id} {name}")
    for line in ("../../etc/passwd", "-", "\x1b[2J", "y" * 2_000):
        store.set(f"{ROOT}/r/{line}/life", line)
        store.set(f"{ROOT}/r/{line}/{line}/m/{line}", line)
        store.queue_push(f"{ROOT}/inbox", line)

    undisturbed(cluster, first)
    for name in bad:
        assert len(a.lines("ignored an invalid record", f"m/{name}")) == 1, cluster.story()
    assert not (cluster.folder / "exploded").exists()
    see_it_end(cluster, restarts=0)


def test_garbage_sent_to_the_stores_port_does_not_affect_the_run(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2:3")
    cluster.start_host("a")
    cluster.start("b")
    first = cluster.wait_training("a", "b")
    dice = random.Random(20)
    with ExitStack() as open_until_the_end:
        for garbage in (
            b"",
            b"GET / HTTP/1.1\r\nHost: there\r\n\r\n",
            bytes(5000),
            b"\xff" * 100_000,
            *(dice.randbytes(dice.randrange(1, 2000)) for _ in range(20)),
        ):
            connection = socket.create_connection(("127.0.0.1", cluster.port), 5)
            open_until_the_end.enter_context(connection)
            with suppress(OSError):  # the store may hang up on us meanwhile
                connection.sendall(garbage)
        undisturbed(cluster, first)
    see_it_end(cluster, restarts=0)


@contextmanager
def web_server() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def silent_listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextmanager
def other_store() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield store.port


def test_another_program_at_the_endpoint_is_identified(make_cluster: MakeCluster) -> None:
    with web_server() as web, silent_listener() as silent, other_store() as store:
        said = {
            web: "is used by another program, which is not a store",
            silent: "or another program listens there: `ss -ltnp` on that machine shows which",
            store: "not created by elastic-agent",
        }
        clusters = {
            port: make_cluster("1", "--rdzv-conf", "join_timeout=3", port=port, endpoint_host="127.0.0.1")
            for port in said
        }
        for cluster in clusters.values():
            cluster.start("a")
        for port, words in said.items():
            cluster = clusters[port]
            assert cluster.wait_end() == {"a": 4}, cluster.story()
            check_one_error(cluster, f"127.0.0.1:{port}", words)


def check_one_error(cluster: Cluster, *words: str) -> None:
    """The agent ended with one clear line and without having started anything."""
    for agent in cluster.agents.values():
        assert len(agent.lines('"level": "error"')) == 1, cluster.story()
        assert agent.lines('"level": "error"', *words), cluster.story()
        assert "Traceback" not in agent.said()
    assert cluster.born() == []
    check_nothing_left(cluster)


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nproc-per-node", "0"), ("--nproc-per-node", "0")),
        (("--nnodes", "3:2"), ("--nnodes", "3:2")),
        (("--rdzv-id", "what/../ever"), ("--rdzv-id", "what/../ever")),
        (("--rdzv-id", "line\nbreak"), ("--rdzv-id",)),
        (("--node-id", ""), ("--node-id",)),
        (("--lease-ttl", "soon"), ("--lease-ttl", "soon")),
    ],
)
def test_an_invalid_value_is_reported_in_one_line(
    make_cluster: MakeCluster, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    cluster = make_cluster("1")
    check_usage_error(cluster, cluster.start("a", 1, *options).name, *words)


def test_a_missing_script_is_reported_in_one_line(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1")
    missing = cluster.folder / "missing.py"
    check_usage_error(
        cluster, cluster.start("a", script=missing).name, "missing.py", "does not exist; expected"
    )


def check_usage_error(cluster: Cluster, name: str, *words: str) -> None:
    assert cluster.wait_end() == {name: 2}, cluster.story()
    lines = cluster.agents[name].said().splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines
    check_nothing_left(cluster)
