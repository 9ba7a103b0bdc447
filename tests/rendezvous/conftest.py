"""A stage for each test, and the log as it was before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.logs import setup
from elastic_agent.values import Endpoint
from tests.ports import free_port

from .torchruns import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path) as opened:
        yield opened


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint("127.0.0.1", free_port())


@pytest.fixture(autouse=True)
def _log_is_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A handler for torchrun sets up a log beside that of this process."""
    monkeypatch.setattr(setup, "_log", setup._Log())
    log = logging.getLogger("elastic_agent")
    handlers, propagate, level = log.handlers, log.propagate, log.level
    yield
    log.handlers, log.propagate = handlers, propagate
    log.setLevel(level)
