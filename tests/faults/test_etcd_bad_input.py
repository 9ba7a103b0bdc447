"""Wrong access to etcd, and other things at its endpoint: one clear line, the documented exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd import EtcdCluster

from .cluster import Cluster, descendants
from .conftest import MakeCluster
from .test_bad_input import check_one_error, web_server

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

PASSWORD = "open sesame 6174"
"""Without the number it is in a docstring of the standard library."""


def is_in_memory_of(pid: int, word: bytes) -> bool:
    """Whether a core dump of this process would have it."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, access, *_ = line.split()
            if access.startswith("rw"):
                start, end = (int(part, 16) for part in place.split("-"))
                memory.seek(start)
                if word in memory.read(end - start):
                    return True
    return False


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdCluster]:
    """An etcd that requires a login."""
    with EtcdCluster(tmp_path) as cluster:
        cluster.ctl("role", "add", "trainers")
        cluster.ctl("role", "grant-permission", "trainers", "--prefix=true", "readwrite", "/tests/")
        cluster.ctl("user", "add", "trainer", "--new-user-password", PASSWORD)
        cluster.ctl("user", "grant-role", "trainer", "trainers")
        cluster.ctl("user", "add", "stranger", "--new-user-password", PASSWORD)
        cluster.enable_auth()
        yield cluster


@pytest.fixture
def etcd(guarded: EtcdCluster) -> str:
    """These agents go there."""
    return guarded.endpoints


def test_denied_access_to_etcd_ends_the_agent_at_once_with_one_line(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("open barley\n")
    right = tmp_path / "right"
    right.write_text(f"{PASSWORD}\n")
    said = {
        (): "requires authentication",
        ("--etcd-user", "trainer", "--etcd-password-file", str(wrong)): "rejects user 'trainer'",
        ("--etcd-user", "stranger", "--etcd-password-file", str(right)): "denies user 'stranger'",
    }
    clusters = {options: make_cluster("1", *options, etcd_is_new=True) for options in said}
    for cluster in clusters.values():
        cluster.start("a")
    for options, words in said.items():
        cluster = clusters[options]
        assert cluster.wait_end() == {"a": 4}, cluster.story()
        check_one_error(cluster, words)
        assert PASSWORD not in cluster.story()


def test_another_program_at_the_endpoint_is_named(make_cluster: MakeCluster) -> None:
    with web_server() as port:
        cluster = make_cluster("1", etcd=f"127.0.0.1:{port}", etcd_is_new=True)
        cluster.start("a")
        assert cluster.wait_end() == {"a": 4}, cluster.story()
        check_one_error(cluster, f"127.0.0.1:{port}")


def test_the_etcd_password_does_not_leak(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Not the workers', not the preloaded modules', not the logs', not that of anyone who lists the processes."""
    cluster: Cluster = make_cluster(
        "1", "--etcd-user", "trainer", "--preload", "looks_around", etcd_is_new=True
    )
    shown = cluster.folder / "environment.json"
    preloaded = tmp_path / "environment-of-the-spawner.json"
    (tmp_path / "looks_around.py").write_text(
        f"import json, os\njson.dump(dict(os.environ), open({str(preloaded)!r}, 'w'))\n"
    )
    script = tmp_path / "show.py"
    script.write_text(
        f"import json, os, time\njson.dump(dict(os.environ), open({str(shown)!r} + '~', 'w'))\n"
        f"os.rename({str(shown)!r} + '~', {str(shown)!r})\n"
        f"while os.path.exists({str(shown)!r}):\n    time.sleep(0.01)\n"
    )
    agent = cluster.start("a", script=script, ELASTIC_AGENT_ETCD_PASSWORD=PASSWORD)
    cluster.wait("the script", lambda: shown.exists() or None)
    processes = descendants(agent.pid)
    assert len(processes) >= 3, "the guard, its spawner, a worker"
    for pid in (agent.pid, *processes):
        assert PASSWORD.encode() not in Path(f"/proc/{pid}/environ").read_bytes(), f"process {pid}"
    for pid in processes:
        assert not is_in_memory_of(pid, PASSWORD.encode()), f"process {pid}"
    environment = json.loads(shown.read_text())
    shown.unlink()
    assert cluster.wait_end() == {"a": 0}, cluster.story()
    assert PASSWORD not in environment.values()
    assert PASSWORD not in json.loads(preloaded.read_text()).values()
    assert not [
        name for name in environment if name in ("GRPC_VERBOSITY", "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION")
    ]
    assert PASSWORD not in agent.said()
