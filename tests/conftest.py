"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_server_stays_behind() -> Iterator[None]:
    """The standard library leaves the server it forks processes from to end by itself, after us."""
    yield
    server: Any = forkserver
    tracker: Any = resource_tracker
    server._forkserver._stop()
    tracker._resource_tracker._stop()
