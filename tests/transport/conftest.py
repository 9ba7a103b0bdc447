"""A store for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_agent.transport.addresses import shorten_lookups

from .support import Scene

shorten_lookups()  # as agents do: here too, a lost packet must not cost more than it has to


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.host.close()
