"""Clusters for fault tests, on every store there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.etcd import EtcdCluster, need_etcd

from .cluster import SHORT_LEASE_S, SHORT_MARGIN_S, Cluster
from .machines import Machines, built

MakeCluster = Callable[..., Cluster]


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of an etcd with one member, for all tests that leave it alone."""
    need_etcd()
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster.endpoints


@pytest.fixture
def etcd(request: pytest.FixtureRequest) -> str | None:
    """Return where the agents meet: the members of an etcd, or None for a c10d store, as most tests do.

    What happens on the nodes, and what the coordinator decides, is the same with either.
    """
    store = getattr(request, "param", "c10d")
    return str(request.getfixturevalue("shared_etcd")) if store == "etcd" else None


on_both = pytest.mark.parametrize("etcd", ["c10d", "etcd"], indirect=True)
"""For tests that stand for all others in etcd."""
on_both_to_prove = pytest.mark.parametrize(
    "etcd", ["c10d", pytest.param("etcd", marks=pytest.mark.prove)], indirect=True
)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[EtcdCluster]:
    """An etcd of three members, for this test alone."""
    with EtcdCluster(tmp_path, 3) as members:
        yield members


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Three machines for nodes, and one for a server of the store or an etcd."""
    with built("a", "b", "c", "head") as machines:
        yield machines


@pytest.fixture
def make_cluster(request: pytest.FixtureRequest, tmp_path: Path, etcd: str | None) -> Iterator[MakeCluster]:
    """Makes clusters that are cleared away at the end, whatever happens."""
    defaults: dict[str, Any] = {"etcd": etcd}
    if request.node.get_closest_marker("prove"):
        defaults |= {"lease_s": SHORT_LEASE_S, "margin_s": SHORT_MARGIN_S}
    with ExitStack() as stack:
        count = 0

        def make(nnodes: str, *options: str, **fields: Any) -> Cluster:
            nonlocal count
            count += 1
            folder = tmp_path / f"cluster-{count}"
            folder.mkdir()
            return stack.enter_context(Cluster(folder, nnodes, options, **{**defaults, **fields}))

        yield make
