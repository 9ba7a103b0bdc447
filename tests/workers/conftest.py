from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.linux import boottime_s
from elastic_agent.workers.guard.client import Guard
from tests.workers.support import PATIENCE_S, Driver, News, StandIn


@pytest.fixture
def driver() -> Iterator[Driver]:
    """Run a guard whose lease has long to run."""
    guard = Guard.start(kill_patience_s=PATIENCE_S)
    guard.set_deadline(boottime_s() + 1000)
    yield Driver(guard)
    guard.close(PATIENCE_S)


@pytest.fixture
def agent() -> Iterator[StandIn]:
    """Run an agent process of its own, with a guard whose lease has long to run."""
    agent = StandIn()
    yield agent
    agent.close()


@pytest.fixture
def news(tmp_path: Path) -> Iterator[News]:
    news = News(tmp_path)
    yield news
    news.close()
