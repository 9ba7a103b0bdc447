"""Clusters for fault tests, on every store there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.etcd import EtcdCluster, need_etcd

from .cluster import Cluster

MakeCluster = Callable[..., Cluster]


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of an etcd with one member, for all tests that leave it alone."""
    need_etcd()
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster.endpoints


@pytest.fixture(params=["c10d", "etcd"])
def etcd(request: pytest.FixtureRequest) -> str | None:
    """Where the agents meet: the members of an etcd, or None for a c10d store.

    Tests of what only one of the stores does say so by a fixture of this name of their own.
    """
    return str(request.getfixturevalue("shared_etcd")) if request.param == "etcd" else None


on_c10d = pytest.mark.parametrize("etcd", ["c10d"], indirect=True)
"""For tests of what happens on the nodes, where it does not matter which store they meet in."""


@pytest.fixture
def make_cluster(tmp_path: Path, etcd: str | None) -> Iterator[MakeCluster]:
    """Makes clusters that are cleared away at the end, whatever happens."""
    with ExitStack() as stack:
        count = 0

        def make(nnodes: str, *options: str, **fields: Any) -> Cluster:
            nonlocal count
            count += 1
            folder = tmp_path / f"cluster-{count}"
            folder.mkdir()
            return stack.enter_context(Cluster(folder, nnodes, options, **{"etcd": etcd, **fields}))

        yield make
