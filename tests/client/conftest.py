"""The heartbeat file of an agent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from elastic_agent.client._cells import HeartbeatFile


@pytest.fixture
def cells(tmp_path: Path) -> Iterator[HeartbeatFile]:
    """The heartbeat file of a node with three slots."""
    with closing(HeartbeatFile.create(tmp_path, 3)) as file:
        yield file
