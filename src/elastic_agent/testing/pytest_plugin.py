"""Fixtures for pytest: ``pytest_plugins = ["elastic_agent.testing.pytest_plugin"]`` in ``conftest.py`` enables them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.testing import LocalCluster, Options, Report, run_chaos


@pytest.fixture
def elastic_cluster(tmp_path: Path) -> Iterator[Callable[..., LocalCluster]]:
    """Makes clusters: ``elastic_cluster("train.py", "--epochs", "3", nodes=2)``.

    Keyword arguments are those of :class:`LocalCluster`. All processes are killed at the end of the test.
    """
    with ExitStack() as stack:
        count = 0

        def make(*script: str, **how: Any) -> LocalCluster:
            nonlocal count
            count += 1
            folder = tmp_path / f"elastic-cluster-{count}"
            folder.mkdir()
            return stack.enter_context(LocalCluster(list(script), folder, **how))

        yield make


@pytest.fixture
def chaos(tmp_path: Path) -> Callable[..., Report]:
    """Runs a script with faults: ``chaos("train.py", "{checkpoints}", nodes=2, faults=["worker-killed"])``.

    Keyword arguments are those of :class:`Options`. The test fails with the report if the script does not pass.
    """
    count = 0

    def run(*script: str, **how: Any) -> Report:
        nonlocal count
        count += 1
        options = Options(**{"folder": tmp_path / f"chaos-{count}", **how})
        report = run_chaos(list(script), options)
        if not report.passed:
            pytest.fail(report.text(), pytrace=False)
        return report

    return run
