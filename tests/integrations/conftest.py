"""A world of agents that changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One to four nodes; a module's OPTIONS are their agents'."""
    with Cluster(tmp_path, "1:4", getattr(request.module, "OPTIONS", ())) as made:
        yield made
