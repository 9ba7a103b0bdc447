"""Nodes whose memory outlives their workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.survive.support import Node


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Node]:
    """Make a node with one worker."""
    with Node(tmp_path, 1) as node:
        yield node


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Node]:
    """Make a node with two workers."""
    with Node(tmp_path, 2) as node:
        yield node
