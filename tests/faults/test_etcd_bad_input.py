"""Wrong access to etcd, and other things at its endpoint: one clear line, the documented exit code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd import EtcdCluster

from .conftest import MakeCluster
from .leaks import check_no_leak
from .rules import check_one_error

pytestmark = [pytest.mark.system, pytest.mark.prove]

PASSWORD = "open sesame 6174"
"""Without the number it is in a docstring of the standard library."""


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


def test_the_etcd_password_does_not_leak(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Not the workers', not the preloaded modules', not the logs', not that of anyone who lists the processes."""
    cluster = make_cluster("1", "--etcd-user", "trainer", "--preload", "looks_around", etcd_is_new=True)
    names = check_no_leak(cluster, tmp_path, PASSWORD, "ELASTIC_AGENT_ETCD_PASSWORD")
    assert not [
        name for name in names if name in ("GRPC_VERBOSITY", "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION")
    ]
