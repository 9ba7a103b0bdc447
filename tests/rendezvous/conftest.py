"""A stage for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.transport.addresses import shorten_lookups

from .torchruns import Stage, open_stage

shorten_lookups()  # as agents do: here too, a lost packet must not cost more than it has to


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as opened:
        yield opened
