"""A store for each test."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

import pytest

from elastic_agent.transport.addresses import shorten_lookups

from .support import Scene

shorten_lookups()  # as agents do: here too, a lost packet must not cost more than it has to


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.host.close()


@pytest.fixture(scope="session", autouse=True)
def _no_server_stays_behind() -> Iterator[None]:
    """The standard library leaves the server it forks processes from to end by itself, after us."""
    yield
    server: Any = forkserver
    server._forkserver._stop()
    tracker: Any = resource_tracker
    tracker._resource_tracker._stop()
