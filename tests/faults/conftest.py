"""Clusters for fault tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    """Makes clusters that are cleared away at the end, whatever happens."""
    with ExitStack() as stack:
        count = 0

        def make(nnodes: str, *options: str, **fields: Any) -> Cluster:
            nonlocal count
            count += 1
            folder = tmp_path / f"cluster-{count}"
            folder.mkdir()
            return stack.enter_context(Cluster(folder, nnodes, options, **fields))

        yield make
