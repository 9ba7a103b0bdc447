"""Which tests a run selects, and which of them are run by one process.

``make test`` leaves out what is marked ``prove``, and takes one share in turn of what is marked ``rotates(shares)``;
``make prove`` runs everything.
"""

from __future__ import annotations

import time
from itertools import count
from typing import Any
from zlib import crc32

import pytest
from xdist.scheduler import LoadScopeScheduling

DAY_S = 24 * 3600
APART = {
    *(
        f"tests/faults/test_{name}.py"
        for name in ("commands", "crash_loops", "etcd_faults", "node_faults", "notices")
    ),
    *(f"tests/faults/test_{name}.py" for name in ("store_faults", "warm_faults", "worker_faults")),
    *(f"tests/integrations/test_{name}.py" for name in ("accelerate", "fabric", "lightning", "transformers")),
    "tests/testing/test_chaos.py",
}
"""Files whose tests take long and share nothing."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that select tests."""
    group = parser.getgroup("selection")
    group.addoption("--prove", action="store_true", help="run every test and every share")
    group.addoption(
        "--turn", type=int, metavar="N", help="which share to run of tests that rotate (default: the day's)"
    )


def choose_turn(config: pytest.Config) -> None:
    """Settle the turn, once for all processes of a run: pytest-xdist hands them the options."""
    if config.option.turn is None:
        config.option.turn = int(time.time() // DAY_S)


def pytest_report_header(config: pytest.Config) -> str:
    """Return the line that says how to select the same tests again."""
    if config.option.prove:
        return "selection: everything"
    return (
        f"selection: turn {config.option.turn} of the tests that rotate (again: --turn {config.option.turn})"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not of this run, unless it is named, and begin with what takes longest."""
    named = config.option.keyword or any("::" in argument for argument in config.args)
    if not config.option.prove and not named:
        kept = [item for item in items if item.get_closest_marker("prove") is None]
        kept = _of_this_turn(kept, config.option.turn)
        config.hook.pytest_deselected(items=sorted({*items} - {*kept}, key=lambda item: item.nodeid))
        items[:] = kept
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # stable


def _of_this_turn(items: list[pytest.Item], turn: int) -> list[pytest.Item]:
    numbers = {file: count(crc32(file.encode())) for file in map(_file, items)}
    kept: list[pytest.Item] = []
    for item in items:
        rotates = item.get_closest_marker("rotates")
        if rotates is not None and (next(numbers[_file(item)]) - turn) % rotates.args[0] != 0:
            continue
        kept.append(item)
    return kept


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class _Schedule(LoadScopeScheduling):
    """Hands the tests of a file to one process, for what they share; those that take long and share nothing, to any."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if file in APART else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Return who hands out the tests of a run with ``--dist loadfile``."""
    return _Schedule(config, log) if config.option.dist == "loadfile" else None
